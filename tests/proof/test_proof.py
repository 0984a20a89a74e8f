"""What is proven to be the same on every replica is; what is not proven is said to vary."""

import collections
import re
import sys

import equinox as eqx
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from cases import mapped
from jax import lax
from jax.experimental import io_callback, sparse
from jax.experimental import pallas as pl
from jax.extend.core import Primitive, primitives
from jax.interpreters import mlir
from jaxlib.mlir.dialects import stablehlo as hlo
from proof.random_programs import by_host, tried

import jaxcoll as jc
from jaxcoll._gradients.proof import primitives as tables
from jaxcoll._gradients.proof.proof import prove

P = jax.sharding.PartitionSpec
AXIS = "data"


@pytest.mark.parametrize("first", range(0, 36, 6))
def test_random_programs_never_refute_proof(first):
    tally = collections.Counter()
    for seed in range(first, first + 6):
        tally += tried(seed)
    assert not tally["same, and is not"]
    assert tally["ran"] >= 3
    assert tally["same"] > tally["varies, and is not"]


def total(x):
    return lax.psum(x, AXIS)


def index():
    return lax.axis_index(AXIS).astype(jnp.float32)


def kernel(fill):
    """What comes back by a `Ref`, from a program without outputs."""

    def body(ref):
        ref[...] = jnp.full(4, fill())

    out_shape = jax.ShapeDtypeStruct((4,), jnp.float32)
    return pl.pallas_call(body, out_shape=out_shape, interpret=True)()


def by_ref(x, w, chosen=None, turns=1):
    """A reference that is written in a branch, in a loop, in a jitted function."""
    ref = jax.new_ref(w)

    @jax.jit
    def write(ref, x):
        ref[...] = x

    def turn(_, carry):
        if chosen is None:
            write(ref, x)
        else:
            lax.cond(chosen(), lambda: write(ref, x), lambda: None)
        return carry

    lax.fori_loop(0, turns if isinstance(turns, int) else jnp.int32(turns), turn, 0)
    return jax.freeze(ref)


def swapped(w, x):
    """What an earlier turn of a loop has written."""
    first, second = jax.new_ref(w), jax.new_ref(w)

    def turn(_, carry):
        first[...] = second[...]
        second[...] = x
        return carry

    lax.fori_loop(0, 3, turn, 0)
    return first[...]


own_p = Primitive("own")
own_p.def_abstract_eval(lambda x, op: x)


def lower_own(ctx, x, op):
    if op == "sine":
        return [hlo.sine(x)]
    if op == "partition_id":
        return [hlo.convert(x.type, hlo.partition_id())]
    raise NotImplementedError(op)


mlir.register_lowering(own_p, lower_own)


def exported(w):
    of = jax.export.export(jax.jit(jnp.sin))(jax.ShapeDtypeStruct((), jnp.float32))
    return of.call(w)


def bcoo(scale):
    return scale * sparse.BCOO.fromdense(jnp.eye(2), nse=2)


def raises(_):
    raise ValueError("bad")


def or_error(value, wrong, host=raises):
    shape = jax.ShapeDtypeStruct((), np.float32)
    return lax.cond(wrong, lambda: jax.pure_callback(host, shape, 0), lambda: value)


def root(f, w):
    """By a primitive that hides all programs but its solver's on JAX 0.12."""
    return lax.custom_root(f, w, lambda f, y: y - f(y), lambda g, y: y / g(1.0))


