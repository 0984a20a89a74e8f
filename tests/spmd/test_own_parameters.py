"""What every replica has its own of keeps its own gradient: d(loss over all) / d(that copy)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import close as nearly
from cases import grid, mapped
from jax import lax

import jaxcoll as jc
from jaxcoll import _compat

P = jax.sharding.PartitionSpec
RNG = np.random.default_rng(3)
MESH = grid(2, 4)
BOTH = ("node", "data")
close = functools.partial(nearly, shapes=True, rtol=1e-4, atol=1e-5)
ROWS = 4
X = RNG.standard_normal((2, 4, ROWS, 3)).astype("f")
WEIGHT = RNG.integers(0, 3, (2, 4, ROWS)).astype("f")
SHARED = RNG.standard_normal(3).astype("f")
# One parameter for each set of axes that it may differ along.
PARAMS = {
    (): SHARED,
    ("node",): RNG.standard_normal((2, 3)).astype("f"),
    ("data",): RNG.standard_normal((4, 3)).astype("f"),
    BOTH: RNG.standard_normal((2, 4, 3)).astype("f"),
}
NAMES = {(): "none", ("node",): "node", ("data",): "data", BOTH: "both"}
PARAMS = {NAMES[axes]: leaf for axes, leaf in PARAMS.items()}
SPECS = {NAMES[axes]: P(*axes) for axes in NAMES}


def errors(params, x):
    """One number for each row."""
    hidden = jnp.tanh(x * params["none"][None]) * params["node"][None] + params["data"][None]
    return jnp.sum(jnp.sin(hidden) * params["both"][None], axis=-1) ** 2


def mean(params, x, weight):
    return jnp.mean(errors(params, x))


def total(params, x, weight):
    return jnp.sum(errors(params, x))


def weighted(params, x, weight):
    return jc.WeightedLoss(jnp.sum(errors(params, x) * weight), jnp.sum(weight).astype(int))


def scanned(params, x, weight):
    """A loop that starts from a constant, which is differentiated without types."""
    row = lambda sum_, x: (sum_ + jnp.sum(errors(params, x[None])), None)
    return lax.scan(row, 0.0, x)[0] / len(x)


@functools.cache
def on_one_device(loss):
    """The loss over all replicas, of every replica's own parameters."""

    def whole(params):
        spread = {
            "none": jnp.broadcast_to(params["none"], (2, 4, 3)),
            "node": jnp.broadcast_to(params["node"][:, None], (2, 4, 3)),
            "data": jnp.broadcast_to(params["data"][None], (2, 4, 3)),
            "both": params["both"],
        }
        found = jax.vmap(jax.vmap(loss))(spread, X, WEIGHT)
        if isinstance(found, jc.WeightedLoss):
            return found.total.sum() / found.weight.sum().astype("f")
        return found.sum() if loss is total else found.mean()

    return jax.jit(jax.value_and_grad(whole))(PARAMS)


def on_replicas(f, specs=SPECS, mesh=MESH):
    """Each replica has its own part of each parameter, in the specs' way, and a share of the batch."""

    def own(params, x, weight):
        params = {
            name: leaf.reshape(leaf.shape[len(specs[name]) :]) for name, leaf in params.items()
        }
        value, grads = f(params, x[0, 0], weight[0, 0])
        return value, {
            name: g.reshape((1,) * len(specs[name]) + g.shape) for name, g in grads.items()
        }

    ins = (specs, P(*BOTH), P(*BOTH))
    return mapped(own, ins, (P(), specs), mesh)(PARAMS, X, WEIGHT)


@pytest.mark.parametrize("pieces", [None, 2])
@pytest.mark.parametrize("loss", [mean, total, weighted, scanned])
def test_a_leaf_is_reduced_over_the_axes_along_which_it_is_the_same(loss, pieces):
    settings = {"reduce_op": "sum" if loss is total else "mean"}
    if pieces is None:
        f = jc.value_and_grad(loss, BOTH, **settings)
    else:
        f = jc.accumulate(loss, BOTH, pieces, batch_argnums=(1, 2), **settings)
    close(on_replicas(f), on_one_device(loss))


