"""Every cross-device op, of every value, to every destination: the result is numpy's."""

import dataclasses
import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import devices, on
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

import jaxcoll as jc

WORKERS = {1: 1, 2: 2, 3: 3, 4: 2, 5: 1, 6: 3, 7: 7, 8: 2}
"""Of so many devices, how many workers: of one, two, three, four or five devices each."""


def to_one(*args):
    return lambda n: jc.distribute.ReductionToOneDevice(*args)


def all_reduce(*args):
    return lambda n: jc.distribute.AllReduceCrossDeviceOps(*args)


def collective(**options):
    return lambda n: jc.distribute.CollectiveAllReduce(
        devices(n), n, jc.CommunicationOptions(**options)
    )


def workers(*algorithms, **more):
    """Each algorithm in two shards, for arrays up to 100 bytes but for the last."""

    def make(n):
        count = WORKERS[n]
        limits = [*[100] * (len(algorithms) - 1), -1]
        spec = [(a, min(2, count), x) for a, x in zip(algorithms, limits, strict=True)]
        names = [f"/job:worker/replica:0/task:{i}" for i in range(count)]
        return jc.MultiWorkerAllReduce(names, n // count, spec, **more)

    return make


KINDS = {
    "one": to_one(),
    "one-cpu0": to_one("/device:CPU:0"),
    "one-add_n": to_one(None, functools.partial(functools.reduce, operator.add)),
    "nccl": lambda n: jc.NcclAllReduce(),
    "nccl-packs0": lambda n: jc.NcclAllReduce(num_packs=0),
    "nccl-packs3": lambda n: jc.NcclAllReduce(num_packs=3),
    "hierarchical-packs8": lambda n: jc.distribute.HierarchicalCopyAllReduce(num_packs=8),
    "hierarchical-small": all_reduce("hierarchical_copy", 0, 100, 10),
    "collective": collective(),
    "collective-ring": collective(implementation="ring"),
    "collective-nccl": collective(implementation="NCCL"),
    "collective-packed": collective(bytes_per_pack=8),
    "workers": workers("pscpu/pscpu"),
    "workers-pack": workers("pscpu/pscpu", num_packs=1),
    "workers-aggregation": workers("pscpu/pscpu", agg_small_grads_max_bytes=100),
    "workers-specs": workers("pscpu/pscpu", "xring"),
    **{alg: all_reduce(alg, 2) for alg in ("native", "ring", "rechd", "pscpu")},
    **{f"workers {alg}": workers(alg) for alg in ("nccl", "xring", "pscpu", "psgpu", "nccl/xring",
                                                  "nccl/rechd", "nccl/pscpu")},
}  # fmt: skip
DTYPES = ("float32", "float16", "bfloat16", "int8", "int32", "uint8", "complex64")
PLACES = ("own", "turned", "others", "more", "one", "device", "array")


@dataclasses.dataclass(frozen=True)
class Value:
    """A value to be reduced: rows, copies, or one that belongs to no replica."""

    form: str  # "rows", "copies" or "plain"
    leaves: tuple[tuple[str, tuple[int, ...]], ...]  # dtypes and shapes; "sparse": a table's rows
    seed: int

    def parts(self, n):
        """The leaves of each replica, as numpy has them; sparse ones as (rows, indices)."""
        rng = np.random.default_rng([self.seed, n])
        count = n if self.form == "rows" else 1
        parts = []
        for _ in range(count):
            part = []
            for dtype, shape in self.leaves:
                if dtype == "sparse":
                    k = rng.integers(0, 4)
                    part.append((rng.integers(-4, 5, (k, 2)).astype("f"), rng.integers(0, 5, k)))
                else:
                    low = 0 if dtype.startswith("u") else -4
                    part.append(rng.integers(low, 5, shape).astype(jnp.dtype(dtype)))
            parts.append(part)
        return parts if self.form == "rows" else parts * n

    def given(self, n):
        """The value as it is passed."""
        parts = [[sparse_of(x) for x in part] for part in self.parts(n)]
        if self.form == "plain":
            plain = parts[0][0]
            is_default = getattr(plain, "dtype", None) in ("float32", "int32", "complex64")
            return plain.item() if self.seed % 2 and is_default and not plain.ndim else plain
        kind = jc.PerReplica if self.form == "rows" else jc.distribute.Mirrored
        return kind([{"leaves": part} for part in parts], devices=devices(n))

    def expected(self, n, op):
        """The sum or mean of each leaf, in 64 bits, and the type that it has."""
        parts = self.parts(n)[:1] if self.form == "plain" else self.parts(n)
        for k, (dtype, _) in enumerate(self.leaves):
            column = [dense(part[k]).astype(np.complex128) for part in parts]
            integer = dtype.startswith(("int", "uint"))
            like = "float32" if dtype == "sparse" or (integer and op == "mean") else dtype
            yield sum(column) / (len(column) if op == "mean" else 1), jnp.dtype(like)


def sparse_of(part):
    if not isinstance(part, tuple):
        return part
    return jc.IndexedSlices(part[0], part[1].astype("i4"), (5, 2))


def dense(part):
    if not isinstance(part, tuple):
        return np.asarray(part)
    table = np.zeros((5, 2), "f")
    np.add.at(table, part[1], part[0])
    return table


def destination(place, n, value):
    """A destination by its name, and the devices that it stands for."""
    line = jax.devices()
    if place == "own" and isinstance(value, jc.DistributedValues):
        return value, value.devices
    ids = {
        "own": range(n),
        "turned": range(n)[::-1],
        "others": range(8 - n, 8),
        "more": range(min(n + 1, 8)),
    }
    if place in ids:
        return on([line[i] for i in ids[place]]), tuple(line[i] for i in ids[place])
    named = {"one": "/device:CPU:6", "device": line[3], "array": jax.device_put(0.0, line[5])}
    return named[place], (line[{"one": 6, "device": 3, "array": 5}[place]],)


leaf = st.tuples(
    st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=2).map(tuple)
) | st.just(("sparse", ()))
value = st.builds(
    Value,
    form=st.sampled_from(("rows", "rows", "copies", "plain")),
    leaves=st.lists(leaf, min_size=1, max_size=3).map(tuple),
    seed=st.integers(0, 99),
)


