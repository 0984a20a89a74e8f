"""A call like the last is looked at once, and what would be refused or moved still is."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import mesh_of

import jaxcoll as jc
from jaxcoll._step.placed_arguments import Arguments

MESH = mesh_of(2)
WHOLE = jax.NamedSharding(MESH, jax.P())
ROWS = jax.NamedSharding(MESH, jax.P("data"))
REVERSED = jax.sharding.Mesh(jax.devices()[1::-1], ("data",))


def copies(x):
    return jax.device_put(np.asarray(x, "f"), WHOLE)


def rows(x):
    return jax.device_put(np.asarray(x, "f"), ROWS)


def train(w, x):
    return {k: a + jc.all_reduce("mean", x.mean(), "data") for k, a in w.items()}


@pytest.fixture
def looks(monkeypatch):
    """The calls whose arguments were looked at."""
    calls, check = [], Arguments.check
    monkeypatch.setattr(Arguments, "check", lambda *a: calls.append(a) or check(*a))
    return calls


@pytest.fixture(scope="module")
def step():
    return jc.data_parallel(train, mesh=MESH)


def test_placed_calls_are_not_checked(step, looks):
    w, x = {"a": np.float32(0), "b": np.zeros(3, "f")}, np.ones(4, "f")
    for _ in range(4):
        w = step(w, x)
    assert len(looks) == 4, "a batch of the host is placed each time"
    x = rows(x)
    for _ in range(4):
        w = step(w, x)
    assert len(looks) == 5
    w = step(w, x=x)
    for _ in range(2):
        w = step(w, x=x)
    assert len(looks) == 6, "by keyword it is another kind of call"
    np.testing.assert_array_equal(w["b"], [11, 11, 11])


@pytest.mark.parametrize(
    ("another", "words"),
    [
        (lambda w, x: (w, rows(np.ones((4, 1)))), None),
        (lambda w, x: (w, np.ones(4, "f")), None),
        (lambda w, x: (w, jax.device_put(np.ones(4, "f"), WHOLE)), None),
        (lambda w, x: ({**w, "a": 1.0}, x), None),
        (lambda w, x: ({**w, "a": jax.device_put(w["a"], jax.devices()[1])}, x), None),
        (lambda w, x: ({**w, "a": jax.device_put(w["a"], jax.devices()[3])}, x), None),
        (lambda w, x: (w, jax.device_put(x, jax.NamedSharding(REVERSED, jax.P("data")))), None),
        (lambda w, x: (jax.device_put(w, jax.NamedSharding(REVERSED, jax.P())), x), None),
        (lambda w, x: ({"a": w["a"], "b": w["a"]}, x), None),
        (lambda w, x: (w, copies(np.ones(3))), "3 rows, which do not divide"),
        (lambda w, x: (w, "x"), "is not an array or a number; got str"),
    ],
)
def test_unlike_calls_are_served(step, another, words):
    w, x = {"a": copies(1), "b": copies([1, 2])}, rows(np.ones(4))
    for _ in range(3):
        step(w, x)
    for _ in range(2):
        if words:
            with pytest.raises(ValueError, match=words):
                step(*another(w, x))
        else:
            result = step(*another(w, x))
            assert float(result["a"]) == 2
            assert all(leaf.sharding == WHOLE for leaf in result.values())
        assert float(step(w, x)["a"]) == 2
    with pytest.raises(ValueError, match="is being traced"):
        jax.jit(step)(w, x)
    w["b"].delete()
    with pytest.raises(ValueError, match=r"float32\[2\] in the arguments is deleted"):
        step(w, x)


def test_keywords_bind_by_name():
    step = jc.data_parallel(lambda w, v, x: w - 2 * v + x.sum() * 0, mesh=mesh_of(1), batch_argnums="x", varying_outputs="concatenate")  # fmt: skip
    whole = jax.NamedSharding(mesh_of(1), jax.P())
    one, five = (jax.device_put(np.full(2, x, "f"), whole) for x in (1, 5))
    for _ in range(3):
        step(x=one, v=one, w=one)
    assert step(x=one, v=one, w=five).tolist() == [3, 3]


@dataclasses.dataclass
class _Checked:
    x: Any
    y: Any

    def __post_init__(self):
        if isinstance(self.y, jax.Array) and not isinstance(self.y, jax.core.Tracer):
            assert self.x.ndim == 2
            if float(self.y.min()) < 0:
                raise ValueError("below 0")
        elif isinstance(self.y, jax.sharding.Sharding):
            raise ValueError("not an array")


jax.tree_util.register_dataclass(_Checked)


def test_checking_trees_are_served():
    """Of the batch, which is in place in two ways; and of the result, whose error is the user's."""
    runs = []

    def train(w, batch):
        jax.debug.callback(lambda: runs.append(1))
        mean = jc.all_reduce("mean", batch.x.mean() + batch.y.mean(), "data")
        return _Checked(jnp.zeros((1, 1)), w + mean)

    step = jc.data_parallel(train, mesh=MESH, donate_argnums="w")
    x = jax.device_put(np.ones((4, 2), "f"), jax.NamedSharding(MESH, jax.P("data", None)))
    batch = _Checked(x, rows(np.ones(4)))
    for _ in range(3):
        assert float(step(copies(1), batch).y) == 3
    jax.effects_barrier()
    runs.clear()
    with pytest.raises(ValueError, match="below 0"):
        step(copies(-9), batch)
    jax.effects_barrier()
    assert len(runs) == 2, "once on each replica"


