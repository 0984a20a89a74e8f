"""sharded_optimizer: n devices train as one, each with an n-th of the state."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import alike, mesh_of, refused
from jax import lax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

import jaxcoll as jc

pytestmark = pytest.mark.usefixtures("dtypes_may_mix")


def normal(seed, *shape):
    return (np.random.default_rng(seed).standard_normal(shape) / np.sqrt(shape[0])).astype("f")


PARAMS = {
    "in": {"w": normal(0, 32, 48), "b": np.zeros(48, "f")},
    "out": [normal(1, 48, 10), None, np.zeros((0, 3), "f")],
    "scale": np.float32(1),
}
BATCHES = [normal(2, 24, 32) * 5, normal(3, 24, 32) * 5]
ADAM, SGD = optax.adam(1e-2), optax.sgd(0.1)


def loss(p, x):
    hidden = jnp.tanh(x @ p["in"]["w"] + p["in"]["b"][None])
    return jnp.mean(jax.nn.logsumexp(hidden @ p["out"][0] * p["scale"], -1) - x[:, 0] ** 2)


def _one(tx, params, state, x):
    """A step of the reference: one device, the whole batch."""
    updates, state = tx.update(jax.grad(loss)(params, x), state, params)
    return optax.apply_updates(params, updates), state


def train_step(optimizer, n, grads="scatter"):
    def step(p, state, x):
        g = (
            jax.grad(loss)(p, x)
            if grads == "local"
            else jc.grad(loss, "data", scatter=grads == "scatter")(p, x)
        )
        updates, state = optimizer.update(g, state, p, reduced=grads == "reduced")
        return optax.apply_updates(p, updates), state

    return jc.data_parallel(step, mesh=mesh_of(n), batch_argnums="x")


def trees(step, *args):
    """What a step, which gets a batch of nothing too, makes of its arguments."""
    return jc.data_parallel(step)(*args, np.ones(8, "f"))


ADAMW = optax.adamw(optax.cosine_decay_schedule(1e-2, 60))
SAME = {
    "adam": (ADAM, ADAM, {}),
    "clipped": (ADAMW, optax.chain(optax.clip_by_global_norm(0.02), ADAMW), {"max_norm": 0.02}),
    "accumulated": (optax.MultiSteps(optax.lion(1e-3), 2),) * 2 + ({},),
}


@pytest.mark.parametrize(
    ("name", "sizes", "grads"),
    [("adam", (8, 3), "scatter"), ("clipped", (3, 8), "reduced"), ("accumulated", (6,), "local")],
)
def test_steps_equal_one_device(name, sizes, grads):
    """Also from eight devices to three or back, where the state is put together and cut again."""
    tx, whole, more = SAME[name]
    one = jax.jit(functools.partial(_one, whole))
    params, want, want_state = PARAMS, PARAMS, whole.init(PARAMS)
    state = tx.init(PARAMS)
    for n in sizes:
        optimizer = jc.sharded_optimizer(tx, "data", mesh=mesh_of(n), **more)
        step, state = train_step(optimizer, n, grads), optimizer.shard(state, params)
        params = jax.tree.map(np.asarray, params)
        for i in range(50 // len(sizes)):
            params, state = step(params, state, BATCHES[i % 2])
            want, want_state = one(want, want_state, BATCHES[i % 2])
        state = optimizer.unshard(state)
    alike(params, want)
    if name != "clipped":  # there the reference has a state more, that of the clipping
        alike(state, want_state)


def test_clipping_uses_the_whole_norm():
    grads = {"a": normal(0, 700) * 30, "h": np.float16([3, 4]), "none": None}
    tx = optax.sgd(1.0)
    for largest in (1.0, 1e4):
        o = jc.sharded_optimizer(tx, "data", max_norm=largest)
        got = trees(lambda g, x, o=o: o.update(g, o.init(g), g, reduced=True)[0], grads)
        clipped = optax.chain(optax.clip_by_global_norm(largest), tx)
        want, _ = jax.jit(clipped.update)(grads, clipped.init(grads))
        alike(got, want, 1e-3)


def test_devices_hold_equal_parts():
    params = {"w": normal(0, 512, 1024), "b": np.zeros(1024, "f")}
    state = jc.sharded_optimizer(ADAM, "data").init(params)
    per_device = collections.Counter()
    for leaf in jax.tree.leaves(state):
        per_device.update({shard.device: shard.data.nbytes for shard in leaf.addressable_shards})
    whole = sum(np.asarray(x).nbytes for x in jax.tree.leaves(ADAM.init(params)))
    assert len(per_device) == 8
    assert len(set(per_device.values())) == 1
    assert max(per_device.values()) <= 0.13 * whole
    assert isinstance(state[0].mu, jc.Shards)
    assert state[0].mu.parts[0].sharding.spec == PartitionSpec("data")
    assert jc.sharded_optimizer(ADAM, "data").init({"frozen": None})[0].mu.parts == ()


@pytest.mark.slow
def test_pmap_keeps_parts():
    optimizer = jc.sharded_optimizer(ADAM, "data")

    def step(p, x):
        updates, state = optimizer.update(jax.grad(loss)(p, x), optimizer.init(p), p)
        return optax.apply_updates(p, updates), state

    params, state = jax.pmap(step, "data", in_axes=(None, 0))(PARAMS, BATCHES[0].reshape(8, 3, 32))
    want, _ = jax.jit(functools.partial(_one, ADAM))(PARAMS, ADAM.init(PARAMS), BATCHES[0])
    alike(jax.tree.map(lambda x: x[5], params), want)
    assert state[0].mu.parts[0].shape == (8, 3, 128)
    words = r"are global arrays, here of shape \(24, 128\); got \(8, 3, 128\)"
    with pytest.raises(ValueError, match=words):
        trees(lambda s, x: s, state)
    assert optimizer.init(PARAMS)[0].mu.parts[0].shape == (24, 128)


def test_program_scatters_and_gathers_once():
    optimizer = jc.sharded_optimizer(ADAM, "data", max_norm=1.0)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), PARAMS)
    state = optimizer.init(shapes)
    report = jc.inspect(train_step(optimizer, 8), shapes, state, BATCHES[0])
    jc.assert_collectives(report, kinds=["reduce-scatter", "all-reduce", "all-gather"])
    assert report.count == 3
    wide = AbstractMesh((16,), ("data",), (AxisType.Auto,))
    abstract = jc.sharded_optimizer(ADAM, "data", mesh=wide).init(PARAMS)
    assert {x.shape for x in abstract[0].mu.parts} == {(32, 128)}


def counting(tx):
    """`tx`, which also counts the elements that are not finite."""
    nans = lambda g: sum(jnp.sum(jnp.isnan(x)) for x in jax.tree.leaves(g))
    return optax.GradientTransformation(
        lambda p: (jnp.zeros([], int), tx.init(p)),
        lambda g, s, p=None: (lambda u, t: (u, (s[0] + nans(g), t)))(*tx.update(g, s[1], p)),
    )


def stateless(f):
    """An optimizer that computes each leaf's update from its gradient."""
    return optax.GradientTransformation(lambda p: (), lambda g, s, p=None: (jax.tree.map(f, g), s))


