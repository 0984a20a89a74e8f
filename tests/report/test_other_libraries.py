"""Programs of flax, equinox and haiku: their functions are looked into."""

import functools

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxcoll as jc

pytestmark = pytest.mark.usefixtures("types_may_mix")

RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((16, 6)).astype("f"), RNG.integers(0, 3, 16)


class Net(nnx.Module):
    def __init__(self):
        self.one = nnx.Linear(6, 8, rngs=nnx.Rngs(0))
        self.two = nnx.Linear(8, 3, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.two(nnx.gelu(self.one(x)))

    @nnx.jit
    def total(self, x):
        return self(x).sum()


class Summed(eqx.Module):
    mlp: eqx.nn.MLP

    @eqx.filter_jit
    def total(self, x):
        return jax.vmap(self.mlp)(x).sum()


class Plain:
    def __call__(self, x):
        return (x * 2.0).sum()

    @functools.partial(jax.jit, static_argnums=0)
    def jitted(self, x):
        return self(x)


LINEN = nn.Sequential([nn.Dense(8), nn.gelu, nn.Dense(3)])
HAIKU = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([8, 3])(x)))
jitted = jax.jit(lambda w, x: (x * w).sum())
mapped = jax.pmap(lambda w, x: jax.lax.psum(x * w, "i"), "i", in_axes=(None, 0))
step = jc.data_parallel(lambda w, x: jc.all_reduce("sum", (x * w).sum(), "data"))
of_mlp = eqx.filter_jit(lambda m, x: jax.vmap(m)(x).sum())


@functools.cache
def mlp():
    return eqx.nn.MLP(6, 3, 8, 1, key=jax.random.key(0))


def of_linen():
    return LINEN.init(jax.random.key(0), X)


CALLS = {  # name: a function, and what it is called with
    "nnx.jit": lambda: (nnx.jit(lambda m, x: m(x).sum()), Net(), X),
    "nnx.jit of a method": lambda: (Net().total, X),
    "nnx module": lambda: (Net(), X),
    "filter_jit": lambda: (of_mlp, mlp(), X),
    "filter_jit of a method": lambda: (Summed(mlp()).total, X),
    "filter_pmap": lambda: (eqx.filter_pmap(lambda x: x * 2), X[:8]),
    "equinox module": lambda: (mlp(), X[0]),
    "linen": lambda: (LINEN.apply, of_linen(), X),
    "jax.jit of linen": lambda: (jax.jit(LINEN.apply), of_linen(), X),
    "haiku": lambda: (HAIKU.apply, HAIKU.init(jax.random.key(0), X), X),
    "partial of a function": lambda: (functools.partial(lambda mode, x: x.astype(mode), "int32"), X),
    "partial of jax.jit": lambda: (functools.partial(jitted, 2.0), X),
    "partial of pmap": lambda: (functools.partial(mapped, 2.0), X[:8]),
    "partial of a step": lambda: (functools.partial(step, 2.0), X),
    "method": lambda: (Plain().__call__, X),
    "jitted method": lambda: (Plain().jitted, X),
    "object that is called": lambda: (Plain(), X),
    "a name among the arguments": lambda: (lambda x, mode: x.astype(mode), X, "int32"),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_every_kind_of_function(name):
    function, *arguments = CALLS[name]()
    sends = 1 if name in ("partial of pmap", "partial of a step") else 0
    report = jc.inspect(function, *arguments)
    jc.assert_collectives(report, max_count=sends)
    assert report.count == sends
    assert report.requested is not None
    assert len(report.plans) == (name == "partial of a step")
    assert "unnamed" not in report.name


@pytest.mark.parametrize("name", ["nnx.jit", "filter_jit", "jax.jit of linen"])
def test_every_stage_of_a_program(name):
    function, *arguments = CALLS[name]()
    whole = jc.inspect(function, *arguments)
    lowered = function.lower(*arguments)
    assert jc.inspect(lowered) == whole
    compiled = jc.inspect(lowered.compile())
    assert compiled.collectives == whole.collectives
    assert compiled.requested is None
    if hasattr(lowered.compile(), "as_text"):
        assert jc.inspect(lowered.compile().as_text()).collectives == whole.collectives
    if hasattr(function, "trace"):
        assert jc.inspect(function.trace(*arguments)) == whole


@pytest.mark.parametrize("name", ["filter_jit", "linen", "method", "partial of jax.jit"])
def test_donated_arguments_still_have_shapes(name):
    function, *arguments = CALLS[name]()
    gone = jax.tree.map(lambda x: jnp.array(x) if eqx.is_array(x) else x, arguments)
    jax.tree.map(lambda x: x.delete() if isinstance(x, jax.Array) else None, gone)
    assert jc.inspect(function, *gone).requested is not None


def test_modules_are_refused_with_hint():
    words = "got Transformed; its functions are `.apply` and `.init`"
    with pytest.raises(ValueError, match=words):
        jc.inspect(HAIKU, {}, X)

    class Lowers:
        def __call__(self):
            return 0

        def lower(self):
            return "text"

    words = "Lowers has a method to lower it.*str, holds no JAX program"
    with pytest.raises(ValueError, match=words):
        jc.inspect(Lowers())
