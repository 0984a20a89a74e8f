"""data_parallel: an ordinary step, placed, compiled once a shape, and checked."""

import copy
import dataclasses
import pickle
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CompileCounter, close, mesh_of, plans_of
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxcoll as jc
from jaxcoll._step.step import DataParallel

RNG = np.random.default_rng(0)
X = RNG.standard_normal((24, 5)).astype("f")
Y = RNG.standard_normal((24, 2)).astype("f")
PARAMS = {"w": RNG.standard_normal((5, 2)).astype("f"), "b": np.zeros(2, "f")}


def loss(p, batch):
    return jnp.mean((batch["x"] @ p["w"] + p["b"][None] - batch["y"]) ** 2)


def counted(**settings):
    """A step that counts its own traces."""
    traces = []

    @jc.data_parallel(**settings)
    def step(params, batch):
        traces.append(1)
        return jax.tree.map(lambda p, g: p - g, params, jc.grad(loss, "data")(params, batch))

    return step, traces


@pytest.mark.tensorflow("A7")
@pytest.mark.parametrize(
    ("n", "kind"), [(None, AxisType.Auto), (1, AxisType.Explicit), (8, AxisType.Explicit)]
)
def test_compiles_once_per_shape(n, kind):
    elsewhere = NamedSharding(mesh_of(8, "elsewhere", kind), PartitionSpec())
    for put in (np.asarray, jnp.asarray, lambda x: jax.device_put(x, elsewhere)):
        step, traces = counted(mesh=n and mesh_of(n, kind=kind))
        params = jax.tree.map(put, PARAMS)
        for rows, compiles in ((24, 1), (24, 0), (24, 0), (16, 1), (16, 0)):
            with CompileCounter() as compiled:
                params = step(params, {"x": X[:rows], "y": Y[:rows]})
            assert compiled.count == compiles
        assert len(traces) == 2


def test_placed_arrays_are_not_copied():
    step = jc.data_parallel(lambda p, x: jax.tree.map(lambda a: a + 1, p))
    other = NamedSharding(Mesh(step.mesh.devices, ("elsewhere",)), PartitionSpec())
    rows = jax.device_put(X, NamedSharding(step.mesh, PartitionSpec("data")))
    pointers = lambda x: [s.data.unsafe_buffer_pointer() for s in x.addressable_shards]
    for params in (rows, step(rows, rows), jax.device_put(X, other)):
        params = (
            params
            if params is not rows
            else jax.device_put(X, NamedSharding(step.mesh, PartitionSpec()))
        )
        (placed, batch), *_ = step._arguments.place(step._arguments.check((params, rows), {}))
        assert pointers(placed) == pointers(params)
        assert batch is rows


@pytest.mark.parametrize("place", ["host", "one device", "twice on one device", "replicated"])
def test_shared_array_may_be_donated(place):
    """Weights and their average are one array before the first step."""
    x = np.arange(16, dtype="f").reshape(8, 2)

    def update(state, shown, batch):
        grads = jc.grad(lambda w, batch: jnp.sum(batch @ w), "data")(state["w"], batch)
        average = 0.5 * state["average"] + 0.5 * state["w"]
        return {"w": state["w"] - grads, "average": average}, shown + state["w"]

    w = np.ones(2, "f") if place == "host" else jnp.ones(2)
    if place == "replicated":
        w = jc.data_parallel(lambda w, batch: 1 * w)(w, x)
    average = jax.device_put(w, w.sharding) if place == "twice on one device" else w
    step = jc.data_parallel(update, batch_argnums="batch", donate_argnums="state")
    state, shown = step({"w": w, "average": average}, w, x)
    np.testing.assert_array_equal(state["average"], np.ones(2))
    np.testing.assert_allclose(state["w"], 1 - x.mean(0))
    np.testing.assert_array_equal(shown, 2 * np.ones(2))