MIXING = {
    "a norm of each leaf": optax.lamb(1e-3),
    "a norm of all leaves": optax.chain(optax.clip_by_global_norm(1e37), SGD),
    "factored moments": optax.chain(optax.scale_by_factored_rms(), optax.scale(-0.1)),
    "a mask by rank": optax.adamw(1e-3, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
    "labels by leaf": optax.multi_transform(
        {"a": ADAM, "b": SGD}, lambda p: jax.tree.map(lambda x: "a" if x.ndim > 1 else "b", p)),
    "what is not finite elsewhere": optax.MultiSteps(SGD, 2, should_skip_update_fn=optax.skip_not_finite),
    "random numbers": optax.chain(optax.add_noise(0.1, 0.5, key=jax.random.key(0)), SGD),
    "leaves out steps, late, by the norm of the parameters": optax.MultiSteps(
        SGD, 2, should_skip_update_fn=lambda g, step, p: ((step > 1000) & (optax.tree.norm(p) > 1), ())),
    "is clipped after a while": optax.conditionally_transform(
        optax.clip_by_global_norm(1.0), lambda step: step > 1000),
    "flags NaNs": optax.zero_nans(),
    "asks Python": stateless(
        lambda g: jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(g.shape, g.dtype), g)),
    "smooths": stateless(
        lambda g: lax.reduce_window(g, 0.0, lax.add, (1,) * g.ndim, (1,) * g.ndim, "SAME")),
    "counts NaNs": counting(SGD),
    "each element by its neighbour": stateless(
        lambda x: lax.scan(lambda c, x: (x, c), x[0] * 0, x)[1]),
    "loops until all are small": stateless(lambda x: lax.while_loop(
        lambda c: jnp.any(jnp.abs(c) > 1e37), lambda c: c / 2, x)),
    "holds something else for each leaf": optax.scale_by_factored_rms(factored=False),
}  # fmt: skip


