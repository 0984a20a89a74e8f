"""CommunicationOptions: a value that is validated once and merged explicitly."""

import copy
import dataclasses
import math
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcoll as jc
from jaxcoll import CommunicationImplementation as Implementation
from jaxcoll import CommunicationOptions as Options
from jaxcoll._plan.options import UNSET

MEANT = {
    "native": ["Native", "nccl"], "ring": ["xring"], "halving_doubling": ["Halving_Doubling", "rechd"],
    "shuffle": ["pscpu", "psgpu"], "native/ring": ["nccl/xring"], "shuffle/shuffle": ["pscpu/pscpu"],
    "ring/native/halving_doubling": ["ring/native/rechd"],
}  # fmt: skip


@pytest.mark.tensorflow("A1", "H7")
def test_options_keep_what_is_given():
    options = Options()
    assert (options.bytes_per_pack, options.timeout_seconds, options.compression) == (0, None, None)
    assert options.implementation is Implementation.AUTO
    assert jc.distribute.CollectiveCommunication is Implementation
    assert Options(np.int64(5), 2).timeout_seconds == 2.0
    assert Options(implementation="Ring").implementation is Implementation.RING
    assert Options(compression="INT8").compression == jc.compression.Int8(block=256)
    assert Options(compression="bf16") == Options(compression=jc.compression.Bf16())
    for means, names in MEANT.items():
        for name in (means, *names):
            assert Options(algorithm=name) == Options(algorithm=means)
            assert Options(algorithm=name).algorithm == means
    for implementation, name, means in (
        ("ring", "xring", "ring"),
        ("auto", "rechd", "halving_doubling"),
    ):
        assert Options(implementation=implementation, algorithm=name).algorithm == means
    assert {jc.ReduceOp.of(s) for s in ("mean", "MEAN", jc.ReduceOp.MEAN)} == {jc.ReduceOp.MEAN}


NAMES = "one of native, ring, halving_doubling, shuffle .TensorFlow's nccl, xring, rechd, pscpu, psgpu work"
BAD = [
    ("bytes_per_pack", "must be a non-negative integer.*got ", [-1, 1.5, 4.0, True, "4", None, math.nan, [1]]),
    ("timeout_seconds", "must be None or a finite, non-neg", [-3, math.nan, math.inf, True, "1", [1.0]]),
    ("implementation", "must be .* AUTO, RING, NCCL", [3, None, "mpi", Implementation]),
    ("algorithm", "must be None or the name of an algorithm; got", [1, True, ["ring"]]),
    ("algorithm", NAMES, ["tree", "", "/", "ring/", "/ring", "nccl//xring", "ring/tree"]),
    ("shards", "must be a non-negative integer .*got ", [-1, 1.5, True, "2", None]),
    ("reproducible", "must be True or False; got 1", [1]),
    ("overlap", "must be True, False or None", [1]),
    ("compression", "must be None, 'auto', one of 'bf16', 'int4', 'int8'",
     ["int2", 8, True, jc.compression.Int8, "fp8"]),
]  # fmt: skip