# Programs of x, which varies, and w, which does not; and which of their results vary.
PROGRAMS = {
    "reductions": (lambda x, w: (total(x), lax.pmax(x, AXIS), lax.all_gather(x, AXIS), x + w, 3.0),
                   [False, False, False, True, False]),
    "exchanges": (
        lambda x, w: (
            lax.ppermute(w, AXIS, [(0, 1)]),
            lax.psum_scatter(w * jnp.ones(4), AXIS, tiled=True),
            lax.psum(x, AXIS, axis_index_groups=[[0, 1], [2, 3]]),
            total(index()),
        ),
        [True, True, True, False],
    ),
    "choices": (
        lambda x, w: (
            lax.cond(w > 0, lambda: w, lambda: -w),
            lax.cond(x > 0, lambda: w, lambda: -w),
            *lax.cond(x > 0, lambda: (w, 1 * w), lambda: (w, 2 * w)),
            *lax.while_loop(lambda c: c[1] < 9, lambda c: (c[0], 2 * c[1] + 2), (w, x)),
            lax.while_loop(lambda c: c < 5, lambda c: total(x) + c, w),
            # Replicas take different numbers of turns, so what these change is different.
            lax.while_loop(lambda c: c[0] < x, lambda c: (c[0] + 1, 2 * c[1]), (w, w))[1],
        ),
        [False, True, False, True, False, True, False, True],
    ),
    "a carry becomes another": (
        lambda x, w: lax.fori_loop(0, 3, lambda _, c: (c[1], c[2], c[0]), (w, w, x)), [True] * 3),
    "scan": (
        lambda x, w: (
            *lax.scan(lambda c, v: (c + total(v), v), w, x * jnp.ones(3)),
            *lax.scan(lambda c, _: (c * x, w), w, None, length=3),
        ),
        [False, True, True, False],
    ),
    "another axis": (
        lambda x, w: (
            jax.vmap(total)(x * jnp.ones(3)),
            jax.vmap(lambda v: lax.psum(v, "inner"), axis_name="inner")(x * jnp.ones(3)),
            jax.vmap(lambda v: lax.psum(v, (AXIS, "inner")), axis_name="inner")(x * jnp.ones(3)),
        ),
        [False, True, False],
    ),
    "the host": (lambda x, w: (by_host(w), total(by_host(w)), jax.jit(by_host)(w), jc.same(by_host(w), AXIS),
                               io_callback(lambda: np.float32(1), jax.ShapeDtypeStruct((), np.float32))), [True, False, True, False, True]),
    "bits of the device": (lambda x, w: (lax.rng_uniform(0.0, 1.0, (2,)), own_p.bind(w, op="partition_id")), [True, True]),
    "a primitive of its own": (
        lambda x, w: (own_p.bind(w, op="sine"), own_p.bind(x, op="sine"), own_p.bind(w, op="unknown"),
                      exported(w), bcoo(w) @ jnp.ones(2) * w, bcoo(x) @ jnp.ones(2)),
        [False, True, True, False, False, True],
    ),
    "references": (
        lambda x, w: (by_ref(w, w), by_ref(x, w), by_ref(total(x), w), by_ref(w, w, lambda: x > 0),
                      by_ref(w, w, lambda: w > 0), by_ref(w, w, turns=x), swapped(w, x)),
        [False, True, False, True, False, True, True],
    ),
    "the operand or an error": (
        lambda x, w: (or_error(w, w > 0), or_error(w, x > 0), or_error(x, w > 0),
                      eqx.error_if(w, jnp.isnan(w), "not a number"), or_error(w, w > 0, lambda _: np.float32(1))),
        [False, False, True, False, True],
    ),
    "solvers": (
        lambda x, w: (
            lax.custom_linear_solve(lambda v: v * w, w, lambda _, b: b / w, symmetric=True),
            lax.custom_linear_solve(lambda v: v, w, lambda _, b: b + index(), symmetric=True),
            root(lambda y: y - w, w),
            root(lambda y: y - w - index(), w),
            root(lambda y: y - total(x), w),
        ),
        [False, True, False, True, False],
    ),
    "programs in no known order": (
        lambda x, w: (
            kernel(lambda: 3.0),
            kernel(index),
            lax.reduce(jnp.stack([w, w]), w, lambda a, b: a * b - b, (0,)),
            jnp.zeros(3).at[jnp.int32(x)].add(w),
        ),
        [False, True, False, True],
    ),
    "nothing": (lambda x, w: (jax.jit(index)(), x * jnp.ones((0, 2))), [True, False]),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_proof_says_what_varies(name):
    program, want = PROGRAMS[name]
    flat = lambda x, w: jax.tree.leaves(program(x, w))
    facts = []

    def replica(x, w):
        jaxpr = jax.make_jaxpr(flat)(x[0], w)
        facts.append(prove(jaxpr, [frozenset({AXIS}), frozenset()], {AXIS: 4}).varying)
        return x

    mapped(replica, (P(AXIS), P()), P(AXIS), check_vma=False).trace(
        jnp.array([0.5, 1.5, 2.5, -1.5]), jnp.float32(2)
    )
    assert [bool(axes) for axes in facts[0]] == want


def test_tables_name_existing_functions():
    modules = [m for name, m in [*sys.modules.items()] if name.startswith("jax") and m]
    here = {x.name for m in modules for x in [*vars(m).values()] if isinstance(x, Primitive)}
    public = {x.name for x in vars(primitives).values() if isinstance(x, Primitive)}
    beside = tables.FUNCTIONS - public
    renamed = {"reduced_vary_cast_p", "reduced_vary_cast"}  # by JAX 0.11
    assert len(beside - here) == len(renamed - here) == 1
    assert tables.PLAIN <= tables.FUNCTIONS & here
    # What these depend on is not all among their operands.
    odd = "callback|print|ffi|custom_call|rng|feed|send|recv|ref|token|swap|axis|psum|permute|all_"
    assert not [name for name in beside if re.search(odd, name)]
    assert not [name for name in tables.PLAIN if re.search(odd, name)]