@pytest.mark.parametrize("what", MIXING)
def test_mixing_optimizers_are_refused(what):
    message = "(?s)expects an elementwise optimizer.*pass `max_norm`.*should_skip_update_fn"
    with pytest.raises(ValueError, match=message):
        jc.sharded_optimizer(MIXING[what], "data")


ELEMENTWISE = {
    "adan": optax.adan(1e-3), "radam": optax.radam(1e-3), "rprop": optax.rprop(1e-3),
    "accumulated": optax.MultiSteps(ADAM, 3),
    "a table of rates": optax.sgd(optax.piecewise_interpolate_schedule("linear", 0.1, {5: 0.1})),
    "clipped by value": optax.chain(optax.clip(1.0), optax.sgd(0.1, 0.9, nesterov=True)),
    "hyperparameters": optax.inject_hyperparams(optax.adamw)(optax.cosine_decay_schedule(0.1, 60)),
    "only at times": optax.conditionally_transform(ADAM, lambda step: step % 3 == 0),
}  # fmt: skip


@pytest.mark.parametrize("what", ELEMENTWISE)
def test_elementwise_optimizers_are_taken(what):
    assert jc.sharded_optimizer(ELEMENTWISE[what], "data", mesh=mesh_of(2)).init(PARAMS)


def test_mixing_by_size_is_found():
    """Where nothing is factored it is elementwise."""
    own = stateless(lambda x: x / jnp.max(x) if x.size == 1000 else x)
    by_size = optax.masked(ADAM, lambda p: jax.tree.map(lambda x: x.size != 1000, p))
    by_name = optax.adamw(
        1e-3, mask=lambda p: jax.tree_util.tree_map_with_path(lambda at, x: "'b'" not in str(at), p)
    )
    ones = lambda *sizes: {"w": [np.ones(size, "f") for size in sizes]}
    jc.sharded_optimizer(own, "data").init(ones(999))
    for tx, params, words in (
        (own, ones(1000), r"the update of \['w'\]\[0\] depends on several.*`reduce_max`"),
        (by_size, ones(1000, 1), "does not run on such shapes"),
        (by_name, PARAMS, r"the update of \['in'\]\['b'\] is computed differently"),
    ):
        optimizer = jc.sharded_optimizer(tx, "data")
        with pytest.raises(ValueError, match=words):
            optimizer.init(params)