def test_callbacks_may_trace_their_step():
    asked, inner = [], []

    def host(w):
        if asked:
            inner.append(step(*asked.pop()))
        return w

    def train(w, x):
        w = jax.pure_callback(host, jax.ShapeDtypeStruct((), "float32"), w)
        return jc.all_reduce("sum", w + x.sum(), "data")

    mesh = mesh_of(1)
    step = jc.data_parallel(train, mesh=mesh)
    w = jax.device_put(np.float32(1), jax.NamedSharding(mesh, jax.P()))
    x = jax.device_put(np.ones(4, "f"), jax.NamedSharding(mesh, jax.P("data")))
    for _ in range(3):
        jax.block_until_ready(step(w, x))
    asked.append((np.float32(1), np.ones(6, "f")))
    assert float(step(w, x)) == 5
    assert float(inner[0]) == 7


def test_same_claims_outlive_traces():
    step = jc.data_parallel(lambda w, x: jc.same(w + x.sum(), "data"), mesh=MESH)
    w, equal = copies(1), rows(np.ones(4))
    for x in (equal, equal, rows(np.ones(2))):
        step.trace(w, rows(np.arange(6.0)))
        step(w, x)
    with pytest.raises(jc.errors.ReplicaDivergenceError):
        step(w, rows(np.arange(6.0)))


def test_later_deadlines_bound_quick_calls():
    limit = jc.CommunicationOptions(timeout_seconds=60)

    def train(w, x):
        return w + jc.all_reduce("sum", x, options=limit if x.size > 2 else None).sum()

    step = jc.data_parallel(train, mesh=MESH)
    w, x = copies(1), rows(np.ones(2))
    for _ in range(3):
        step(w, x)
    step.trace(w, rows(np.ones(8)))
    assert step.prepare(w, x)[0].timeout_seconds == 60
    assert float(step(w, x)) == 3


def test_shared_arrays_are_donated_once():
    step = jc.data_parallel(lambda w, v, x: (w + x.sum(), v), mesh=MESH, batch_argnums="x", donate_argnums=("w", "v"), varying_outputs="concatenate")  # fmt: skip
    x = rows(np.ones(4))
    for _ in range(2):
        w, v = copies(np.zeros(2)), copies(np.ones(2))
        step(w, v, x)
    w = copies(np.ones(2))
    _, same = step(w, w, x)
    assert np.asarray(same)[:2].tolist() == [1, 1]


class LookedError(Exception):
    """Carries the arguments of a call that was looked at, so that nothing of it runs."""


@pytest.mark.parametrize("donated", [("w", "v"), "w", "v"])
@pytest.mark.parametrize("lies", [None, WHOLE], ids=["one device", "mesh"])
def test_shared_memory_is_copied(donated, lies, monkeypatch):
    """An array on one device, and what was made of it there or on a mesh; both orders."""
    copy_shared = Arguments._copy_shared

    def look(self, call):
        raise LookedError(copy_shared(self, call).args[:2])

    monkeypatch.setattr(Arguments, "_copy_shared", look)
    step = jc.data_parallel(lambda w, v, x: (w + x.sum(), v + 1), mesh=MESH, batch_argnums="x", donate_argnums=donated, varying_outputs="concatenate")  # fmt: skip
    one = jax.device_put(np.ones(99, "f"), jax.devices()[0])
    other = jax.device_put(one, lies or jax.devices()[0])
    for args in ((one, other), (other, one)):
        with pytest.raises(LookedError) as looked:
            step(*args, np.ones(4, "f"))
        parts = [part.data for x in looked.value.args[0] for part in x.addressable_shards]
        assert len({part.unsafe_buffer_pointer() for part in parts}) == len(parts)


def test_placed_runs_are_not_checked(monkeypatch):
    from jaxcoll.distribute import _replica_program as replica_program

    looks, close = [], replica_program.place_arguments
    monkeypatch.setattr(replica_program, "place_arguments", lambda *a: looks.append(a) or close(*a))
    strategy = jc.MirroredStrategy(["cpu:0", "cpu:1"])

    def step(w, x):
        return w + jc.get_replica_context().all_reduce("sum", x), x

    w, x = 0.0, jc.PerReplica([jnp.float32(1), jnp.float32(2)])
    for _ in range(5):
        w, x = strategy.run(step, args=(w, x))
    assert float(w[1]) == 15
    assert len(looks) == 2, "a number, then its sum"
    with jax.enable_x64(True):
        strategy.run(step, args=(w, x))
    assert len(looks) == 3, "under other settings it is another program"
    x = jc.PerReplica([1.0, 2.0], devices=jax.devices()[1::-1])
    for _ in range(2):
        with pytest.raises(ValueError, match="is a PerReplica over cpu:1, cpu:0; the replicas are"):
            strategy.run(step, args=(w, x))
    x = jc.PerReplica([1.0, 2.0])
    strategy.run(step, args=(w, x))
    x.tree.delete()
    with pytest.raises((ValueError, RuntimeError), match="deleted"):
        strategy.run(step, args=(w, x))