def test_donated_arguments_are_used_up():
    @jc.data_parallel(donate_argnums=0)
    def step(p, x):
        return p + jc.all_reduce("mean", x.mean(0), "data")

    params = jax.device_put(X[0], NamedSharding(step.mesh, PartitionSpec()))
    out = step(params, X)
    assert params.is_deleted()
    np.testing.assert_allclose(out, X[0] + X.mean(0), rtol=1e-5)
    timed = jc.data_parallel(step.__wrapped__, options=jc.CommunicationOptions(timeout_seconds=60))
    for one in (step, timed):
        with pytest.raises(ValueError, match="is deleted: it was donated to an earlier call"):
            one(params, X)
    np.testing.assert_allclose(step(out, X), X[0] + 2 * X.mean(0), rtol=1e-5)


def test_options_are_defaults_inside():
    """The trace cache of a function jitted by the user does not outlive them."""
    own = jc.CommunicationOptions(implementation="auto")
    inner = jax.jit(lambda x: jc.all_reduce("sum", x, "data"))
    step = lambda x: (inner(x[0]), jc.all_reduce("sum", x[0], "data", options=own))
    ring = jc.CommunicationOptions(7, implementation="ring")
    for options, algorithms in ((ring, ["ring", "native"]), (None, ["native", "native"])):
        wrapped = jc.data_parallel(step, options=options)
        plans = plans_of(wrapped, X)
        assert [p.algorithm for p in plans] == algorithms
        assert all("at most 7 bytes" in p.reasons[0] for p in plans) == bool(options)
        assert ("collective_permute" in wrapped.lower(X).as_text()) == bool(options)


