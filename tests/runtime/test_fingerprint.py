"""What processes compare of a program is what there is to compare."""

import re
import types

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxcoll as jc
from jaxcoll._runtime import dispatch
from jaxcoll._runtime.call import Call
from jaxcoll._runtime.executable import compile_once
from jaxcoll._runtime.fingerprint import compile_shared, describe_collective, find_difference
from jaxcoll._runtime.watchdog import watchdog


def test_programs_over_other_axes_differ():
    mesh, both = jax.make_mesh((2, 2), ("a", "b")), PartitionSpec("a", "b")
    x = jax.device_put(jnp.ones((4, 4)), NamedSharding(mesh, both))
    digests = set()
    for axis in ("a", "b", ("a", "b")):
        add = lambda x, axis=axis: x + jax.lax.psum(x, axis)
        step = jax.jit(jax.shard_map(add, mesh=mesh, in_specs=both, out_specs=both))
        digests.add(compile_once(Call(step, (x,), (), "step"), compile_shared).digest)
    assert len(digests) == 3


RING = [(k, (k + 1) % 8) for k in range(8)]


def halves(rows):
    mean = jc.reduce_scatter("mean", {"w": rows.mean(0), "b": rows.sum()}, "data")
    return jc.all_gather(mean, "data")


def loop(rows):
    first = jc.all_reduce("mean", rows[0], "data") + rows[0]
    last = jax.lax.fori_loop(0, 5, lambda _, x: jax.lax.ppermute(x * 2, "data", RING), first)
    return jc.all_reduce("sum", last, "data")


def table(rows):
    slices = jc.IndexedSlices(rows, jnp.arange(1), (9, 128))
    return jc.all_reduce("mean", {"b": rows[0], "table": slices}, "data")["table"].values


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (halves, r"first of 2 collectives in .* is reduce-scatter .*, carrying (\S+/pack0) \(\1 has \['b'\] … \['w'\]\)\.$"),
        (loop, r"first of 3 collectives in `loop` of float32\[8,128\] is all-reduce f32\[128\] among \{\{0,1,2,3,4,5,6,7\}\}, "
         "requested as psum"),
        (table, r"all-gather .*, carrying (all_reduce_\w+/rows1) \(\1 has \['table'\]\)\.$"),
        (lambda rows: rows, "^`<lambda>` of float32.8,128. has no collective.$"),
    ],
)  # fmt: skip
def test_first_collective_names_its_leaves(step, words):
    step = jc.data_parallel(step, varying_outputs="concatenate")
    program = compile_once(step.prepare(jnp.ones((8, 128)))[0], compile_shared)
    assert re.search(words, describe_collective(program)), describe_collective(program)


def test_unreadable_program_hides_no_error():
    compiled = types.SimpleNamespace(as_text=lambda: "no program")
    assert describe_collective(types.SimpleNamespace(compiled=compiled, name="")) == ""


def test_length_is_a_difference():
    difference = find_difference({"process 0": ("a",), "process 1": ("a", "b")})
    assert difference == "process 0: (nothing more)\nprocess 1: b"


def test_every_call_compares_settings():
    program, x = jax.jit(lambda x: x + 1), jnp.arange(3)

    def mark(settings):
        call = Call(program, (x,), jax.devices()[:1], "a call", settings=settings)
        return compile_once(call, compile_shared).digest

    assert len({mark("leaf a"), mark("leaf b"), mark("leaf a")}) == 2


def test_lone_process_is_warned(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    dispatch._warn_where_alone.cache_clear()
    assert watchdog() is None
    with pytest.warns(UserWarning, match="WORLD_SIZE=4 says that this process is one of several"):
        assert dispatch.find_group(jax.devices()) is None
    assert dispatch.find_group(jax.devices()) is None  # once
