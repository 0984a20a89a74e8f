"""What is proven to be the same on every replica is; what is not proven is said to vary."""

import collections
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import mapped
from jax import lax
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.extend.core import Primitive, primitives
from jaxpr.random_programs import by_host, tried

import jaxcoll as jc
from jaxcoll._jaxpr import proof
from jaxcoll._jaxpr.proof import prove

P = jax.sharding.PartitionSpec
AXIS = "data"


@pytest.mark.parametrize("first", range(0, 36, 6))
def test_what_is_called_the_same_is_bit_equal_in_random_programs(first):
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


def by_ref(x, w):
    ref = jax.new_ref(w)
    ref[...] = x
    return ref[...]


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
        ),
        [False, True, False, True, False, True, False],
    ),
    "a carry becomes another": (
        lambda x, w: lax.fori_loop(0, 3, lambda _, c: (c[1], c[0]), (w, x)), [True, True]),
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
    "bits of the device": (lambda x, w: (lax.rng_uniform(0.0, 1.0, (2,)), by_ref(x, w)), [True, True]),
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
def test_what_varies(name):
    program, want = PROGRAMS[name]
    flat = lambda x, w: jax.tree.leaves(program(x, w))
    found = []

    def replica(x, w):
        jaxpr = jax.make_jaxpr(flat)(x[0], w)
        found.append(prove(jaxpr, [frozenset({AXIS}), frozenset()], {AXIS: 4}).varying)
        return x

    mapped(replica, (P(AXIS), P()), P(AXIS), check_vma=False).trace(
        jnp.array([0.5, 1.5, 2.5, -1.5]), jnp.float32(2)
    )
    assert [bool(axes) for axes in found[0]] == want


def test_the_names_of_functions_are_those_of_primitives_of_this_jax_or_of_the_other():
    modules = [m for name, m in [*sys.modules.items()] if name.startswith("jax") and m]
    here = {x.name for m in modules for x in [*vars(m).values()] if isinstance(x, Primitive)}
    public = {x.name for x in vars(primitives).values() if isinstance(x, Primitive)}
    beside = proof._FUNCTIONS - public
    renamed = {"reduced_vary_cast_p", "reduced_vary_cast"}  # by JAX 0.11
    assert len(beside - here) == len(renamed - here) == 1
    assert proof._PLAIN <= proof._FUNCTIONS & here
    # What these depend on is not all among their operands.
    odd = "callback|print|ffi|custom_call|rng|feed|send|recv|ref|token|swap|axis|psum|permute|all_"
    assert not [name for name in beside if re.search(odd, name)]
    assert not [name for name in proof._PLAIN if re.search(odd, name)]
