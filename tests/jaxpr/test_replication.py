"""What is proven to be the same on every replica is; what is not proven is said to vary."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import grid, mapped
from jax import lax
from jax.experimental import pallas as pl

import jaxcoll as jc
from jaxcoll._jaxpr.replication import VARIES, varying_outputs

P = jax.sharding.PartitionSpec
AXIS = "data"


def total(x):
    return lax.psum(x, AXIS)


def index():
    return lax.axis_index(AXIS).astype(jnp.float32)


def by_host(x):
    return jax.pure_callback(lambda v: v, jax.ShapeDtypeStruct((), jnp.float32), x)


@jax.custom_jvp
def with_jvp(x):
    return x * 2


with_jvp.defjvp(lambda primals, tangents: (with_jvp(*primals), tangents[0] * 2))


@jax.custom_vjp
def with_vjp(x):
    return x * 2


with_vjp.defvjp(lambda x: (x * 2, None), lambda _, ct: (ct * 2,))


def root_of(f, w):
    """By a primitive that hides its programs on JAX 0.12."""
    return lax.custom_root(f, w, lambda f, y: y - f(y), lambda g, y: y / g(1.0))


def kernel(fill):
    """What comes back by a `Ref`, from a program without outputs."""
    shape = jax.ShapeDtypeStruct((4,), jnp.float32)

    def body(ref):
        ref[...] = jnp.full(4, fill())

    return pl.pallas_call(body, out_shape=shape, interpret=True)()


def swapped(x, w):
    """The first carry becomes what the second was, one step later."""
    return lax.fori_loop(0, 3, lambda _, c: (c[1], c[0]), (w, x))


def by_ref(x, w):
    ref = jax.new_ref(w)
    ref[...] = x
    return ref[...]


# Programs of x, which varies, and w, which does not; and which of their results vary.
PROGRAMS = {
    "inputs": (lambda x, w: (x, w, 3.0), [True, False, False]),
    "arithmetic": (lambda x, w: (x + w, w * w), [True, False]),
    "reductions": (
        lambda x, w: (total(x), lax.pmean(x, AXIS), lax.pmax(x, AXIS), lax.pmin(x, AXIS) + w),
        [False] * 4,
    ),
    "gathers": (lambda x, w: (lax.all_gather(x, AXIS), jc.all_gather(x[None], AXIS)), [False] * 2),
    "exchanges": (
        lambda x, w: (
            lax.ppermute(w, AXIS, [(0, 1)]),
            lax.psum_scatter(w * jnp.ones(4), AXIS, tiled=True),
            lax.psum(x, AXIS, axis_index_groups=[[0, 1], [2, 3]]),
        ),
        [True, True, True],
    ),
    "number": (lambda x, w: (index(), total(index()), w + index()), [True, False, True]),
    "jit": (jax.jit(lambda x, w: (x, w, total(x))), [True, False, False]),
    "remat": (jax.checkpoint(lambda x, w: (jnp.sin(x), jnp.sin(w))), [True, False]),
    "custom": (lambda x, w: (with_jvp(w), with_vjp(w), with_jvp(x), with_vjp(x)), [False, False, True, True]),
    "gradients": (
        lambda x, w: (
            jax.grad(lambda v: v * x)(w),
            total(jax.grad(lambda v: v * x)(w)),
            jax.grad(lambda v: total(v * x))(w),
            jax.grad(lambda v: with_vjp(with_jvp(v)))(w),
        ),
        [True, False, True, False],
    ),
    "cond": (
        lambda x, w: (
            lax.cond(w > 0, lambda: w, lambda: -w),
            lax.cond(w > 0, lambda: w, lambda: x),
            lax.cond(x > 0, lambda: w, lambda: -w),
            lax.cond(w > 0, lambda: total(x), lambda: total(x) + w),
            lax.switch(jnp.int32(w), [lambda: w, lambda: index(), lambda: w]),
        ),
        [False, True, True, False, True],
    ),
    "while": (
        lambda x, w: (
            lax.while_loop(lambda c: c < 5, lambda c: c + w, w),
            lax.while_loop(lambda c: c < 5, lambda c: c + 1, x),
            lax.while_loop(lambda c: c[1] < 5, lambda c: (c[0] + 1, c[1] + 1), (w, x))[0],
            lax.while_loop(lambda c: c < 5 * x, lambda c: c + 1, w),
            lax.while_loop(lambda c: c < 5, lambda c: total(x) + c, w),
        ),
        [False, True, True, True, False],
    ),
    "scan": (
        lambda x, w: (
            *lax.scan(lambda c, v: (c + total(v), v), w, x * jnp.ones(3)),
            *lax.scan(lambda c, v: (c + v, c), w, x * jnp.ones(3)),
            *lax.scan(lambda c, v: (c + w, v), 0.0, w * jnp.ones(3)),
            *lax.scan(lambda c, _: (c * x, w), w, None, length=3),
        ),
        [False, True, True, True, False, False, True, False],
    ),
    "carries": (lambda x, w: swapped(x, w), [True, True]),
    "vmap": (
        lambda x, w: (
            jax.vmap(total)(x * jnp.ones(3)),
            jax.vmap(lambda v: lax.psum(v, "inner"), axis_name="inner")(x * jnp.ones(3)),
            jax.vmap(lambda v: lax.psum(v, (AXIS, "inner")), axis_name="inner")(x * jnp.ones(3)),
        ),
        [False, True, False],
    ),
    "host": (lambda x, w: (by_host(w), total(by_host(w)), jax.jit(by_host)(w)), [True, False, True]),
    "references": (lambda x, w: by_ref(x, w), [True]),
    "linear solve": (
        lambda x, w: (
            lax.custom_linear_solve(lambda v: v * w, w, lambda _, b: b / w, symmetric=True),
            lax.custom_linear_solve(lambda v: v * x, w, lambda _, b: b / x, symmetric=True),
            lax.custom_linear_solve(lambda v: v, w, lambda _, b: b + index(), symmetric=True),
        ),
        [False, True, True],
    ),
    "root": (
        lambda x, w: (root_of(lambda y: y - w, w), root_of(lambda y: y - w - index(), w)),
        [False, True],
    ),
    "kernels": (lambda x, w: (kernel(lambda: 3.0), kernel(index)), [False, True]),
    "handed on": (
        lambda x, w: (
            *lax.cond(x > 0, lambda: (w, 1 * w), lambda: (w, 2 * w)),
            *lax.while_loop(lambda c: c[1] < 9, lambda c: (c[0], 2 * c[1] + 2), (w, x)),
        ),
        [False, True, False, True],
    ),
    "reducers": (
        lambda x, w: (
            lax.reduce(jnp.stack([x, w]), w, lambda a, b: b, (0,)),
            lax.reduce(jnp.stack([w, w]), w, lambda a, b: a * b - b, (0,)),
            jnp.zeros(3).at[0].add(w),
            jnp.zeros(3).at[jnp.int32(x)].add(w),
        ),
        [True, False, False, True],
    ),
    "random": (lambda x, w: (jax.random.normal(jax.random.key(0)), jax.random.normal(
        jax.random.fold_in(jax.random.key(0), lax.axis_index(AXIS)))), [False, True]),
    "without operands": (lambda x, w: (jax.jit(lambda: jnp.ones(3))(), jax.jit(index)()), [False, True]),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_varies(name):
    program, want = PROGRAMS[name]
    found = []

    def body(x, w):
        def flat(x, w):
            return jax.tree.leaves(program(x, w))

        found.append(varying_outputs(jax.make_jaxpr(flat)(x[0], w), AXIS, [True, False], 4))
        return [jnp.asarray(out)[None] for out in flat(x[0], w)]

    over_four = mapped(body, (P(AXIS), P()), P(AXIS), check_vma=False)
    outputs = over_four(jnp.array([0.5, 1.5, 2.5, -1.5]), jnp.float32(2))
    assert [bool(fact & VARIES) for fact in found[0]] == want
    for out, varies in zip(outputs, want, strict=True):
        if not varies:
            assert len({np.asarray(row).tobytes() for row in out}) == 1


def test_an_axis_that_is_not_reduced_over_does_not_count():
    mesh, found = grid(2, 4), []

    def body(x):
        outs = lambda x: (lax.psum(x, "node"), lax.psum(x, AXIS), lax.psum(x, ("node", AXIS)))
        found.append(varying_outputs(jax.make_jaxpr(outs)(x), AXIS, [True], 4))
        return x

    spec = P(("node", AXIS))
    mapped(body, spec, spec, mesh, check_vma=False)(jnp.ones(8))
    assert found == [[True, False, False]]