def test_settings_are_checked_before_tracing():
    def step(x):
        raise AssertionError("it was traced")

    for settings, words in (
        ({"mesh": jax.make_mesh((8,), ("data",)), "axis_name": "dta"},
         r"over axis 'dta': the mesh has no such axis. Its axes: 'data'"),
        ({"mesh": Mesh(np.array([], dtype=object), ("data",))}, "`data_parallel` got no devices"),
        ({"mesh": Mesh(np.array(jax.devices())[[0, 1, 0]], ("data",))}, "got a device twice: cpu:0"),
        ({"mesh": jax.devices()}, r"expects `mesh` to be a jax.sharding.Mesh or None; got list"),
        ({"axis_name": ("node", "data")}, "needs a `mesh` that has them"),
        ({"axis_name": ()}, "`axis_name` to be a string or a non-empty tuple"),
        ({"batch_argnums": 1.5}, "`batch_argnums` must be a position or a name of an argument, or .*; got 1.5"),
        ({"batch_argnums": (0, None)}, r"or a sequence of these; got \(0, None\)"),
        ({"donate_argnums": (True,)}, "`donate_argnums` must be a position or a name"),
        ({"options": 3}, "`options` must be a CommunicationOptions"),
        ({"varying_outputs": "stack"}, "'error', 'concatenate', or a tree of them; got 'stack'"),
        ({"check_vma": None}, "`check_vma` must be True or False; got None"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            jc.data_parallel(step, **settings)(X)
    for name in ("axis_name", "donate_argnums", "options"):
        with pytest.raises(AttributeError):  # a program that is compiled already would not follow
            setattr(jc.data_parallel(step), name, "other")


def sums(p, batch, mode=None):
    return jc.all_reduce("sum", (p * batch).sum(), "data")


REFUSED = [  # a step, how it is wrapped, its arguments, and the words
    (lambda p, x: {"ok": p, "bad": [x @ p["w"]]}, {}, (PARAMS, X),
     r"output \['bad'\]\[0\] of the step differs between replicas \(it varies over 'data'\)"
     r".*jc.all_reduce\(\"mean\".*concatenate"),
    (lambda x: x, {}, (X,), "the output of the step differs"),
    (lambda x: x.sum(), {"varying_outputs": "concatenate"}, (X,),
     r"is a scalar, which cannot be concatenated.*x\[None\]"),
    (lambda p, x: (p, x), {"varying_outputs": ("error",) * 3}, (PARAMS, X),
     "`varying_outputs` is a tree that does not fit"),
    (3, {}, (X,), "expects a function; got int"),
    (lambda p, x: x, {"batch_argnums": 2}, (1.0, X),
     "argument 2 is named in `batch_argnums`, .* called with 2 positional"),
    (sums, {"batch_argnums": "rows"}, (2.0, X), "argument 'rows' is named in `batch_argnums`, but the function has "),
    (sums, {}, (1.0, X[:0]), r"batch has no rows \(its shape is \[0, 5\]\); pass at least 8"),
    (sums, {}, (1.0, {"x": X, "y": X[:21]}), r"batch\['y'\] has 21 rows, which do not divide over 8 "
     r"replicas along 'data' \(21 = 8 × 2 \+ 5\).*WeightedLoss"),
    (sums, {}, (1.0, {"x": 3.0}), r"batch\['x'\] is a scalar and cannot be split over 8"),
    (sums, {}, (1.0, X, jnp.tanh), r"`: mode is not an array .* `functools.partial`"),
    (sums, {}, ({"act": "relu"}, X), r"p\['act'\] is not an array or a number; got str"),
    (sums, {}, ({"w": jax.new_ref(X)}, X), r"p\['w'\] is a `jax.Ref`, .* Pass the array"),
    *((sums, {}, (1.0, {"x": X, "y": words}), r"batch\['y'\] has elements of dtype .*expected num")
      for words in (np.array(["a"] * 8), np.array([{}] * 8), np.zeros(8, "M8[s]"),
                    np.zeros(8, [("a", "f")]))),
]  # fmt: skip


def test_bad_calls_are_refused():
    for step, settings, args, words in REFUSED:
        with pytest.raises(ValueError, match=words):
            jc.data_parallel(step, **settings)(*args)


def test_deadline_names_the_step():
    """The thread that waits does not know the caller's x64; the program must."""
    ended = threading.Event()

    def spin(x):
        late = jax.pure_callback(lambda: np.float32(ended.wait(60)), jax.typeof(jnp.float32(0)))
        return jc.all_reduce("sum", late.astype(x.dtype) * x.sum(), "data")

    step, patient = (
        jc.data_parallel(spin, options=jc.CommunicationOptions(timeout_seconds=seconds))
        for seconds in (0.3, 120)
    )
    words = "Call 1 of `spin` did not finish within 0.3 s"
    with pytest.raises(jc.errors.DeadlineExceededError, match=words):
        step(X)
    ended.set()
    np.testing.assert_allclose(patient(X), X.sum(), rtol=1e-4)
    with jax.enable_x64(True):
        assert patient(X.astype(np.float64)).dtype == np.float64
        with CompileCounter() as again:
            patient(X.astype(np.float64))
    assert again.count == 0


def test_types_have_their_own_line():
    step = jc.data_parallel(lambda w, x: {"mean": jc.pmean((w * x).sum(), "data"), "w": w})
    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((), (16, 5))]
    words = r"`step.trace\(...\).out_info`.*`step.trace\(...\).jaxpr`"
    for around in (jax.eval_shape, lambda f, *args: jax.make_jaxpr(f)(*args)):
        with pytest.raises(ValueError, match=words):
            around(step, *shapes)
    for args in (shapes, (np.float32(2), X[:16])):
        traced = step.trace(*args)
        assert [(x.shape, x.dtype.name) for x in jax.tree.leaves(traced.out_info)] == [
            ((), "float32")
        ] * 2
        assert "psum" in str(traced.jaxpr)


def test_traced_step_is_refused():
    step = jc.data_parallel(lambda w, x: jc.all_reduce("sum", (w * x).sum(), "data"))
    for around in (jax.jit, jax.grad, jax.vmap):
        given = np.ones(3, "f") if around is jax.vmap else 1.0
        with pytest.raises(
            ValueError, match="`: w is being traced. A wrapped step is a program of"
        ):
            around(lambda w: step(w, X))(given)
        with pytest.raises(ValueError, match="`: x is being traced"):
            around(lambda x: step(1.0, x=x))(given)


CLOSED_OVER = {
    "of the mean": lambda s, w, x: jax.grad(
        jc.mean_loss(lambda w: s * jnp.mean((x @ w) ** 2)))(w),
    "jc.grad": lambda s, w, x: jc.grad(lambda w, x: s * jnp.mean((x @ w) ** 2), "data")(w, x),
    "pmap": lambda s, w, x: jax.lax.pmean(
        jax.grad(lambda w: s * jnp.mean((x @ w) ** 2))(w), "data"),
}  # fmt: skip


@pytest.mark.parametrize("name", CLOSED_OVER)
def test_step_may_close_over_tracers(name):
    def scaled(s):
        return jc.data_parallel(lambda w, x: CLOSED_OVER[name](s, w, x))(PARAMS["w"], X).sum()

    want = scaled(1.0)
    for found in (jax.jit(scaled)(3.0) / 3, jax.grad(scaled)(3.0)):
        np.testing.assert_allclose(found, want, rtol=1e-5)
    rows = jax.vmap(scaled)(jnp.array([0.0, 2.0]))
    np.testing.assert_allclose(rows, [0 * want, 2 * want], rtol=1e-5)


@pytest.mark.parametrize("batch_argnums", [None, -1, 1, "batch", ("batch",)])
def test_batch_is_found_by_name(batch_argnums):
    step = jc.data_parallel(sums, batch_argnums=batch_argnums)
    for args, names in (
        ((2.0, X), {}),
        ((2.0,), {"batch": X}),
        ((), {"batch": X, "p": 2.0}),
        ((), {"p": 2.0, "batch": X}),
    ):
        np.testing.assert_allclose(step(*args, **names), 2 * X.sum(), rtol=1e-4)


def test_keywords_may_name_the_batch():
    def step(p, *, batch, shift=0.0):
        return jc.all_reduce("sum", (p * batch).sum() + shift, "data")

    named = jc.data_parallel(step, batch_argnums="batch")
    np.testing.assert_allclose(named(2.0, batch=X), 2 * X.sum(), rtol=1e-4)
    np.testing.assert_allclose(named(2.0, batch=X, shift=1.0), 2 * X.sum() + 8, rtol=1e-4)
    predict = jc.data_parallel(lambda rows, scale=1.0: rows * scale, varying_outputs="concatenate")
    np.testing.assert_array_equal(predict(X, scale=2.0), 2 * X)
    np.testing.assert_array_equal(predict(X), X)
    optional = jc.data_parallel(
        lambda p, q=None, *, batch=None: sums(p, batch), batch_argnums="batch"
    )
    np.testing.assert_allclose(optional(2.0, batch=X), 2 * X.sum(), rtol=1e-4)
    lacks = r"missing a required argument: 'batch': .* sums\(.*batch.*\), but was called with "
    for args, names, given in (
        ((2.0,), {"butch": X}, r"\(float, butch="),
        ((2.0,), {}, r"\(float\)"),
        ((jnp.asarray(X),), {}, r"\(float32\[\d+, 5\]\)"),
    ):
        with pytest.raises(TypeError, match=lacks + given):
            jc.data_parallel(sums)(*args, **names)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Model:
    w: jax.Array

    @jc.data_parallel
    def summed(self, batch):
        return sums(self.w, batch)


class Slotted:
    __slots__ = ()
    step = jc.data_parallel(lambda self, batch: sums(1.0, batch))


class Scaled:
    scale = 2.0

    @jc.data_parallel
    @classmethod
    def step(cls, p, batch):
        return cls.scale * sums(p, batch)


class More(Scaled):
    scale = 3.0


def test_steps_may_be_methods():
    class Trainer:
        def __init__(self, scale):
            self.scale, self.traces = scale, 0

        @jc.data_parallel
        def step(self, p, batch):
            """Documented."""
            self.traces += 1
            return self.scale * sums(p, batch)

        @jc.data_parallel(batch_argnums=0)
        def first(self, batch, p):
            return self.scale * sums(p, batch)

    assert isinstance(Trainer.step, DataParallel)
    assert (Trainer.step.__name__, Trainer.step.__doc__) == ("step", "Documented.")
    two, three = Trainer(2.0), Trainer(3.0)
    calls = [
        (two.step, 2),
        (three.step, 3),
        (lambda p, x: three.first(x, p), 3),
        (Scaled.step, 2),
        (More.step, 3),
        (More().step, 3),
        (lambda p, x: Slotted().step(x), 1),
    ]
    calls += [(lambda p, x, w=w: Model(w).summed(x), w) for w in (2.0, 3.0)]  # no constant
    for _ in range(2):
        for call, scale in calls:
            np.testing.assert_allclose(call(1.0, X), scale * X.sum(), rtol=1e-4)
    assert (two.traces, three.traces) == (1, 1)
    assert len(plans_of(two.step, 1.0, X)) == 1


class Doubling:
    scale = 2.0

    @jc.data_parallel
    def step(self, p, batch):
        return self.scale * sums(p, batch)


def test_objects_copy_and_pickle_steps():
    made = Doubling()
    made.other = jc.data_parallel(lambda p, batch: p)
    assert made.other(1.0, X) == 1
    copied = copy.deepcopy(made)
    assert copied.other(1.0, X) == 1
    assert copied.step.__wrapped__.__self__ is copied
    del made.other
    for new in (copied, copy.copy(made), pickle.loads(pickle.dumps(made))):
        new.scale = 3.0
        np.testing.assert_allclose(new.step(1.0, X), 3 * X.sum(), rtol=1e-4)
    np.testing.assert_allclose(made.step(1.0, X), 2 * X.sum(), rtol=1e-4)


def test_replaced_method_is_forgotten():
    """As in a notebook, whatever numbers the objects of former steps had."""
    made = Doubling()
    for scale in range(6):
        Doubling.later = jc.data_parallel(lambda self, p, batch, k=scale: k * p)
        assert made.later(1.0, X) == scale


def test_concatenation_ignores_types():
    """Of an output that happens to be the same everywhere each replica still has its rows."""

    def step(p, x):
        rows = x.shape[0]
        return {
            "p": x @ p["w"],
            "zeros": jnp.zeros((rows, 2)),
            "mean": jc.all_reduce("mean", x, "data"),
            "total": jc.all_reduce("sum", x.sum(), "data"),
        }

    rows = {"p": X @ PARAMS["w"], "zeros": np.zeros((24, 2)), "total": X.sum()}
    for check_vma in (True, False):
        joined = jc.data_parallel(step, varying_outputs="concatenate", check_vma=check_vma)(
            PARAMS, X
        )
        close(joined, rows | {"mean": np.tile(X.reshape(8, 3, 5).mean(0), (8, 1))}, rtol=1e-4)
        assert joined["total"].is_fully_replicated
    rule = {"p": "concatenate", "zeros": "concatenate", "mean": "error", "total": "error"}
    each = jc.data_parallel(step, varying_outputs=rule)(PARAMS, X)
    assert [x.shape for x in jax.tree.leaves(each)] == [(3, 5), (24, 2), (), (24, 2)]
    mesh = jax.make_mesh((2, 4), ("a", "b"))
    for axes in (("a", "b"), ("b", "a")):
        same = jc.data_parallel(
            lambda x: x * 1.0, mesh=mesh, axis_name=axes, varying_outputs="concatenate"
        )
        np.testing.assert_array_equal(same(X), X)


def test_shapes_suffice_for_tracing():
    traces = []

    def train(p, x, scale):
        traces.append(1)
        return jax.tree.map(lambda a: a + 1, p), sums(p["w"].sum(), scale * x)

    step = jc.data_parallel(train, batch_argnums=1, donate_argnums=0)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (PARAMS, X))
    params = jax.device_put(PARAMS, NamedSharding(step.mesh, PartitionSpec()))
    fresh = step.lower(*shapes, 2).as_text(), plans_of(step, *shapes, 2)
    traces.clear()
    step(params, X, 2)
    assert not traces, "numbers are weakly typed, as they are when they are placed"
    assert params["w"].is_deleted()
    with jax.transfer_guard("disallow"):
        assert plans_of(step, params, X, 2) == fresh[1]
        assert step.lower(params, X, 2).as_text() == fresh[0]
    assert jc.inspect(step, params, X, 2).plans == fresh[1]
    assert len(plans_of(step, {"w": jnp.ones(3), "b": 2.0}, X, 2)) == 1
