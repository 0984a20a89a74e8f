"""What processes compare of a program is what there is to compare."""

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxcoll as jc
from jaxcoll._dispatch.call import Call
from jaxcoll._dispatch.dispatch import group_of
from jaxcoll._dispatch.executable import compiled_for
from jaxcoll._dispatch.fingerprint import collectives, first_difference
from jaxcoll._dispatch.shared_program import shared_program, starts_with
from jaxcoll._dispatch.watchdog import watchdog
from jaxcoll._observe.parse.replica_groups import read_groups
from jaxcoll._observe.report import report_of

GOLDEN = sorted((Path(__file__).parents[1] / "observe" / "golden").rglob("*.hlo*"))


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.name)
def test_every_collective_that_a_report_finds_is_compared_with_its_groups_and_packs(path):
    text = path.read_text()
    found, lines = report_of(text), collectives(text)
    assert [line.split()[0] for line in lines] == [c.kind for c in found.collectives]
    for line in lines:
        groups = re.search(r" among (.*?)(?:, asked for |, carrying |$)", line)[1]
        assert read_groups(groups) or groups == "{}"
        assert f"={groups}, " in text
    wanted = {pack for row in found.rows for pack in row.packs}
    named = set(re.findall(r"\w+/(?:pack|rows)\d+", "\n".join(lines)))
    # TPU compilers keep the scopes of several beside their results, and the first one's here.
    assert named == wanted or ("v6e" in path.name and set() < named < wanted)


def moved(program):
    return collectives(program.compiled.as_text())


def test_programs_that_sum_over_other_axes_of_one_mesh_differ():
    mesh = jax.make_mesh((2, 2), ("a", "b"))
    x = jax.device_put(jnp.ones((4, 4)), NamedSharding(mesh, PartitionSpec("a", "b")))
    marks = set()
    for axis in ("a", "b", ("a", "b")):

        @jax.jit
        @functools.partial(
            jax.shard_map,
            mesh=mesh,
            in_specs=PartitionSpec("a", "b"),
            out_specs=PartitionSpec("a", "b"),
        )
        def step(x, axis=axis):
            return x + jax.lax.psum(x, axis)

        marks.add(compiled_for(Call(step, (x,), (), "step"), shared_program).mark)
    assert len(marks) == 3


def test_a_collective_is_named_with_the_leaves_that_it_carries():
    @jc.data_parallel
    def step(rows):
        mean = jc.reduce_scatter("mean", {"w": rows.mean(0), "b": rows.sum()}, "data")
        return jc.all_gather(mean, "data")

    call, _ = step._call((jnp.ones((8, 128)),), {})
    program = compiled_for(call, shared_program)
    assert [line.split()[0] for line in moved(program)] == ["reduce-scatter", "all-gather"]
    for half, line in zip(("reduce_scatter", "all_gather"), moved(program), strict=True):
        assert re.search(rf", carrying {half}_[0-9a-f]{{6}}/pack0$", line)
    assert re.search(
        r"Collective 1 of 2 of .*/pack0 has \['b'\] … \['w'\]\)\.", starts_with(program)
    )


def test_the_collective_that_processes_wait_at_is_the_first_that_they_come_to():
    ring = [(k, (k + 1) % 8) for k in range(8)]

    @jc.data_parallel
    def step(rows):
        first = jc.all_reduce("mean", rows[0], "data") + rows[0]
        last = jax.lax.fori_loop(0, 5, lambda _, x: jax.lax.ppermute(x * 2, "data", ring), first)
        return jc.all_reduce("sum", last, "data")

    program = compiled_for(step._call((jnp.ones((8, 4)),), {})[0], shared_program)
    assert [line.split()[0] for line in moved(program)] == [
        "all-reduce",
        "collective-permute",
        "all-reduce",
    ]
    assert "Collective 1 of 3 of `step` of float32[8,4] is all-reduce" in starts_with(program)


def test_gathered_rows_are_named_with_their_leaf():
    @jc.data_parallel
    def step(rows):
        slices = jc.IndexedSlices(rows, jnp.arange(1), (9, 128))
        return jc.all_reduce("mean", {"b": rows[0], "table": slices}, "data")["table"].values

    program = compiled_for(step._call((jnp.ones((8, 128)),), {})[0], shared_program)
    assert re.search(
        r"all-gather .*, carrying (all_reduce_\w+/rows1) \(\1 has \['table'\]\)\.",
        starts_with(program),
    )


def test_a_difference_in_length_is_one():
    difference = first_difference({0: ("a",), 1: ("a", "b")})
    assert difference == "process 0: (nothing more)\nprocess 1: b"


def test_what_processes_must_have_in_common_is_compared_in_every_call():
    program, x = jax.jit(lambda x: x + 1), jnp.arange(3)

    def mark(settings):
        call = Call(program, (x,), jax.devices()[:1], "a call", settings=settings)
        return compiled_for(call, shared_program).mark

    assert len({mark("leaf a"), mark("leaf b"), mark("leaf a")}) == 2


def test_one_process_has_nobody_to_ask():
    assert watchdog() is None
    assert group_of(jax.devices()) is None