def on_a_line(f, in_specs, out_specs, *args, checks=True):
    return mapped(f, in_specs, out_specs, check_vma=checks)(*args)


BATCH = X.reshape(4, -1, 3)
ROW = P("data")


def squares(w, x):
    return jnp.mean(jnp.sin(x @ w) ** 2)


GATHERS = {
    "lax": lambda w: lax.all_gather(w, "data", tiled=True),
    "jaxcoll": lambda w: jc.all_gather(w, "data"),
    "ring": lambda w: jc.all_gather(w, "data", options=jc.CommunicationOptions(algorithm="ring")),
}


@pytest.mark.parametrize(
    ("gather", "pieces"), [("lax", 1), ("lax", 2), ("jaxcoll", 1), ("jaxcoll", 2), ("ring", 1)]
)
def test_a_sharded_parameter_that_the_loss_gathers(gather, pieces):
    """FSDP: the transpose of the gather has summed over the replicas already."""
    w = RNG.standard_normal(12).astype("f")

    def loss(params, x):
        whole = GATHERS[gather](params["w"]).reshape(3, 4)
        return squares(whole, x) + jnp.sum(params["b"] * jnp.mean(x))

    f = jc.accumulate(loss, "data", pieces)
    specs = {"w": ROW, "b": P()}
    params = {"w": w, "b": jnp.float32(0.5)}
    got = on_a_line(f, (specs, ROW), (P(), specs), params, X.reshape(-1, 3))

    def whole(params):
        x = X.reshape(-1, 3)
        return squares(params["w"].reshape(3, 4), x) + params["b"] * jnp.mean(x)

    close(got, jax.jit(jax.value_and_grad(whole))(params))


@pytest.mark.parametrize("argnums", [1, (0, 1), (1, 0)])
def test_the_gradient_by_the_batch_has_the_batchs_shape(argnums):
    """Saliency, FGSM: each replica's rows have theirs."""
    w, x = SHARED[:, None], X.reshape(-1, 3)
    f = jc.value_and_grad(squares, "data", argnums=argnums)
    specs = tuple([P(), ROW][i] for i in argnums) if isinstance(argnums, tuple) else ROW
    want = jax.jit(jax.value_and_grad(squares, argnums=argnums))(w, x)
    close(on_a_line(f, (P(), ROW), (P(), specs), w, x), want)
    words = jax.tree.map(lambda spec: "concatenate" if spec == ROW else "error", specs)
    step = jc.data_parallel(f, varying_outputs=("error", words))
    close(step(w, x), want)


def test_what_stays_on_its_replica_is_typed_so():
    with pytest.raises(ValueError, match=r"output .*\[1\] of the step differs between replicas"):
        jc.data_parallel(jc.grad(squares, "data", argnums=(0, 1)))(
            SHARED[:, None], X.reshape(-1, 3)
        )


def test_nothing_is_sent_for_a_leaf_that_every_replica_has_its_own_of():
    def loss(params, x):
        return squares(params["expert"][0] + params["shared"], x)

    params = {"expert": np.ones((4, 3, 4), "f"), "shared": np.ones((3, 4), "f")}
    specs = {"expert": ROW, "shared": P()}
    f = mapped(jc.grad(loss, "data"), (specs, ROW), specs)
    report = jc.assert_collectives(jc.inspect(f, params, X.reshape(-1, 3)), max_count=1)
    assert report.wire_bytes == 2 * 3 / 4 * params["shared"].nbytes


@pytest.mark.parametrize("call", [jc.grad, jc.value_and_grad])
def test_what_stays_on_its_replica_has_no_shards(call):
    def loss(params, x):
        return squares(params["expert"] + params["shared"], x)

    f = call(loss, "data", scatter=True)
    params = {"expert": np.ones((12, 5), "f"), "shared": np.ones((3, 5), "f")}
    words = r"scatter=True: leaf args\[0\]\['expert'\] differs between replicas along 'data'"
    with pytest.raises(ValueError, match=words):
        on_a_line(f, ({"expert": ROW, "shared": P()}, ROW), P(), params, X.reshape(-1, 3))