@pytest.mark.parametrize(("n", "kind"), [(3, AxisType.Auto), (8, AxisType.Explicit)])
def test_init_works_everywhere(n, kind):
    """Outside and inside a step, under jit, and of shapes."""
    optimizer = jc.sharded_optimizer(optax.adamw(1e-2), "data", mesh=mesh_of(n, kind=kind))
    want, got = optimizer.init(PARAMS), jax.jit(optimizer.init)(PARAMS)
    alike(got, want, 0)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
    types = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    assert types(jax.eval_shape(optimizer.init, PARAMS)) == types(want)
    nonzero = optax.GradientTransformation(lambda p: p, lambda g, s, p=None: (g, s))
    copy = jc.sharded_optimizer(nonzero, "data", mesh=mesh_of(n))
    inside = jc.data_parallel(lambda p, x: copy.init(p), mesh=mesh_of(n))(PARAMS, np.ones(n))
    for made in (jax.jit(copy.init)(PARAMS), inside):
        alike(copy.unshard(made), jax.tree.map(np.asarray, PARAMS), 0)
    train_step(optimizer, n)(PARAMS, got, BATCHES[0])


def of_value(f):
    """An optimizer that takes a `value`."""
    return optax.GradientTransformationExtraArgs(
        lambda p: (), lambda g, s, p=None, *, value=None, **_: (f(g, value), s)
    )


def test_extra_arguments_must_agree():
    optimizer = jc.sharded_optimizer(
        of_value(lambda g, v: jax.tree.map(lambda x: x if v is None else x * v, g)), "data"
    )

    def step(reduced, p, x):
        value, g = jc.value_and_grad(lambda p, x: (p["w"] * x.mean()).sum(), "data", scatter=True)(
            p, x
        )
        return optimizer.update(g, optimizer.init(p), p, value=value if reduced else x.mean())[0]

    p, x = {"w": np.ones(3, "f")}, np.arange(16, dtype="f")
    updates = jc.data_parallel(functools.partial(step, True))(p, x)
    alike(updates, {"w": np.full(3, 22.5 * 7.5, "f")})
    with pytest.raises(ValueError, match=r"`sharded_optimizer.update` .* leaf \['value'\] must be"):
        jc.data_parallel(functools.partial(step, False))(p, x)


def test_mixing_by_argument_is_refused():
    def scaled(g, value):
        largest = jnp.maximum(optax.tree.norm(g), 1e-9)
        return jax.tree.map(lambda x: x if value is None else x * value / largest, g)

    optimizer, p = jc.sharded_optimizer(of_value(scaled), "data"), {"w": np.ones(3, "f")}
    step = lambda more: lambda p, x: optimizer.update(p, optimizer.init(p), reduced=True, **more)[0]
    alike(trees(step({}), p), p)
    with pytest.raises(
        ValueError, match=r"the update of .* depends on several elements \(by `reduce_sum"
    ):
        trees(step({"value": 2.0}), p)


