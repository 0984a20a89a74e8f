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
        """The leaves of each replica, as numpy has them; sparse ones as rows of a table."""
        rng = np.random.default_rng([self.seed, n])

        def leaf(dtype, shape):
            if dtype == "sparse":
                k = rng.integers(0, 4)
                rows, at = rng.integers(-4, 5, (k, 2)).astype("f"), rng.integers(0, 5, k)
                return jc.IndexedSlices(rows, at.astype("i4"), (5, 2))
            return rng.integers(0 if dtype[0] == "u" else -4, 5, shape).astype(jnp.dtype(dtype))

        own = [[leaf(*kind) for kind in self.leaves] for _ in range(n)]
        return own if self.form == "rows" else own[:1] * n

    def given(self, n):
        """The value as it is passed."""
        parts = self.parts(n)
        if self.form == "plain":
            plain = parts[0][0]
            is_default = getattr(plain, "dtype", None) in ("float32", "int32", "complex64")
            return plain.item() if self.seed % 2 and is_default and not plain.ndim else plain
        kind = jc.PerReplica if self.form == "rows" else jc.distribute.Mirrored
        return kind([{"leaves": part} for part in parts], devices=devices(n))

    def expected(self, n, op):
        """The sum or mean of each leaf, in 64 bits, and the type that it has."""
        parts = self.parts(n)[: 1 if self.form == "plain" else n]
        for (dtype, _), *column in zip(self.leaves, *parts, strict=True):
            total = sum(dense(x).astype(np.complex128) for x in column)
            like = "float32" if dtype == "sparse" or ("int" in dtype and op == "mean") else dtype
            yield total / (len(column) if op == "mean" else 1), jnp.dtype(like)


def dense(part):
    if isinstance(part, np.ndarray):
        return part
    table = np.zeros((5, 2), "f")
    np.add.at(table, part.indices, part.values)
    return table


def destination(place, n, value):
    """A destination by its name, and the devices that it stands for."""
    line = devices(8)
    if place == "own" and isinstance(value, jc.DistributedValues):
        return value, value.devices
    several = {
        "own": line[:n],
        "turned": line[:n][::-1],
        "others": line[8 - n :],
        "more": line[: n + 1],
    }
    if place in several:
        return on(several[place]), tuple(several[place])
    one = {
        "one": ("/device:CPU:6", 6),
        "device": (line[3], 3),
        "array": (jax.device_put(0.0, line[5]), 5),
    }
    return one[place][0], (line[one[place][1]],)


leaf = st.tuples(
    st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=2).map(tuple)
) | st.just(("sparse", ()))
value = st.builds(
    Value,
    form=st.sampled_from(("rows", "rows", "copies", "plain")),
    leaves=st.lists(leaf, min_size=1, max_size=3).map(tuple),
    seed=st.integers(0, 99),
)


@pytest.mark.tensorflow("B1", "B2", "B4", "B5", "B7", "C1", "C2", "C4", "D14", "D16", "E1", "E2")
@pytest.mark.tensorflow("E4", "F1", "F2", "F4", "F5", "F7", "F8", "F10", "F11", "F13", "F14", "F20")
@pytest.mark.tensorflow("F31", "F32", "F34", "F35", "G44", "G47", "L1", "L8", "L11", "L16", "L17")
@pytest.mark.tensorflow("L25", "L26", "L31", "L38", "L40", "L43", "L67", "L68", "L70", "L80")
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
    ops, values = KINDS[kind](n), [v.given(n) for v, _ in batch]
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
