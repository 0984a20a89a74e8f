"""Who is told of a corrupted reduction: the call that made it raises, and a user's program logs it."""

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import HUGE, corrupt_huge_sums, each_row, mesh_of, program
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxcoll as jc
from jaxcoll._dispatch.corruption_log import Reports, listening
from jaxcoll._plan.plan import Corruption

OPTIONS = jc.CommunicationOptions(checksum=True)
GOOD = np.ones((4, 300), np.float32)
BAD = GOOD * np.float32(2 * HUGE)
FOUND = Corruption("all_reduce_123456/pack0", "['w'] … ['z']", 1, 4)


@pytest.fixture(autouse=True)
def corrupted(monkeypatch):
    corrupt_huge_sums(monkeypatch.setattr)


@functools.cache
def step_of(options):
    return jc.data_parallel(
        lambda x: jc.all_reduce("sum", {"w": x[0]}, "data"), mesh=mesh_of(4), options=options
    )


def in_step(options, x):
    return step_of(options)(x)["w"]


def in_run(x):
    def replica(x):
        return jc.get_replica_context().all_reduce("sum", {"w": x})["w"]

    strategy = jc.MirroredStrategy([f"cpu:{i}" for i in range(4)])
    return strategy.run(replica, args=(jc.PerReplica(list(x)),), options=OPTIONS)[0]


def in_op(op, x, to=None):
    value = each_row(4, {"w": x})
    result = op.reduce("sum", value, to or value, options=OPTIONS)
    return (result if to else result[0])["w"]


def in_reduce(x):
    strategy = jc.MirroredStrategy([f"cpu:{i}" for i in range(4)])
    value = each_row(4, {"w": x})
    return strategy.reduce("sum", value, axis=None, options=OPTIONS)["w"]


def in_batch(x):
    value = each_row(4, {"w": x})
    small = jc.PerReplica(list(x[:2] * 0))
    results = jc.NcclAllReduce().batch_reduce(
        "sum", [(value, value), (small, small)], options=OPTIONS
    )
    return results[0][0]["w"]


FACES = {
    "data_parallel": functools.partial(in_step, OPTIONS),
    "with a deadline": functools.partial(in_step, OPTIONS.replace(timeout_seconds=60)),
    "run": in_run,
    "NcclAllReduce": functools.partial(in_op, jc.NcclAllReduce()),
    "HierarchicalCopyAllReduce": functools.partial(in_op, jc.HierarchicalCopyAllReduce()),
    "batch_reduce": in_batch,
    "ReductionToOneDevice": functools.partial(in_op, jc.ReductionToOneDevice()),
    "to one device": functools.partial(in_op, jc.NcclAllReduce(), to="cpu:5"),
    "to a device of its own": functools.partial(
        in_op, jc.ReductionToOneDevice("cpu:7"), to="cpu:5"
    ),
    "reduce": in_reduce,
}


@pytest.mark.parametrize("face", FACES.values(), ids=FACES)
def test_a_call_raises_and_names_the_pack_and_its_leaves_and_the_next_goes_on(face, caplog):
    assert (face(GOOD) == 4).all()
    message = (
        r"(?s)was corrupted: .* in all_reduce_\w+/pack\d of .*\['w'\], on [12] of [24] replicas"
    )
    with pytest.raises(jc.ReductionCorruptedError, match=message) as raised:
        face(BAD)
    ((pack, leaves),) = raised.value.packs.items()
    assert pack in str(raised.value)
    assert leaves.endswith("['w']")
    assert (face(GOOD) == 4).all()
    assert not caplog.records


def logged(caplog):
    assert {r.levelname for r in caplog.records} <= {"WARNING"}
    return [r.getMessage() for r in caplog.records if r.name == "jaxcoll"]


@pytest.mark.parametrize("runner", ["vmap", "pmap", "checked", "unchecked"])
def test_where_nothing_can_be_raised_it_is_logged_once_a_process(runner, caplog):
    def reduced(x):
        return jc.all_reduce("mean", {"a": x, "b": x[:2] * 0}, "data", options=OPTIONS)

    call = program(runner, reduced, 4)
    call(GOOD)
    assert not logged(caplog)
    for times in (1, 2):
        out = jax.block_until_ready(call(BAD))
        assert jnp.isnan(out["a"]).all()
        assert not out["b"].any()
        assert len(logged(caplog)) == times
    assert "came back as NaN: all_reduce_" in logged(caplog)[0]
    assert "/pack0 of ['a'], on 1 of 4 replicas." in logged(caplog)[0]