def synced(params, x):
    return squares(jc.sync_in_backward(params["expert"] * 2, "data") + params["shared"], x)


def synced_alone(params, x):
    return squares(params["expert"] * 2 + params["shared"], x)


def inner_alone(params, x):
    grads = jax.grad(squares)(params["expert"], x)
    return squares(params["expert"] - grads, x) + squares(params["shared"], x)


def inner(params, x):
    """A step of training inside of the loss, of what autodiff has been given for all parameters."""
    grads = jc.grad(squares, "data")(params["expert"], x)
    return squares(params["expert"] - grads, x) + squares(params["shared"], x)


@pytest.mark.parametrize(
    ("loss", "alone", "words"),
    [
        (
            synced,
            synced_alone,
            "`sync_in_backward` over 'data': the value differs between replicas",
        ),
        (inner, inner_alone, r"`jc.grad` over 'data': leaf args\[0\] differs between replicas"),
    ],
)
@pytest.mark.parametrize("scans", [False, True])
def test_what_is_reduced_inside_a_loss_must_be_the_same_everywhere(loss, alone, words, scans):
    """Inside, every parameter is typed as varying, and only the program tells which ones do."""
    params = {"expert": np.ones((12, 5), "f"), "shared": np.ones((3, 5), "f")}

    def whole(params, x):
        if not scans:
            return loss(params, x)
        return lax.scan(lambda c, x: (c + loss(params, x), None), 0 * x[0, 0], x[:, None])[0]

    f = jc.grad(whole, "data")
    with pytest.raises(ValueError, match=words):
        on_a_line(f, ({"expert": ROW, "shared": P()}, ROW), P(), params, X.reshape(-1, 3))
    same = {**params, "expert": params["expert"][:3]}
    got = on_a_line(f, (P(), ROW), P(), same, X.reshape(-1, 3))
    close(got, on_a_line(f, (P(), ROW), P(), same, X.reshape(-1, 3), checks=False))
    if not scans:
        close(got, jax.jit(jax.grad(alone))(same, X.reshape(-1, 3)))


ALIKE = {"expert": jnp.ones(3), "shared": jnp.ones(3)}
SGD = optax.sgd(0.1, momentum=0.9)


def optimizers(axis):
    """What takes parameters, or reduced gradients, that all replicas hold alike."""
    sharded = jc.sharded_optimizer(SGD, axis)
    link = jc.all_reduce_updates(axis)
    own = lambda: jax.tree.map(lambda x: _compat.as_varying(x, [axis]), ALIKE)
    return {
        "sharded, init": sharded.init,
        "sharded, params": lambda params: sharded.update(own(), sharded.init(ALIKE), params)[0],
        "sharded, reduced": lambda grads: sharded.update(
            grads, sharded.init(ALIKE), ALIKE, reduced=True
        )[0],
        "updates": lambda params: link.update(own(), None, params)[0],
    }


@pytest.mark.parametrize("name", optimizers("data"))
def test_an_optimizer_for_what_replicas_hold_alike_refuses_what_differs(name):
    def step(params):
        optimizer = optimizers("data")[name]
        return jnp.stack([jnp.sum(x) for x in jax.tree.leaves(optimizer(params))])[None]

    specs = {"expert": ROW, "shared": P()}
    params = {"expert": np.ones(12, "f"), "shared": np.ones(3, "f")}
    words = r"leaf \['expert'\] differs between replicas along 'data' by its type"
    with pytest.raises(ValueError, match=words):
        on_a_line(step, (specs,), ROW, params)
    on_a_line(step, (P(),), ROW, ALIKE)

    strategy = jc.MirroredStrategy(jax.devices()[:4])
    own = strategy.experimental_distribute_values_from_function(lambda context: jnp.ones(3))
    optimizer = optimizers("replica")[name]
    with pytest.raises(ValueError, match=r"leaf \['expert'\] differs between replicas, or nothing"):
        strategy.run(optimizer, ({**ALIKE, "expert": own},))
    strategy.run(optimizer, (ALIKE,))