@pytest.mark.tensorflow("A2")
def test_bad_options_are_named():
    for name, words, values in BAD:
        for bad in values:
            with pytest.raises(ValueError, match=f"`{name}` .*{words}"):
                Options(**{name: bad})
    for call, words in (
        (lambda: Options("ring", implementation="ring"), "`bytes_per_pack`"),
        (lambda: Options(implementation="ring", algorithm="rechd"),
         "`implementation` RING means the algorithm 'ring', but `algorithm` asks f"),
        (lambda: Options(implementation="nccl", algorithm="nccl/xring"),
         "NCCL means the algorithm 'native'.*'native/ring'"),
        (lambda: Options().replace(bytes_per_pack=-3), "`bytes_per_pack`"),
        (lambda: jax.jit(lambda b: Options(b).bytes_per_pack)(4), "make this argument static"),
        *((lambda kind=kind, bad=bad: kind(block=bad), f"`block` of jc.{kind.__name__} must be a mult")
          for kind in (jc.compression.Int8, jc.compression.Int4) for bad in (0, -2, 3, 2.0, True, None)),
        *((lambda bad=bad: jc.ReduceOp.of(bad), "`reduce_op` must be a ReduceOp or one of .* SUM, MEAN")
          for bad in ("max", 1, None, Implementation.RING)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            call()
    with pytest.raises(TypeError, match="no option 'packs'.* The options are bytes_per_pack"):
        Options().replace(packs=3)


def test_set_options_override():
    ring = Options(7, 9, "ring")
    for override, merged in (
        (None, ring), (Options(), ring), (Options(0), Options(0, 9, "ring")),
        (Options(timeout_seconds=None), Options(7, None, "ring")),
        (Options(implementation="auto"), Options(7, 9, "auto")),
        # Both choose the algorithm.
        (Options(algorithm="rechd"), Options(7, 9, algorithm="rechd")),
        (Options(algorithm=None), Options(7, 9, algorithm=None)),
    ):  # fmt: skip
        assert ring.merge(override) == merged
    assert Options(algorithm="rechd").merge(ring) == ring
    assert Options(reproducible=True).merge(Options(reproducible=False)) == Options(
        reproducible=False
    )
    # So what is unset differs from its default.
    assert Options() != Options(bytes_per_pack=0)
    assert Options(bytes_per_pack=UNSET) == Options()
    assert ring.replace(timeout_seconds=UNSET).__replace__(shards=2) == Options(
        7, implementation="ring", shards=2
    )
    with pytest.raises(TypeError):  # which would set every option
        dataclasses.replace(Options(4), shards=2)


def test_options_are_frozen_keys():
    a, b = Options(4, 1.0, "ring"), Options(4, 1, Implementation.RING)
    assert a == b == pickle.loads(pickle.dumps(a)) == copy.deepcopy(a)
    assert hash(a) == hash(b)
    assert {a: 1}[b] == 1
    assert a != Options(5, 1.0, "ring")
    assert a != "options"
    assert pickle.loads(pickle.dumps(UNSET)) is UNSET
    with pytest.raises(AttributeError, match=r"frozen; use options.replace\(bytes_per_pack=5\)"):
        a.bytes_per_pack = 5
    with pytest.raises(AttributeError, match="frozen"):
        a.other = 5
    with pytest.raises(AttributeError, match="frozen"):
        del a.bytes_per_pack


def test_options_are_static_values():
    traces = []

    def f(x, options):
        traces.append(options)
        return x * options.bytes_per_pack

    g = jax.jit(f, static_argnums=1)
    x = jnp.ones((), jnp.int32)
    assert g(x, Options(4)) == 4
    assert g(x, Options(4)) == 4
    assert len(traces) == 1
    assert (
        jax.jit(lambda tree: tree["x"] * tree["o"].bytes_per_pack)({"x": x, "o": Options(3)}) == 3
    )


def test_repr_reads_back():
    assert repr(Options()) == "CommunicationOptions()"
    text = repr(Options(4, 1.5, "nccl"))
    assert (
        text == "CommunicationOptions(bytes_per_pack=4, timeout_seconds=1.5, implementation=NCCL)"
    )
    assert repr(UNSET) == "UNSET"


def test_hints_warn_and_become_options():
    with pytest.warns(DeprecationWarning, match="use CommunicationOptions"):
        hints = jc.CollectiveHints(bytes_per_pack=50, timeout_seconds=1.0)
    assert hints == Options(bytes_per_pack=50, timeout_seconds=1.0)
    assert hash(hints) == hash(Options(bytes_per_pack=50, timeout_seconds=1.0))
    assert isinstance(hints, jc.CollectiveHints)
    assert isinstance(hints, Options)
    assert not isinstance(Options(), jc.CollectiveHints)
    assert pickle.loads(pickle.dumps(hints)) == copy.deepcopy(hints) == hints
    assert jax.tree.leaves(hints) == []
    assert Options(implementation="ring").merge(hints).bytes_per_pack == 50
    assert type(hints.replace(bytes_per_pack=3)) is Options
    with pytest.raises(TypeError):
        jc.CollectiveHints(1, 2.0, "ring")
    with pytest.raises(ValueError, match="must be a CollectiveHints, a Comm.* got 'ring'"):
        jc.NcclAllReduce().reduce("sum", 1.0, "cpu:0", experimental_hints="ring")