@pytest.mark.tensorflow("B1", "B2", "B4", "B5", "B7")
@pytest.mark.tensorflow("C1", "C2", "C4")
@pytest.mark.tensorflow("D14", "D16")
@pytest.mark.tensorflow("E1", "E2", "E4")
@pytest.mark.tensorflow("F1", "F2", "F4", "F5", "F7", "F8", "F10", "F11", "F13")
@pytest.mark.tensorflow("F14", "F20", "F31", "F32", "F34", "F35")
@pytest.mark.tensorflow("G44", "G47")
@pytest.mark.tensorflow("L1", "L8", "L11", "L16", "L17", "L25", "L26", "L31", "L38")
@pytest.mark.tensorflow("L40", "L43", "L67", "L68", "L70", "L80")
@settings(max_examples=35)
@given(
    kind=st.sampled_from([*KINDS]),
    n=st.integers(1, 8),
    op=st.sampled_from(("sum", "mean")),
    batch=st.lists(st.tuples(value, st.sampled_from(PLACES)), min_size=1, max_size=2),
)
@example("hierarchical-packs8", 3, "sum", [(Value("rows", (("int32", ()),), 0), "own")] * 3)
@example("nccl", 2, "mean", [(Value("rows", (("int32", (3,)), ("sparse", ())), 1), "turned")])
@example("workers nccl/rechd", 6, "sum", [(Value("rows", (("float32", (7, 5)),), 2), "own")])
def test_reductions_equal_numpy(kind, n, op, batch):
    """In the order of the batch, with the same bits everywhere, in the type and the structure."""
    adds_rows = kind != "one-add_n"  # a sum of one's own does not
    assume(adds_rows or not any(dtype == "sparse" for v, _ in batch for dtype, _ in v.leaves))
    ops = KINDS[kind](n)
    values = [v.given(n) for v, _ in batch]
    places = [destination(to, n, v) for v, (_, to) in zip(values, batch, strict=True)]
    pairs = [(v, to) for v, (to, _) in zip(values, places, strict=True)]
    results = ops.batch_reduce(op, pairs)
    if len(pairs) == 1:
        results.append(ops.reduce(op.title(), *pairs[0]))
        batch, places = batch * 2, places * 2
    for (v, _), (_, lie), result in zip(batch, places, results, strict=True):
        copies = [*result] if len(lie) > 1 else [result]
        assert isinstance(result, jc.distribute.Mirrored) == (len(lie) > 1)
        assert len(lie) == 1 or result.devices == lie
        for copy, device in zip(copies, lie, strict=True):
            leaves = [copy] if v.form == "plain" else copy["leaves"]
            assert all(x.devices() == {device} for x in jax.tree.leaves(leaves))
            for got, (want, dtype) in zip(leaves, v.expected(n, op), strict=False):
                got = got.to_dense() if isinstance(got, jc.IndexedSlices) else got
                assert got.dtype == dtype
                exact = jnp.issubdtype(dtype, np.integer)
                eps = 0.0 if exact else float(jnp.finfo(dtype).eps)
                np.testing.assert_allclose(
                    np.asarray(got, np.complex128), want, rtol=2 * eps, atol=8 * n * eps
                )
        bits = [[np.asarray(x).tobytes() for x in jax.tree.leaves(copy)] for copy in copies]
        assert all(x == bits[0] for x in bits), "every copy has the same bits"