def test_a_checksum_that_the_call_itself_did_not_ask_for_is_logged(caplog):
    step = jc.data_parallel(
        lambda x: jc.all_reduce("sum", x[0], "data", options=OPTIONS), mesh=mesh_of(4)
    )
    assert jnp.isnan(step(BAD)).all()
    assert len(logged(caplog)) == 1


def reduced(x):
    return jc.all_reduce("sum", x, "data", options=OPTIONS)


def in_a_scan(x):
    return lax.scan(lambda c, i: (c + reduced(x * i).sum(), None), jnp.float32(0), jnp.arange(3.0))[
        0
    ]


def in_a_while_loop(x):
    return lax.while_loop(
        lambda at: at[0] < 3, lambda at: (at[0] + 1, at[1] + reduced(x * at[0])), (0.0, 0 * GOOD[0])
    )[1]


def in_the_backward_loop(x):
    def loss(w, x):
        def layer(c, w):
            return c + (jc.sync_in_backward(w, "data", options=OPTIONS) ** 2 * x).sum(), None

        return lax.scan(layer, 0 * x.sum(), w)[0]

    return jc.grad(loss, "data", reduce_op="sum", options=OPTIONS)(jnp.ones((2, 300)), x)


def in_a_derivative(x):
    return jc.grad(lambda w, x: (w * x).sum(), "data", reduce_op="sum", options=OPTIONS)(
        jnp.float32(1), x
    )


def in_a_vmap(x):
    return jax.vmap(reduced)(jnp.stack([x, 0 * x, x]))


def in_a_rematerialised_part(x):
    return jax.checkpoint(lambda x: jnp.sin(reduced(x)))(x)


TIMES = {
    in_a_scan: 2,
    in_a_while_loop: 2,
    in_the_backward_loop: 2,
    in_a_derivative: 1,
    in_a_vmap: 1,
    in_a_rematerialised_part: 1,
}


@pytest.mark.parametrize("place", TIMES, ids=lambda place: place.__name__)
@pytest.mark.parametrize("runner", ["pmap", "checked"])
def test_every_loop_rule_and_branch_lets_it_through(place, runner, caplog):
    call = program(runner, place, 2)
    jax.block_until_ready(call(GOOD[:2]))
    assert not logged(caplog)
    out = jax.block_until_ready(call(BAD[:2]))
    assert jnp.isnan(out).any()
    assert len(logged(caplog)) == TIMES[place]


def test_groups_of_replicas_are_told_apart(caplog):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=P(("model", "data")), out_specs=P("model"))
    def mapped(x):
        return reduced(x)

    for group in (0, 1):
        x = GOOD.copy()
        x[2 * group] = BAD[0]
        jax.block_until_ready(mapped(x))
        assert len(logged(caplog)) == group + 1


def test_what_is_exported_marks_and_does_not_tell(caplog):
    program = jax.jit(jax.vmap(reduced, axis_name="data"))
    for platforms in (("cpu",), ("cuda",), ("cpu", "tpu")):
        exported = jax.export.export(program, platforms=platforms)(GOOD)
        assert "callback" not in exported.mlir_module()
        if platforms == ("cpu",):
            assert jnp.isnan(exported.call(BAD)).all()
    assert not logged(caplog)


def test_a_program_has_no_address_in_it_and_a_branch_that_is_not_taken():
    step = jc.data_parallel(lambda x: reduced(x[0]), mesh=mesh_of(4), options=OPTIONS)
    text = step.lower(GOOD).compile().as_text()
    (call,) = [line for line in text.splitlines() if "python_cpu_callback" in line]
    assert "index = 0" in call
    assert "conditional(" in text


def test_reports_go_to_the_calls_over_their_devices_whatever_thread_they_come_in(caplog):
    devices = jax.devices()
    other = frozenset(devices[4:6])

    def report(over):
        tell = threading.Thread(target=Reports(over), args=((FOUND,), (), 0))
        tell.start()
        tell.join()

    listening(lambda: report(other), "A call", devices[:4])
    listening(lambda: report(frozenset()), "A call", devices[:4])
    assert len(logged(caplog)) == 2
    more = r"A call was corrupted.*in all_reduce_123456/pack0 of \['w'\] … \['z'\], on 1 of 4 replicas\."
    with pytest.raises(jc.ReductionCorruptedError, match=more):
        listening(lambda: report(frozenset(devices[:2])), "A call", devices[:4])
    assert len(logged(caplog)) == 2
