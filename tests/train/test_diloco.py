"""diloco: replicas train by themselves, and n of them are their simulation."""

import jax
import numpy as np
import optax
import pytest
from cases import close as nearly
from cases import grid, mesh_of
from diloco_simulation import PARAMS, local_step, loss, rows, simulated

import jaxcoll as jc

pytestmark = pytest.mark.usefixtures("dtypes_may_mix")

ADAM = optax.adam(1e-2)
NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)


def close(got, want, tolerance=1e-5):
    nearly(got, want, rtol=0, atol=tolerance)


def begun(train, tx=ADAM):
    return train.init(PARAMS, tx.init(PARAMS))


def trained(train, state, steps, n, begin=0):
    losses = []
    for t in range(begin + 1, begin + steps + 1):
        state, value = train(state, rows(t, n))
        losses.append(np.asarray(value))
    return state, np.asarray(losses)


@pytest.mark.parametrize(("every", "compression"), [(1, None), (5, None), (30, "int4")])
def test_steps_equal_the_simulation(every, compression):
    options = compression and jc.CommunicationOptions(compression=compression)
    given = {"every": every, "outer": NESTEROV, "options": options}
    train = jc.diloco(local_step(ADAM), mesh=mesh_of(4), **given)
    state, losses = trained(train, begun(train), 60, 4)
    want = simulated(ADAM, 4, 60, **given)
    close((state.shared, state.replicas[0], losses), want)
    assert int(state.steps) == 60


