"""What each dtype is summed in, what it comes back as, and which are refused."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from cases import OPTIONS, assert_trees_equal, gaussian, lowered, mapped, rows, run, vmapped

import jaxcoll as jc

FLOATS = [np.float16, ml_dtypes.bfloat16, np.float32]
INTS = [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32]


def check_both(x):
    """jaxcoll's results and lax's own on the same values are the same."""

    def f(v):
        ours = [jc.all_reduce(op, v, "data") for op in ("sum", "mean")]
        return ours, [jax.lax.psum(v, "data"), jax.lax.pmean(v, "data")]

    assert_trees_equal(*vmapped(f, x))


def test_results_and_their_dtypes_are_those_of_lax():
    check_both([np.abs(rows(4, 6)).astype(dtype) for dtype in (*FLOATS, *INTS, np.complex64)])


def test_64_bit_types_are_those_of_lax_too():
    dtypes = (np.float64, np.int64, np.int32, np.complex128)
    with jax.enable_x64(True):
        check_both([np.arange(12).reshape(4, 3).astype(dtype) for dtype in dtypes])


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
def test_8_bit_floats_are_summed_in_float32(dtype):
    """Eight times 100 is more than one of them holds."""
    x = np.full((8, 3), 100.0).astype(dtype)
    got = run("checked", lambda v: jc.all_reduce("mean", v, "data"), 8, x)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got[0].astype("f"), x[0].astype("f"))
    text = lowered(lambda v: jc.all_reduce("mean", v, "data"), 8, x).as_text()
    assert text.count("tensor<3xf32>) -> tensor<3xf32>") >= 1


def test_a_float16_mean_travels_as_float16():
    x = np.ones((8, 5), np.float16)
    text = lowered(lambda v: jc.all_reduce("mean", v, "data"), 8, x).as_text()
    assert "(tensor<5xf16>) -> tensor<5xf16>" in text


def test_a_float16_mean_of_ordinary_values_is_as_good_as_its_type():
    x = gaussian(8, 1000).astype(np.float16)
    got = run("vmap", lambda v: jc.all_reduce("mean", v, "data"), 8, x)[0]
    exact = np.asarray(x, np.float64).mean(0)
    bound = 8 * 2.0**-11 * np.abs(np.asarray(x, np.float64)).mean(0) + 2.0**-25 * 8
    assert np.all(np.abs(np.asarray(got, np.float64) - exact) <= bound)


def test_the_mean_of_small_integers_is_exact():
    x = [np.full((8, 3), 100, dtype) for dtype in (np.int8, np.uint8, np.int16)]
    for got in run("checked", lambda v: jc.all_reduce("mean", v, "data"), 8, x):
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got[0], [100.0] * 3)


def test_numbers_and_numpy_leaves_are_arrays():
    def f(x):
        return jc.all_reduce("sum", {"x": x, "one": 1.0, "np": np.ones(2, "f")}, "data")

    got = run("vmap", f, 4, rows(4, 2))
    assert got["one"][0] == 4
    np.testing.assert_array_equal(got["np"][0], [4, 4])


@pytest.mark.parametrize(
    ("leaf", "words"),
    [
        (np.ones(3, bool), "booleans have no sum of their own type"),
        (True, "booleans have no sum"),
        (np.zeros(3, jax.dtypes.float0), "float0 is the gradient of an integer input"),
        (np.array(["a"]), "an array of <U1 holds no numbers"),
        *((np.ones(3, name), f"{name} cannot hold the sum of two") for name in ("int2", "uint2")),
        (jax.random.key(0), "a typed PRNG key has no"),
        (jax.ShapeDtypeStruct((2,), "f"), "got ShapeDtypeStruct"),
        ("text", "expected an array or a number, got str"),
        (object(), "expected an array or a number, got object"),
    ],
)
def test_a_leaf_without_a_sum_is_refused_with_its_path(leaf, words):
    with pytest.raises(ValueError, match=rf"cannot reduce leaf \['a'\]\[1\]: .*{words}"):
        run("vmap", lambda x: jc.all_reduce("sum", {"a": [x, leaf]}, "data"), 2, rows(2))


def test_bfloat16_survives_a_mesh_that_is_only_partly_mapped():
    """XLA's CPU compiler would abort the process: it must travel as float32 there."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    f = mapped(lambda v: jc.all_reduce("sum", v, "data"), mesh=mesh, axis_names={"data"})
    x = jnp.ones((4, 6), jnp.bfloat16)
    assert "}) : (tensor<1x6xf32>) -> tensor<1x6xf32>" in f.lower(x).as_text()
    np.testing.assert_array_equal(np.asarray(f(x), "f"), 4)