def test_bad_optimizers_are_explained():
    needs = of_value(lambda g, value: jax.tree.map(lambda x: value * x, g))
    by_place = stateless(lambda g: g * np.arange(g.size).reshape(g.shape))
    make = functools.partial(jc.sharded_optimizer, axis_name="data")
    for call, words in (
        (lambda: make(optax.adamw(1e-3, mask=jax.tree.map(lambda x: True, PARAMS))),
         r"(?s)does not run on such shapes \(ValueError.*assume_elementwise=True"),
        (lambda: make(optax.GradientTransformation(SGD.init, lambda g, s, p=None: (jnp.zeros(3), s))),
         r"does not run on such shapes \(ValueError: expected updates like"),
        (lambda: make(optax.scale_by_factored_rms(min_dim_size_to_factor=500)),
         r"its state for leaves of shapes .*\(\d+, 128\).* has shapes .*\(1,\)"),
        (lambda: make(by_place), r"several elements \(by numbers that differ by place\)"),
        (lambda: make(needs), "further arguments"),
        (lambda: make(0.1), r"an object with `init` and `update`; got float"),
        (lambda: make(SGD, max_norm=0), r"`max_norm` must be None or a positive number; got 0"),
        *((lambda mesh=mesh: jc.sharded_optimizer(SGD, "x", mesh=mesh),
           r"`sharded_optimizer` over axis 'x': the mesh has no such axis")
          for mesh in (mesh_of(2), AbstractMesh((2,), ("data",)))),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            call()
    with pytest.raises(
        NameError, match="`sharded_optimizer.update` over axis 'data': no such axis here"
    ):
        jc.sharded_optimizer(SGD, "data").update(PARAMS, ())
    word = jc.sharded_optimizer(needs, "data", assume_elementwise=True)
    got = trees(lambda p, x: word.update(p, word.init(p), reduced=True, value=2.0)[0], PARAMS)
    alike(got, jax.tree.map(lambda x: 2 * x, PARAMS), 0)


def test_changed_trees_are_named():
    optimizer = jc.sharded_optimizer(ADAM, "data")

    def step(p, state, x, shards):
        grads = jax.tree.map(lambda a: (x.sum() * a).astype(a.dtype), p)
        grads = jc.reduce_scatter("mean", grads, "data") if shards else grads
        return optimizer.update(grads, state, p)

    for params, match, shards in (
        ({**PARAMS, "scale": np.ones(2, "f")}, r"leaf \['scale'\] is float32\[2\], and was float32\[\]", True),
        ({**PARAMS, "scale": np.float16(1)}, r"leaf \['scale'\] is float16\[\], and was float32\[\]", False),
        ({**PARAMS, "more": np.ones(2, "f")}, r"leaf \['more'\] \(float32\[2\]\) is new", True),
        ({k: v for k, v in PARAMS.items() if k != "scale"}, r"leaf \['scale'\] \(float32\[\]\) is gone", False),
        ({**PARAMS, "out": tuple(PARAMS["out"])}, r"its structure is PyTreeDef", True),
    ):  # fmt: skip
        wrapped = jc.data_parallel(functools.partial(step, shards=shards), batch_argnums="x")
        with pytest.raises(ValueError, match=match):
            wrapped(params, optimizer.init(PARAMS), np.ones(8, "f"))


def test_foreign_states_are_refused():
    optimizer = jc.sharded_optimizer(ADAM, "data")
    step, state = train_step(optimizer, 8), optimizer.init(PARAMS)
    options = jc.CommunicationOptions(bytes_per_pack=1 << 10)
    packed = jc.sharded_optimizer(ADAM, "data", options=options)
    of_two = jc.sharded_optimizer(ADAM, "data", mesh=mesh_of(2)).init(PARAMS)
    wider = ADAM.init({**PARAMS, "in": {"w": np.ones((32, 49)), "b": np.ones(49)}})
    for message, call in (
        (r"expects a state with Shards in it.*`shard` the state of the unsharded",
         lambda: step(PARAMS, ADAM.init(PARAMS), BATCHES[0])),
        (r"expects a state like PyTreeDef.*this optimizer's `init` or `shard`",
         lambda: step(PARAMS, state[0], BATCHES[0])),
        (r"Shards of 8 replicas along 'data' do not fit the mesh \(data=3\).*`unshard`",
         lambda: train_step(optimizer, 3)(PARAMS, state, BATCHES[0])),
        (r"packed differently.*5 leaves in 3 packs.*Set the same `bytes_per_pack`",
         lambda: step(PARAMS, packed.init(PARAMS), BATCHES[0])),
        (r"this one has another structure", lambda: optimizer.shard((1, 2, 3), PARAMS)),
        (r"not like the parameters. It has leaves of shapes \[\(49,\)",
         lambda: optimizer.shard(wider, PARAMS)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            call()
    refused(
        r"these shards were made for 2 replicas, but there are 8 here",
        lambda x: optimizer.update(PARAMS, of_two, PARAMS), np.ones(8),
    )  # fmt: skip
