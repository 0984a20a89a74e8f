"""Sums that autodiff takes in bfloat16 although parameters are float32, read from requested text."""

import jax
import jax.numpy as jnp
import pytest
from cases import mapped
from jax.sharding import PartitionSpec as P

import jaxcoll as jc
from jaxcoll._observe.parse.narrow_sums import narrow_sums

BF16 = jnp.bfloat16
PARAMS = {
    "w": jax.ShapeDtypeStruct((2, 8, 8), jnp.float32),
    "b": jax.ShapeDtypeStruct((2, 8), jnp.float32),
}
BATCH = jax.ShapeDtypeStruct((16, 8), BF16)


def loss(params, x):
    def layer(x, p):
        return jnp.tanh(x @ p["w"].astype(BF16) + p["b"].astype(BF16)[None]), None

    return jnp.mean(jax.lax.scan(layer, x, params)[0].astype(jnp.float32) ** 2)


def automatic(params, x):
    return jax.grad(loss)(params, x)


def by_jaxcoll(params, x):
    return jc.grad(loss, "data")(params, x)


def asked_for(params, x):
    grads = jax.grad(loss)(jax.lax.pcast(params, "data", to="varying"), x)
    sums = jax.tree.map(lambda g: jax.lax.psum(g.astype(BF16)[None], "data"), grads)
    return jax.tree.map(lambda g: g[0].astype(jnp.float32), sums)


def notes(function):
    return jc.inspect(mapped(function, (P(), P("data")), mesh=8), PARAMS, BATCH).notes


def test_the_trap_is_told_with_its_line():
    (note,) = notes(automatic)
    assert note.startswith("2 sums over devices are requested in bf16 and widened to f32")
    assert "test_narrow.py:" in note


@pytest.mark.parametrize("function", [by_jaxcoll, asked_for])
def test_sums_in_the_parameters_type_and_those_asked_for_are_none(function):
    assert not notes(function)


def test_a_name_may_come_back_in_a_region_beside():
    text = """
      %1 = stablehlo.convert %0 : (tensor<8xf32>) -> tensor<8xbf16>
      %1 = stablehlo.tanh %9 : tensor<8xbf16>
      %2 = "stablehlo.all_reduce"(%1) <{}> ({
      }) : (tensor<8xbf16>) -> tensor<8xbf16>
      %3 = stablehlo.convert %2 : (tensor<8xbf16>) -> tensor<8xf32>"""
    assert len(narrow_sums(text)) == 1
    assert not narrow_sums(text.replace("%1 = stablehlo.tanh", "%7 = stablehlo.tanh"))
