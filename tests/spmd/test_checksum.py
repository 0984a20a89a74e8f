"""A sum that is not the sum of what was put in is marked on every replica; any other passes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import mapped, mesh_of, noise, refused, rows, run
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxcoll as jc
from jaxcoll import _compat
from jaxcoll._spmd.algorithms import table as algorithms
from jaxcoll._spmd.checks import checksum

CARRIERS = ["native", "ring", "halving_doubling", "shuffle"]
DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16, jnp.int8, jnp.int32]


def _options(algorithm):
    return jc.CommunicationOptions(checksum=True, algorithm=algorithm, bytes_per_pack=1 << 12)


def _sum_of(algorithm):
    return lambda t: jc.all_reduce("sum", t, "data", options=_options(algorithm))


def _wild(n, dtype, seed=0):
    """Twelve decades, most of which cancels between replicas."""
    rng = np.random.default_rng([seed, n])
    if jnp.issubdtype(dtype, jnp.integer):
        limits = jnp.iinfo(dtype)
        return rng.integers(limits.min, limits.max, (n, 2100)).astype(dtype)
    decades = 3 if dtype == jnp.float16 else 12
    x = rng.standard_normal((n, 2100)) * 10.0 ** rng.uniform(-decades, decades / 4, (n, 2100))
    x[n // 2 :] -= x[: n - n // 2]
    return x.astype(dtype)


def _tree(n):
    big = {np.dtype(d).name: _wild(n, d) for d in DTYPES}
    return {**big, "one": big["float32"][:, 0], "few": big["bfloat16"][:, :6].reshape(n, 2, 3)}


@pytest.mark.parametrize(
    ("algorithm", "runner", "n", "as_users_do"),
    [
        *(("native", *case, False) for case in (("vmap", 3), ("pmap", 2))),
        ("ring", "vmap", 3, False),
        *((algorithm, "checked", 5, algorithm == "native") for algorithm in CARRIERS),
        ("halving_doubling", "checked", 8, True),
    ],
)
def test_a_right_sum_has_the_bits_that_it_has_without_a_checksum(
    request, algorithm, runner, n, as_users_do
):
    if as_users_do:
        request.getfixturevalue("optimized")
    options = _options(algorithm)

    def both(x):
        plain = jc.all_reduce("sum", x, "data", options=options.replace(checksum=False))
        return plain, jc.all_reduce("sum", x, "data", options=options)

    plain, verified = run(runner, both, n, _tree(n))
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(verified), strict=True):
        np.testing.assert_array_equal(a.astype("f8"), b.astype("f8"))


@pytest.mark.parametrize("n", [1, 5, 8])
def test_no_false_alarm(n):
    """Many sums: of subnormal numbers, of one sign, of one huge number, of overflow."""
    rng = np.random.default_rng(n)
    x = rng.standard_normal((n, 40, 1000)).astype(np.float32)
    x[:, :10] = abs(x[:, :10]) * np.float32(1e-39)
    x[:, 10:20] = abs(x[:, 10:20])
    x[:, 20, 7] = 3e38
    half = np.full((n, 50), 40000, np.float16)  # overflows if n > 1

    @jax.jit
    @jax.shard_map(mesh=mesh_of(n), in_specs=PartitionSpec("data"), out_specs=PartitionSpec())
    def f(leaves, half):
        reduce = lambda op, t: jc.all_reduce(op, t, "data", options=_options(None))
        return reduce("sum", (leaves, half)), reduce("mean", half)

    for k in range(4):  # a fourth of them at a time, by one program
        sums, mean = jax.tree.map(np.asarray, f([x[:, i] for i in range(k, 40, 4)], half))
        assert not any(np.isnan(leaf).any() for leaf in jax.tree.leaves(sums))
        assert np.isinf(sums[1]).all() == (n > 1)
        assert abs(mean.astype("f") - 40000).max() < 100


def test_subnormal_numbers_that_hardware_takes_for_zero_are_no_corruption():
    @jax.jit
    def differs(x):
        four = checksum._folded(x)
        return [checksum._differs(four, jnp.full(3000, other), 4) for other in (0.0, 1e-30)]

    assert [bool(each) for each in differs(np.full(3000, 4 * np.float32(1.1e-38)))] == [False, True]


def test_what_is_put_in_may_be_infinite_or_no_number():
    x = np.ones((4, 3000), "f")
    x[1, 5], x[2, 2999] = np.inf, np.nan
    found = run("checked", _sum_of(None), 4, x)[0]
    assert found[5] == np.inf
    assert np.isnan(found[2999])
    assert (found == 4).sum() == 2998


def _all_marked(x):
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return np.isnan(x).all()
    return (x == jnp.iinfo(x.dtype).min).all()


def _damaged(x, axes, replica, at):
    """`x`, with the second highest bit of one element turned over on one replica."""
    flat = x.reshape(-1)
    unsigned = np.dtype(f"uint{8 * x.dtype.itemsize}")
    bit = np.array(1 << (8 * x.dtype.itemsize - 2), unsigned)
    turned = lax.bitcast_convert_type(lax.bitcast_convert_type(flat[at], unsigned) ^ bit, x.dtype)
    hit = lax.axis_index(axes) == replica
    return flat.at[at].set(jnp.where(hit, turned, flat[at])).reshape(x.shape)


def _damage_results(monkeypatch, change):
    """Change what one replica holds at the end of each pack, and nothing that is compared."""
    whole = algorithms.all_reduce

    def damaging(array, stages, axes):
        total = change(whole(array, stages, axes), tuple(axes))
        return _compat.as_invariant(total, axes)

    monkeypatch.setattr(algorithms, "all_reduce", damaging)


@pytest.mark.parametrize(
    ("algorithm", "runner"),
    [*((a, "checked") for a in CARRIERS), ("native", "unchecked"), ("shuffle", "pmap"), ("ring", "vmap")],
)  # fmt: skip
def test_one_element_of_one_replicas_result_marks_the_pack_on_all(monkeypatch, algorithm, runner):
    _damage_results(
        monkeypatch, lambda x, axes: _damaged(x, axes, 2, 1234) if x.size == 2100 else x
    )
    x = {np.dtype(d).name: rows(4, 2100, dtype=d) for d in DTYPES}
    for leaf in x.values():  # to a half that bit adds half the exponent's range
        leaf[:, 1234] = 0.125
    found = run(runner, _sum_of(algorithm), 4, (x, np.ones((4, 5), np.complex64)))
    assert all(_all_marked(leaf) for leaf in found[0].values())
    assert (found[1] == 4).all()  # a pack of its own


@pytest.mark.parametrize("algorithm", ["ring", "halving_doubling", "shuffle"])
@pytest.mark.parametrize(("runner", "n"), [("pmap", 2), ("checked", 7)])
def test_a_message_that_changes_on_its_way_marks_the_pack(monkeypatch, algorithm, runner, n):
    for name in ("ppermute", "all_to_all"):
        sent = getattr(lax, name)

        def received(x, axes, *args, sent=sent, **kwargs):
            return _damaged(sent(x, axes, *args, **kwargs), axes, 1, 3)

        monkeypatch.setattr(lax, name, received)
    x = rows(n, 999)
    mean = lambda t: jc.all_reduce("mean", t, "data", options=_options(algorithm))
    assert _all_marked(run(runner, mean, n, x))


@pytest.mark.parametrize(
    "change",
    [
        lambda x, axes: jnp.where(lax.axis_index(axes) == 0, jnp.roll(x, 1024), x),
        lambda x, axes: x.at[7].set(jnp.nan),
        lambda x, axes: x.at[7].set(jnp.inf),
    ],
    ids=["places", "nan", "inf"],
)
def test_elements_that_change_places_and_what_is_finite_nowhere_else_are_seen(monkeypatch, change):
    _damage_results(monkeypatch, change)
    assert _all_marked(run("checked", _sum_of(None), 2, noise(2, 2048)))


def test_a_step_whose_gradients_are_corrupted_returns_what_all_finite_sees(monkeypatch):
    options = jc.CommunicationOptions(checksum=True)

    def make():
        def step(w, x):
            loss, grad = jc.value_and_grad(
                lambda w, x: ((x @ w) ** 2).mean(), axis_name="data", options=options
            )(w, x)
            return loss, grad, jc.all_finite(grad)

        return jc.data_parallel(step, mesh=mesh_of(4))

    w, x = np.ones(40, np.float32), np.asarray(noise(8, 40), np.float32)
    assert make()(w, x)[2]
    plan = make().plans(w, x)[0]
    assert plan.checksum
    assert jc.Plan.from_json(plan.to_json()).checksum
    assert "compared with one of at most 256 numbers, which are not counted here" in str(plan)
    _damage_results(monkeypatch, lambda t, axes: _damaged(t, axes, 3, 9) if t.size >= 40 else t)
    _, grad, finite = make()(w, x)
    assert np.isnan(grad).all()
    assert not finite


def test_a_derivative_passes_the_checksum_by():
    def through(checksum):
        options = jc.CommunicationOptions(checksum=checksum)
        f = lambda x: jc.all_reduce("mean", x**2, "data", options=options).sum()
        return jax.jit(jax.vmap(jax.grad(f), axis_name="data"))(noise(3, 5))

    np.testing.assert_array_equal(through(True), through(False))


def test_what_has_no_checksum_is_refused():
    options = jc.CommunicationOptions(checksum=True)
    words = "`reduce_scatter` has no checksum.*leave `checksum` unset"
    refused(words, lambda t: jc.reduce_scatter("sum", t, "data", options=options), noise(2, 4))


def test_a_leaf_that_is_sharded_over_another_axis_is_refused():
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Explicit))
    x = jax.device_put(np.ones((2, 4), "f"), NamedSharding(mesh, PartitionSpec("data", "model")))
    words = "`checksum` cannot be made for the value"
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=words):
        mapped(_sum_of(None), mesh=mesh, axis_names={"data"})(x)
