"""A call like the last is looked at once, and what would be refused or moved still is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import mesh_of

import jaxcoll as jc
from jaxcoll._mesh.placement import InPlace
from jaxcoll._step.placed_arguments import Arguments

MESH = mesh_of(2)
WHOLE = jax.NamedSharding(MESH, jax.P())
ROWS = jax.NamedSharding(MESH, jax.P("data"))


def copies(x):
    return jax.device_put(np.asarray(x, "f"), WHOLE)


def rows(x):
    return jax.device_put(np.asarray(x, "f"), ROWS)


def train(w, x):
    return {k: a + jc.all_reduce("mean", x.mean(), "data") for k, a in w.items()}


@pytest.fixture
def asked(monkeypatch):
    """How often a call was looked at closely."""
    calls, close = [], Arguments.check
    monkeypatch.setattr(Arguments, "check", lambda *a: calls.append(a) or close(*a))
    return calls


@pytest.fixture(scope="module")
def step():
    return jc.data_parallel(train, mesh=MESH)


def test_a_loop_is_looked_at_until_all_is_in_place(step, asked):
    w, x = {"a": np.float32(0), "b": np.zeros(3, "f")}, np.ones(4, "f")
    for _ in range(4):
        w = step(w, x)
    assert len(asked) == 4, "a batch of the host is placed each time"
    x = rows(x)
    for _ in range(4):
        w = step(w, x)
    assert len(asked) == 5
    np.testing.assert_array_equal(w["b"], [8, 8, 8])


@pytest.mark.parametrize(
    ("another", "words"),
    [
        (lambda w, x: (w, rows(np.ones((4, 1)))), None),
        (lambda w, x: (w, np.ones(4, "f")), None),
        (lambda w, x: ({**w, "a": 1.0}, x), None),
        (lambda w, x: ({**w, "a": jax.device_put(w["a"], jax.devices()[1])}, x), None),
        (lambda w, x: ({"a": w["a"], "b": w["a"]}, x), None),
        (lambda w, x: (w, copies(np.ones(3))), "3 rows, which do not divide"),
        (lambda w, x: (w, "x"), "is not an array or a number; got str"),
    ],
)
def test_a_call_unlike_the_last_is_looked_at_closely_and_refused_however_often_its_like_was_passed(
    step, asked, another, words
):
    w, x = {"a": copies(1), "b": copies([1, 2])}, rows(np.ones(4))
    for _ in range(2):
        step(w, x)
    before = len(asked)
    if words:
        with pytest.raises(ValueError, match=words):
            step(*another(w, x))
    else:
        found = step(*another(w, x))
        assert float(found["a"]) == 2
    assert len(asked) == before + 1
    with pytest.raises(ValueError, match="is being traced"):
        jax.jit(step)(w, rows(np.ones(4)))
    w["b"].delete()
    with pytest.raises(ValueError, match=r"float32\[2\] in the arguments is deleted"):
        step(w, rows(np.ones(4)))


def test_an_array_that_is_passed_twice_is_given_away_once():
    step = jc.data_parallel(lambda w, v, x: (w + x.sum(), v), mesh=MESH, batch_argnums="x", donate_argnums=("w", "v"), varying_outputs="concatenate")  # fmt: skip
    x = rows(np.ones(4))
    for _ in range(2):
        w, v = copies(np.zeros(2)), copies(np.ones(2))
        step(w, v, x)
    w = copies(np.ones(2))
    _, same = step(w, w, x)
    assert np.asarray(same)[:2].tolist() == [1, 1]


def test_runs_of_a_strategy_are_looked_at_until_all_is_in_place(monkeypatch):
    from jaxcoll._distribute import replica_program

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
    x.tree.delete()
    with pytest.raises((ValueError, RuntimeError), match="deleted"):
        strategy.run(step, args=(w, x))


def test_what_is_not_all_arrays_is_like_nothing():
    assert InPlace.record([np.ones(2)], jax.tree.structure(0)) is None