def test_always_exchanging_is_data_parallel():
    sgd = optax.sgd(0.1)

    @jc.data_parallel(mesh=mesh_of(4))
    def step(params, batch):
        value, grads = jc.value_and_grad(loss, "data")(params, batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value

    for outer in (optax.sgd(1.0), None):
        train = jc.diloco(local_step(sgd), every=1, outer=outer, mesh=mesh_of(4))
        state, params = begun(train, sgd), PARAMS
        for t in range(20):
            state, losses = train(state, rows(t, 4))
            params, value = step(params, rows(t, 4))
            close(losses.mean(), value)
        close(state.shared, params)


def test_only_rounds_send():
    train = jc.diloco(local_step(ADAM), every=6, mesh=mesh_of(4))
    state = begun(train)
    report = jc.inspect(train.step, state.replicas, rows(0, 4))
    assert (report.count, report.wire_bytes, report.uncounted) == (0, 0, ())
    report = jc.inspect(train.sum, *train.arguments(state))
    assert report.wire_bytes == 2 * 3 * 4 * sum(x.size for x in PARAMS.values()) // 4
    assert [list(row.leaves) for row in report.rows] == [["['a']", "['b']", "['c']"]]


@pytest.mark.slow
def test_checkpoint_within_a_round(tmp_path):
    made = lambda n: jc.diloco(local_step(ADAM), every=5, outer=NESTEROV, mesh=mesh_of(n))
    train = made(4)
    want, _ = trained(train, begun(train), 23, 4)
    state, _ = trained(train, begun(train), 12, 4)
    jc.save_checkpoint(tmp_path / "state.npz", state, step=12)
    restored, step = jc.restore_checkpoint(tmp_path / "state.npz", begun(train))
    assert step == restored.steps == 12
    got, _ = trained(made(4), restored, 11, 4, begin=12)
    close(got, want, 0)

    for n in (2, 6):
        train = made(n)
        other = train.restart(restored)
        close((other.shared, other.outer), (restored.shared, restored.outer), 0)
        own, before = jax.tree.map(np.asarray, (other.replicas, restored.replicas[1]))
        for i in range(n):
            mine, optimizer = jax.tree.map(lambda x, i=i: x[i], own)
            close(mine, restored.shared, 0)
            close(optimizer, jax.tree.map(lambda x, i=i: x[i % 4], before), 0)
        with pytest.raises(ValueError, match=rf"rows for 4 replicas, and this process has {n}"):
            train(restored, rows(0, n))
    trained(train, other, 3, 6, begin=12)


def test_several_axes_in_any_order():
    sgd = optax.sgd(0.1)
    train = jc.diloco(
        local_step(sgd), every=2, mesh=grid(2, 2), axis_name=("data", "node"),
        options=jc.CommunicationOptions(algorithm="native/native"),
    )  # fmt: skip
    state, losses = trained(train, begun(train, sgd), 4, 4)
    want = simulated(sgd, 4, 4, 2, optax.sgd(1.0))
    close((state.shared, state.replicas[0], losses), want)


def test_nonfinite_replicas_show_in_shared():
    train = jc.diloco(lambda w, s, x: (w + x.mean(), s, w), every=2, mesh=mesh_of(2))
    state = train.init(np.ones(3, "f"), ())
    for x in ([1, np.nan], [1, 1]):
        state, _ = train(state, np.float32(x))
    assert np.isnan(state.shared).all()


def descent(w, state, batch):
    return w - 0.1 * (w - batch.mean()), state, w


REFUSED = [
    ({"every": 0}, "`diloco` expects `every` to be an integer above 0; got 0"),
    ({"every": 1.5}, "`diloco` expects `every` to be an integer above 0; got 1.5"),
    ({"outer": 0.7}, "`outer` must be None or an optax transformation.* got 0.7"),
    ({"axis_name": "rows"}, "`diloco` over axis 'rows': the mesh has no such axis"),
    ({"options": "int8"}, "CommunicationOptions"),
    ({"step": 3}, "`step` must be a function, the step of one device; got 3"),
    ({"step": jc.data_parallel(descent)}, "the step of one device; got DataParallel"),
]  # fmt: skip


def test_wrong_arguments_are_refused():
    for arguments, message in REFUSED:
        with pytest.raises(ValueError, match=message):
            jc.diloco(**{"step": descent, "mesh": mesh_of(2), **arguments})


def test_wrong_states_are_refused():
    train = jc.diloco(descent, mesh=mesh_of(2))
    state, batch = train.init(np.ones(3, "f"), ()), np.ones(4, "f")
    stepped = lambda step: jc.diloco(step, mesh=mesh_of(2))(state, batch)
    refused = {
        r"params\['n'\] has dtype int32, and its mean another":
            lambda: train.init({"n": np.arange(3), "w": np.ones(3)}, ()),
        "params is not an array of numbers; got str": lambda: train.init("w", ()),
        r"opt_state\[0\] is not an array of numbers; got str": lambda: train.init(np.ones(3), ["s"]),
        "expects the state that `init` returned; got float64": lambda: train(np.ones(3), batch),
        r"batch\['x'\] has shape \(3,\), .* divide over 2 replicas": lambda: train(state, {"x": np.ones(3)}),
        r"batch has shape \(\)": lambda: train(state, np.float32(1)),
        "cannot be traced: .* `step` or its `sum`": lambda: jax.jit(train)(state, batch),
        "each device is a replica, but the mesh has the axes {'node': 2} beside":
            lambda: jc.diloco(descent, mesh=grid(2, 2)).init(np.ones(3), ()),
        r"returns \(params, opt_state, metrics\); got 2 values": lambda: stepped(lambda w, s, x: (w, s)),
        r"the types that it got; params float32\[3\] became params float16\[3\]":
            lambda: stepped(lambda w, s, x: (w.astype("e"), s, x)),
        r"got; nothing became opt_state\['n'\] float32\[\]": lambda: stepped(lambda w, s, x: (w, {"n": x[0]}, x)),
    }  # fmt: skip
    for message, call in refused.items():
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("axis", ["data", "jaxcoll_replica"])
def test_reducing_steps_are_refused(axis):
    def step(w, state, batch):
        return w - jc.grad(lambda w, x: (w * x.mean()).sum(), axis)(w, batch), state, 0

    train = jc.diloco(step, mesh=mesh_of(2))
    with pytest.raises(NameError, match=f"over axis '{axis}': no such axis here. Call") as caught:
        train(train.init(np.ones(3, "f"), ()), np.ones(4, "f"))
    assert "a step of one device, without reductions" in caught.value.__notes__[0]
