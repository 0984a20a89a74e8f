"""Processes out of step, late, stopped and dead: each ends in an error that names what is wrong."""

import collections
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from processes import ranks

import jaxcoll as jc
from jaxcoll._compat.coordination import store

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("types_may_mix")]


def total(tree):
    return jc.all_reduce("sum", jax.tree.map(lambda x: x[0], tree), "data")


def double(tree):
    return jc.all_reduce("sum", jax.tree.map(lambda x: 2 * x[0], tree), "data")


def average(tree):
    return jc.all_reduce("mean", jax.tree.map(lambda x: x[0], tree), "data")


def ones(size=4, dtype="float32"):
    return np.ones((1, size), dtype)


def first(result):
    return float(np.asarray(jax.tree.leaves(result)[0].addressable_data(0)).ravel()[0])


def over_all(tree):
    """A value over all processes, of which this one has a row."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    place = lambda x: jax.make_array_from_process_local_data(jax.NamedSharding(mesh, jax.P("x")), x)
    return jc.PerReplica.from_global(jax.tree.map(place, tree))


def check_refused(call, words="", done="nothing was run"):
    with pytest.raises(jc.errors.ProgramMismatchError) as caught:
        call()
    for text in (words, done):
        assert text in str(caught.value), caught.value
    assert "(no difference)" not in str(caught.value)
    return str(caught.value)


def test_unsteady_processes_go_on(launch):
    def run():
        odd = jax.process_index() == 1
        step, twice, mean = map(jc.data_parallel, (total, double, average))
        asked = {"ring": {"algorithm": "ring"}, "patient": {"timeout_seconds": 20}}
        ring, patient = (
            jc.data_parallel(total, options=jc.CommunicationOptions(**each))
            for each in asked.values()
        )
        one, other = (twice, step) if odd else (step, twice)
        reduce, row = jc.NcclAllReduce().reduce, over_all(ones(3))
        assert first(step(ones())) == 2
        for call, difference in (
            (lambda: step(ones(6 if odd else 5)),
             "process 0: argument args[0]: float32[2,5]\nprocess 1: argument args[0]: float32[2,6]"),
            (lambda: step(ones(4, "int32" if odd else "float32")), "args[0]: float32[2,4]\nprocess 1: argument args[0]: int32[2,4]"),
            (lambda: step({"b" if odd else "a": ones()}), "process 0: argument args[0]['a']: float32[2,4]\nprocess 1: argument args[0]['b']"),
            (lambda: step({"a": ones(2 + odd), "b": ones(3 - odd)}), "args[0]['a']: float32[2,2]\nprocess 1: argument args[0]['a']: float32[2,3]"),
            (lambda: (mean if odd else step)(ones(8)), "process 0: program `total`\nprocess 1: program `average`"),
            (lambda: (ring if odd else step)(ones(9)),
             "options CommunicationOptions()\nprocess 1: options CommunicationOptions(algorithm='ring')"),
            (lambda: one(ones(7)), "process 0: program `total`\nprocess 1: program `double`"),
            (lambda: other(ones(7)), "process 0: program `double`\nprocess 1: program `total`"),
            (lambda: reduce("mean" if odd else "sum", row, row), "(<ReduceOp.SUM: 'SUM'>"),
        ):  # fmt: skip
            check_refused(call, difference)
        assert first(step(ones())) == first(patient(ones())) == 2
        difference = "0: argument args[0]: float32[2,4]\nprocess 1: argument args[0]: float32[2,11]"
        check_refused(lambda: patient(ones(11 if odd else 4)), difference, "")

    launch(run, 2)


def test_lookalike_calls_are_refused(launch):
    """Calls that look alike, of which two processes mean something else, before each is right."""

    def run():
        one_of, step = lambda *choices: choices[jax.process_index()], jc.data_parallel(total)
        sine = lambda x: jc.all_reduce("sum", jnp.sin(x[0]), "data")
        exponential = lambda x: jc.all_reduce("sum", jnp.exp(x[0]), "data")
        scaled = lambda by: jc.data_parallel(lambda x: jc.all_reduce("sum", by * x[0], "data"))
        negative = lambda x: jax.tree.map(jnp.negative, total(x))
        moments = collections.namedtuple("Moments", one_of("mean var", "var mean"))
        strategy, value = jc.MultiWorkerMirroredStrategy(), jc.PerReplica([np.ones((2, 2), "f")])
        in_order = lambda one, two: collections.OrderedDict(
            one_of([("a", one), ("b", two)], [("b", one), ("a", two)])
        )
        names, both = one_of("a", "c"), over_all(in_order(ones(2), ones(2)))
        nested = one_of({"a": {"b": value}}, {"a": value})
        for call in (
            lambda: jc.data_parallel(one_of(lambda x: total(x), negative))(ones()),
            lambda: scaled(one_of(0.1, 0.2))(ones()),
            lambda: step(in_order(ones(), ones())),
            lambda: strategy.run(one_of(lambda x: jnp.sin(x), lambda x: jnp.exp(x)), (value,)),
            lambda: strategy.run(lambda x: x, (in_order(value, value),)),
            lambda: strategy.reduce("sum", in_order(value, value), None),
            lambda: strategy.reduce("sum", {names: value}, None),
            lambda: strategy.reduce("sum", moments(value, value), None),
            lambda: strategy.reduce("sum", nested, None),
            lambda: strategy.reduce("sum", value, one_of(0, 1)),
            lambda: strategy.reduce(one_of("sum", "mean"), value, 0),
            lambda: strategy.reduce("sum", {names: value}, 0),
            lambda: strategy.gather(in_order(value, value), 0),
            lambda: strategy.gather(value, one_of(0, 1)),
            lambda: jc.NcclAllReduce().batch_reduce("sum", [(both, both)]),
        ):
            check_refused(call)
            assert first(step(ones())) == 2
        text = check_refused(lambda: jc.data_parallel(one_of(sine, exponential))(ones(20)))
        here, there = text.splitlines()[1:3]
        assert here.startswith("process 0: line ")
        assert "= stablehlo.sine " in here
        assert there.startswith("process 1: line ")
        assert "= stablehlo.exponential " in there

    launch(run, 2)


def test_departure_from_order_is_stopped(launch):
    """Two pairs that went round a loop, or called one program; then one of each departs from it."""

    def run():
        rank = jax.process_index()
        loops = rank % 2 == 0
        pair = [d for d in jax.devices() if d.process_index % 2 == rank % 2]
        mesh = jax.sharding.Mesh(np.array(pair), ("data",))
        one, two = (jc.data_parallel(f).on(mesh) for f in (total, double))
        for f in (one, one, two) * 4 if loops else (one, two, *[one] * 1000):
            f(ones())
        last, *departs = (one, one, two) if rank < 2 else (one, two, one)
        assert first(last(ones())) == 2
        for call in (*departs, one):
            check_refused(lambda: call(ones()), "program `total`", "program `double`")  # noqa: B023
        words = (
            f"run different programs as call {14 if loops else 1004}; process {rank % 2} is already "
            "running its own. The first difference:"
        )
        check_refused(lambda: one(ones()), words, "")

    launch(run, 4)


@pytest.mark.tensorflow("F25", "F26", "F28", "G4", "G29")
def test_late_process_collective_are_named(launch):
    """One comes when the other has given up waiting for it, and both go on."""

    def run():
        keys, step = store(), jc.data_parallel(total)
        hurried = jc.data_parallel(total, options=jc.CommunicationOptions(timeout_seconds=1.5))
        assert first(step(ones())) == 2
        if jax.process_index():
            keys.get("given up", 60)  # so it is told while the late one still waits for that
            assert first(step(ones())) == 2
        else:
            with pytest.raises(
                jc.errors.DeadlineExceededError,
                match=r"not been in any call for \d+\.\d s, since call 1",
            ) as late:
                hurried(ones())
            assert late.value.ranks == (1,)
            for words in (
                "Call 1 of `total` did not finish within 1.5 s. Process 1 of 2 did not arrive",
                "in `total` of float32[2,4] is ",
                "/pack0 has (the value)",
            ):
                assert words in str(late.value)
            keys.set("given up", "")
        assert first(step(ones())) == 2

    launch(run, 2)


@pytest.mark.tensorflow("K23")
def test_survivors_name_dead_go_on():
    command = [sys.executable, Path(__file__).with_name("faults.py")]
    logs = ranks.launch(command, 4, timeout=200, ends=(0, 1))
    assert ["held\n" in log for log in logs] == [True, True, False, False]
