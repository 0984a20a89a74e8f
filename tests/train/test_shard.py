"""Parameters in shards: made, trained, saved, and brought to another number of devices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import alike, assert_trees_equal, mesh_of
from jax import lax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

import jaxcoll as jc

pytestmark = pytest.mark.usefixtures("dtypes_may_mix")


def normal(seed, *shape):
    return (np.random.default_rng(seed).standard_normal(shape) / np.sqrt(shape[-2])).astype("f")


LAYERS, WIDTH = 3, 20
REST = {"in": normal(0, 32, WIDTH), "out": normal(1, WIDTH, 5), "scale": np.float32(2)}
STACK = {"w": normal(2, LAYERS, WIDTH, WIDTH), "b": np.zeros((LAYERS, WIDTH), "f")}
PARAMS = {"rest": REST, "layers": STACK}
BATCHES = [np.random.default_rng(k).standard_normal((24, 32)).astype("f") for k in (3, 4)]
ADAM = optax.adam(1e-2)  # one for all: the programs that try it are kept


def loss(params, x, of_layer=lambda layer: layer):
    rest = params["rest"]

    def layer(hidden, weights):
        weights = of_layer(weights)
        return jnp.tanh(hidden @ weights["w"] + weights["b"][None]), None

    hidden, _ = lax.scan(layer, x @ rest["in"] * rest["scale"], params["layers"])
    return jnp.mean(jax.nn.logsumexp(hidden @ rest["out"], -1) - x[:, 0] ** 2)


def of_shards(shards, x):
    rest = jc.all_gather(shards["rest"], "data")
    return loss({**shards, "rest": rest}, x, lambda layer: jc.all_gather(layer, "data"))


def in_shards(n, params=PARAMS):
    return {
        "rest": jc.shard(params["rest"], "data", mesh=mesh_of(n)),
        "layers": jc.shard(params["layers"], "data", stacked=True, mesh=mesh_of(n)),
    }


def train_step(optimizer, n, **more):
    def step(shards, state, x):
        value, grads = jc.value_and_grad(of_shards, "data")(shards, x)
        updates, state = optimizer.update(grads, state, shards)
        return optax.apply_updates(shards, updates), state, value

    return jc.data_parallel(step, mesh=mesh_of(n), batch_argnums="x", **more)


def one_device(tx):
    def step(params, state, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return jax.jit(step)


@pytest.mark.parametrize(("n", "stacked"), [(3, True), (8, False), (8, True)])
def test_shards_keep_every_bit(n, stacked):
    value = {
        "w": normal(0, LAYERS, 50, 7),
        "half": np.ones((LAYERS, 11), jnp.bfloat16),
        "int": [np.arange(LAYERS, dtype=np.int32), None],
        "empty": np.zeros((LAYERS, 0), "f"),
    }
    shards = jc.shard(value, "data", stacked=stacked, mesh=mesh_of(n))
    assert_trees_equal(jc.unshard(shards), value)
    for part in shards.parts:
        assert part.sharding.spec == PartitionSpec(*[None] * stacked, "data")
        assert {s.data.nbytes for s in part.addressable_shards} == {part.nbytes // n}
    if stacked:
        one = jax.tree.map(lambda x: x[1], shards)
        assert_trees_equal(jc.unshard(one), jax.tree.map(lambda x: x[1], value))


@pytest.mark.parametrize("stacked", [False, True])
def test_functions_and_shapes_make_shards(stacked):
    def init():
        keys = jax.random.split(jax.random.key(0))
        return {"w": jax.random.uniform(keys[0], (4, 300, 9)), "b": jnp.zeros((4, 7)), "n": None}

    shards = jc.shard(init, "data", stacked=stacked)
    assert_trees_equal(jc.unshard(shards), init())
    mesh = AbstractMesh((8,), ("data",), (AxisType.Auto,))
    for given, over in ((jax.eval_shape(init), None), (init, mesh), (jax.eval_shape(init), mesh)):
        shapes = jc.shard(given, "data", stacked=stacked, mesh=over)
        assert jax.tree.structure(shapes) == jax.tree.structure(shards)
        for x, part in zip(shapes.parts, shards.parts, strict=True):
            assert (type(x), x.shape, x.dtype) == (jax.ShapeDtypeStruct, part.shape, part.dtype)


@pytest.mark.slow
def test_training_moves_between_device_counts(tmp_path):
    """AdamW, clipped by the norm of everything: fifty-four steps are those of one device."""
    optimizer = jc.sharded_optimizer(optax.adamw(1e-2), "data", max_norm=0.05)
    whole = optax.chain(optax.clip_by_global_norm(0.05), optax.adamw(1e-2))
    one, want, want_state = one_device(whole), PARAMS, whole.init(PARAMS)
    shards, last, plain = in_shards(8), tmp_path / "last.npz", tmp_path / "plain.npz"
    state = optimizer.init(shards)
    for n in (8, 3, 8):
        step = train_step(optimizer, n)
        for i in range(18):
            shards, state, value = step(shards, state, BATCHES[i % 2])
            want, want_state, expected = one(want, want_state, BATCHES[i % 2])
            np.testing.assert_allclose(value, expected, rtol=1e-4)
        jc.save_checkpoint(last, (shards, state), step=n)
        # Of other values and another number of devices, but the same tree.
        like = in_shards(3 if n == 8 else 8, jax.tree.map(np.zeros_like, PARAMS))
        (shards, state), at = jc.restore_checkpoint(last, (like, optimizer.init(like)))
        assert at == n
        lies = [jax.tree.map(lambda x: x.sharding, tree) for tree in (shards, like)]
        assert lies[0] == lies[1]
    alike(jc.unshard(shards), want, 1e-4)
    alike(optimizer.unshard(state)[0].nu, want_state[1][0].nu, 1e-4)
    # The file is that of the whole tree: without shards it is read as such, and written as well.
    (read, _), _ = jc.restore_checkpoint(last, (PARAMS, optax.adamw(1e-2).init(PARAMS)))
    assert_trees_equal(read, jc.unshard(shards))
    jc.save_checkpoint(plain, PARAMS)
    for like in (in_shards(8), jax.eval_shape(lambda: in_shards(3))):
        back, _ = jc.restore_checkpoint(plain, like)
        assert_trees_equal(jc.unshard(back), PARAMS)
    assert {type(x) for x in jax.tree.leaves(back)} == {np.ndarray}


def test_plain_optimizers_run_on_shards():
    tx = optax.adam(1e-2, mu_dtype=jnp.bfloat16)
    shards, want = in_shards(8), PARAMS
    state, want_state = tx.init(shards), tx.init(PARAMS)
    step, one = train_step(tx, 8, donate_argnums=(0, 1)), one_device(tx)
    for i in range(6):
        shards, state, _ = step(shards, state, BATCHES[i % 2])
        want, want_state, _ = one(want, want_state, BATCHES[i % 2])
    alike(jc.unshard(shards), want, 1e-3)
    assert state[0].mu["layers"].parts[0].sharding.spec == PartitionSpec(None, "data")


@pytest.mark.parametrize("tx", [
    optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(1.0)),
    optax.lamb(0.1),
    optax.apply_if_finite(optax.sgd(1.0), 3),
    optax.chain(optax.centralize(), optax.sgd(1.0)),
], ids=["clip", "lamb", "finite", "mean of rows"])  # fmt: skip
def test_local_norms_are_refused(tx):
    """Each replica would take another number; those of all parts are taken."""
    shards = jc.shard(np.ones((4, 300), "f"), "data")
    loss = lambda shards, x: jnp.mean((x @ jc.all_gather(shards, "data")) ** 2)

    def local(shards, state, x):
        return tx.update(jc.grad(loss, "data")(shards, x), state, shards)[0]

    def clipped(shards, state, x):
        grads = jc.grad(loss, "data")(shards, x)
        less, good = (
            jnp.minimum(1, 0.1 / jc.global_norm(grads, "data")),
            jc.all_finite(grads, "data"),
        )
        return jax.tree.map(lambda g: jnp.where(good, g * less, 0), grads)

    given = shards, tx.init(shards), np.ones((8, 4), "f")
    with pytest.raises(
        ValueError, match="scaled, or selected, by a number of this replica's shard"
    ):
        jc.data_parallel(local, batch_argnums=2).lower(*given)
    jc.data_parallel(clipped, batch_argnums=2).lower(*given)


def test_state_lies_beside_its_shards():
    shards = in_shards(4)
    optimizer = jc.sharded_optimizer(ADAM, "data", mesh=mesh_of(4))
    state = optimizer.init(shards)
    assert state[0].mu["layers"].parts[0].sharding == shards["layers"].parts[0].sharding
    shapes = optimizer.init(jax.eval_shape(lambda: shards))
    assert jax.tree.structure(shapes) == jax.tree.structure(state)
    whole = jax.tree.map(lambda x: np.full(x.shape, 3, x.dtype), jax.eval_shape(ADAM.init, PARAMS))
    assert_trees_equal(optimizer.unshard(optimizer.shard(whole, shards)), whole)
    inside = jc.data_parallel(lambda s, x: optimizer.init(s), mesh=mesh_of(4))
    for made in (jax.jit(optimizer.init)(shards), inside(shards, BATCHES[0])):
        assert_trees_equal(optimizer.unshard(made), optimizer.unshard(state))


def test_foreign_states_are_refused():
    shards = in_shards(8)
    optimizer = jc.sharded_optimizer(ADAM, "data")
    mixed = {**shards, "rest": REST}
    masked = optax.masked(
        optax.add_decayed_weights(0.1), lambda p: jax.tree.map(lambda x: np.ndim(x) > 1, p)
    )
    other = ADAM.init({**PARAMS, "rest": {**REST, "in": np.zeros(3, "f")}})

    def update(params, grads, state=None):
        step = jc.data_parallel(lambda p, g, s, x: optimizer.update(g, s, p)[0], batch_argnums=3)
        return step(params, grads, optimizer.init(shards) if state is None else state, BATCHES[0])

    def unsharded(params, x):
        grads = jc.value_and_grad(loss, "data", scatter=True)(params, x)[1]
        return ADAM.update(grads, ADAM.init(PARAMS), params)

    beside = r"leaf \['rest'\]\['in'\] of the parameters is an array, while others"
    for message, call in (
        (r"parameters in `Shards` and whole gradients, which are those of the gathered tree",
         lambda: update(shards, PARAMS)),
        (r"are not in the shards of the parameters: .*", lambda: update(shards, shards["rest"])),
        (beside, lambda: update(mixed, mixed)),
        (beside, lambda: optimizer.init(mixed)),
        (r"`sharded_optimizer.update` expects a state with Shards in it, but",
         lambda: update(shards, shards, optax.sgd(1.0).init(0))),
        ("Masks and labels by leaf", lambda: jc.sharded_optimizer(masked, "data").init(shards)),
        (r"a part of the state is not like the parameters", lambda: optimizer.shard(other, shards)),
        (r"(?s)combines `Shards`.* and a whole tree.* `optimizer = jc.sharded_optimizer\(optimizer, ",
         lambda: jc.data_parallel(unsharded)(PARAMS, BATCHES[0])),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            call()


def test_wrong_trees_are_refused():
    shard = lambda value, axis="data", **how: lambda: jc.shard(value, axis, **how)
    for call, message in (
        # What JAX would refuse: its mask was dropped, or its upper bits.
        (shard(np.ma.masked_array([1.0, 2.0], mask=[True, False])), "numpy masked arrays"),
        (shard({"w": 2**40}), "too large"),
        (shard({"a": np.zeros((3, 2)), "b": np.zeros((4, 2))}, stacked=True),
         r"leaf \['b'\] has shape \(4, 2\), and leaf \['a'\] \(3, 2\)\. Stack"),
        (shard({"a": np.float32(1)}, stacked=True), r"the layers as the leading dimension.* leaf \['a'\] has shape \(\)"),
        (shard({"a": "w"}), r"`shard` cannot cut leaf \['a'\] in shards: .* got str"),
        (shard(REST, "model", mesh=mesh_of(4)), r"`shard` over axis 'model': the mesh has no such axis"),
        (shard("data", REST), "`jc.shard` takes the value first .*; got 'data' for the value"),
        (shard(REST, REST), "to be a string or a non-empty tuple of strings; got dict"),
        (lambda: jc.Elastic(jc.data_parallel(lambda s, x: (s, x)), in_shards(8)),
         r"`Elastic`: state\['layers'\] is `Shards`, of which each device has a part that no"),
        (lambda: jc.sharded_optimizer(optax.flatten(optax.sgd(0.1, momentum=0.9)), "data"),
         "expects an elementwise optimizer.*depends on several elements"),
    ):  # fmt: skip
        with pytest.raises((ValueError, OverflowError), match=message):
            call()


@pytest.mark.slow
def test_sharded_step_is_compared():
    optimizer, shards = jc.sharded_optimizer(optax.sgd(0.1), "data"), in_shards(8)
    args = shards, optimizer.init(shards), BATCHES[0]
    jc.assert_same_as_one_device(train_step(optimizer, 8), *args)

    @jc.data_parallel
    def sums(shards, x):
        return jax.tree.map(lambda p, g: p - 0.1 * g, shards, jax.grad(of_shards)(shards, x))

    with pytest.raises(AssertionError, match=r"its change by other rows is 8\.0 times as large"):
        jc.assert_same_as_one_device(sums, shards, BATCHES[0])
