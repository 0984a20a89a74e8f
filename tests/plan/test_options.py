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


@pytest.mark.tensorflow("A1")
def test_options_keep_what_is_given():
    options = Options()
    assert options.bytes_per_pack == 0
    assert options.timeout_seconds is None
    assert options.implementation is Implementation.AUTO
    assert jc.distribute.CollectiveCommunication is Implementation
    assert Options(np.int64(5)).bytes_per_pack == 5
    assert Options(timeout_seconds=2).timeout_seconds == 2.0
    assert Options(implementation="Ring").implementation is Implementation.RING


BAD = {
    "bytes_per_pack": ("must be a non-negative integer.*got ",
                       [-1, 1.5, 4.0, True, "4", None, math.nan, [1]]),
    "timeout_seconds": ("must be None or a finite, non-neg", [-3, math.nan, math.inf, True, "1", [1.0]]),
    "implementation": ("must be .* AUTO, RING, NCCL", [3, None, "mpi", Implementation]),
    "algorithm": ("must be None or the name of an algorithm; got", [1, True, ["ring"]]),
    "shards": ("must be a non-negative integer .*got ", [-1, 1.5, True, "2", None]),
    "reproducible": ("must be True or False; got 1", [1]),
    "overlap": ("must be True, False or None", [1]),
    "compression": ("must be None, 'auto', one of 'bf16', 'int4', 'int8'",
                    ["int2", 8, True, jc.compression.Int8, "fp8"]),
}  # fmt: skip


@pytest.mark.tensorflow("A2")
@pytest.mark.parametrize(
    ("name", "bad"), [(name, bad) for name, (_, values) in BAD.items() for bad in values]
)
def test_bad_option_is_named(name, bad):
    with pytest.raises(ValueError, match=f"`{name}` {BAD[name][0]}"):
        Options(**{name: bad})


@pytest.mark.tensorflow("H7")
def test_strings_name_reduce_ops():
    assert {jc.ReduceOp.of(s) for s in ("mean", "MEAN", "Mean")} == {jc.ReduceOp.MEAN}
    assert jc.ReduceOp.of(jc.ReduceOp.SUM) is jc.ReduceOp.SUM
    for bad in ("max", 1, None, Implementation.RING):
        with pytest.raises(
            ValueError, match="`reduce_op` must be a ReduceOp or one of .* SUM, MEAN"
        ):
            jc.ReduceOp.of(bad)


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


def test_traced_options_are_refused():
    with pytest.raises(ValueError, match="make this argument static"):
        jax.jit(lambda b: Options(bytes_per_pack=b).bytes_per_pack)(4)


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


def test_merge_takes_set_options():
    strategy = Options(bytes_per_pack=7, timeout_seconds=9, implementation="ring")
    assert strategy.merge(None) == strategy
    assert strategy.merge(Options()) == strategy
    assert strategy.merge(Options(bytes_per_pack=0)).bytes_per_pack == 0
    assert strategy.merge(Options(timeout_seconds=None)).timeout_seconds is None
    assert strategy.merge(Options(implementation="auto")).implementation is Implementation.AUTO
    assert strategy.merge(Options(bytes_per_pack=0)).implementation is Implementation.RING
    off = Options(reproducible=False)
    assert Options(reproducible=True).merge(off) == off
    # So what is unset differs from its default.
    assert Options() != Options(bytes_per_pack=0)
    assert Options(bytes_per_pack=UNSET) == Options()


def test_replace_changes_and_unsets():
    assert Options(4).replace(timeout_seconds=1) == Options(4, 1)
    assert Options(4, 1).replace(bytes_per_pack=UNSET) == Options(timeout_seconds=1)
    with pytest.raises(TypeError, match="no option 'packs'.* The options are bytes_per_pack"):
        Options().replace(packs=3)
    with pytest.raises(ValueError, match="`bytes_per_pack`"):
        Options().replace(bytes_per_pack=-3)


def test_standard_replace_keeps_unset():
    with pytest.raises(TypeError):
        dataclasses.replace(Options(4), shards=2)
    assert Options(4).__replace__(shards=2) == Options(4, shards=2)


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


def test_foreign_options_are_refused():
    x = jnp.ones((2, 3))
    for bad in ({"bytes_per_pack": 3}, 5, "ring"):
        with pytest.raises(ValueError, match="`options` must be a CommunicationOptions, as in"):
            jax.vmap(lambda v, bad=bad: jc.all_reduce("sum", v, "d", options=bad), axis_name="d")(x)


def test_compression_is_name_or_value():
    assert (
        Options(compression="INT8").compression
        == jc.compression.Int8()
        == jc.compression.Int8(block=256)
    )
    assert Options(compression=jc.compression.Int4(block=32)).compression == jc.compression.Int4(32)
    assert Options().compression is None
    assert Options(compression="bf16") == Options(compression=jc.compression.Bf16())


@pytest.mark.parametrize("bad", [0, -2, 3, 2.0, True, None])
@pytest.mark.parametrize("kind", [jc.compression.Int8, jc.compression.Int4])
def test_a_bad_block_is_named(kind, bad):
    with pytest.raises(ValueError, match=f"`block` of jc.{kind.__name__} must be a multiple of 2"):
        kind(block=bad)