@pytest.mark.parametrize("name", ["auto", "halving_doubling", "ring-in-2"])
def test_a_leaf_sharded_over_another_axis_keeps_its_shape(name):
    """With an Explicit second axis, flattening would gather it, and so would cutting shards."""
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    options = OPTIONS[name].replace(bytes_per_pack=1 << 20)
    reduce = lambda t: jc.all_reduce("sum", t, "data", options=options)
    put = lambda x, *axes: jax.device_put(x, jax.NamedSharding(mesh, jax.P(*axes)))
    value = {
        "split": put(rows(4, 6), "data", "model"),
        "whole": put(rows(4, 3), "data"),
        "other": put(rows(4, 5), "data"),
    }
    with jax.set_mesh(mesh):
        out = mapped(reduce, mesh=mesh, axis_names={"data"})(value)
    np.testing.assert_array_equal(out["split"][0], rows(4, 6).sum(0))
    np.testing.assert_array_equal(out["other"][0], rows(4, 5).sum(0))
    assert out["split"].sharding.spec[1] == "model"


COMPLEX_CONSTANTS = """
import jax, numpy as np, jax.numpy as jnp
jax.config.update("jax_platforms", "cpu"); jax.config.update("jax_num_cpu_devices", 8)
import jaxcoll as jc
from jaxcoll import distribute
x, zeros = np.arange(16, dtype="f"), lambda: jnp.zeros((8, 3), jnp.complex64)
params = {"used": np.complex64(1 + 1j), "unused": np.ones((8, 3), np.complex64)}
loss = lambda p, x: jnp.mean(x * jnp.abs(p["used"]))
strategy = distribute.MirroredStrategy()
(rows,) = strategy.experimental_distribute_dataset([x])
step = lambda f, **kw: jc.data_parallel(f, batch_argnums=1, options=jc.CommunicationOptions(**kw))(params, x)
grads = [step(jc.grad(loss), **kw) for kw in ({}, {"bytes_per_pack": 8}, {"compression": "int8"})]
grads += [
    step(jc.accumulate(loss, "data", 2))[1],
    step(lambda p, x: jc.all_gather(jc.grad(loss, scatter=True)(p, x))),
    jax.tree.map(lambda v: v.values[0], strategy.run(
        lambda x: distribute.get_replica_context().all_reduce("mean", jax.grad(loss)(params, x)),
        (rows,)), is_leaf=lambda v: not isinstance(v, dict)),
]
for grad in grads:
    np.testing.assert_allclose(grad["used"], jax.grad(loss)(params, x)["used"], rtol=2e-2)
    assert not np.any(grad["unused"])
sums = [lambda x: jc.psum(zeros(), "data"), lambda x: jc.all_gather(jc.reduce_scatter("sum", zeros(), "data"), "data"),
        lambda x: jc.all_reduce("mean", zeros(), "data"), lambda x: jc.broadcast(zeros(), "data")]
for f in sums:
    assert not np.any(jax.pmap(f, axis_name="data")(x[:8]))
"""


def test_a_complex_constant_is_summed_as_any_value():
    """XLA's CPU compiler aborts on it, and with it the process."""
    run = subprocess.run([sys.executable, "-c", COMPLEX_CONSTANTS], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
