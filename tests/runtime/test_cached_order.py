"""Programs that would lose the order of their collectives do not pass through JAX's cache."""

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src import compilation_cache as internal
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AxisType

import jaxcoll as jc
from jaxcoll._compat.running import FROM_CACHE
from jaxcoll._runtime import dispatch
from jaxcoll._runtime.cached_order import has_nested_collective

P, AXIS = jax.P, "replica"
X = np.ones((8, 4), "f")


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], set[str]]]:
    """JAX's cache is an empty folder; the names of the programs that are written there."""
    write = internal.put_executable_and_time
    monkeypatch.setattr(internal, "put_executable_and_time", inspect.unwrap(write))
    names = "jax_compilation_cache_dir", "jax_compilation_cache_include_metadata_in_key"
    before = [getattr(jax.config, name) for name in names]
    for name, value in zip(names, (str(tmp_path), False), strict=True):  # as users have it
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield lambda: {re.split("-[0-9a-f]{64}", file.name)[0] for file in tmp_path.iterdir()}
    for name, value in zip(names, before, strict=True):
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def plain(x):
    """A loop without collectives, and a collective outside of it."""
    return lax.psum(lax.scan(lambda s, _: (jnp.sin(s), None), x, length=3)[0], AXIS)


def loop(x):
    return lax.scan(lambda s, _: (jc.pmean(s, AXIS) + s, None), plain(x), length=3)[0]


def branch(x):
    total = plain(x).sum()
    place = lax.axis_index(AXIS).astype(total.dtype)
    return lax.cond(total > 0, lambda: lax.psum(total + place, AXIS), lambda: total)


FUNCTIONS = plain, loop, branch


def as_a_step(function, **options):
    options = jc.CommunicationOptions(**options)
    jc.data_parallel(function, axis_name=AXIS, batch_argnums=0, options=options)(X)


WAYS = {
    "step": as_a_step,
    "within a deadline": lambda function: as_a_step(function, timeout_seconds=60),
    "strategy": lambda function: jc.MirroredStrategy().run(function, (X,)),
}


@pytest.mark.parametrize("way", WAYS)
def test_only_programs_without_nested_collectives_are_written(way, written):
    for function in FUNCTIONS:
        WAYS[way](function)
    names = written()
    assert "jit_plain" in names
    assert not names & {"jit_loop", "jit_branch"}


def test_one_device_has_no_order_to_lose(written):
    step = jc.data_parallel(loop, mesh=jax.make_mesh((1,), (AXIS,)), axis_name=AXIS)
    step(X)
    assert "jit_loop" in written()


def test_what_was_written_without_care_is_not_read(written, monkeypatch):
    """By a version that did not look, or by the user's own compilation of the same text."""
    calls = [lambda f=f: jc.data_parallel(f, axis_name=AXIS, batch_argnums=0)(X) for f in FUNCTIONS]
    with monkeypatch.context() as careless:
        careless.setattr(dispatch, "compiled_in_order", lambda call: contextlib.nullcontext())
        for call in calls:
            call()
    assert {"jit_plain", "jit_loop", "jit_branch"} <= written()
    events, hits = [], []
    note = lambda event, **_: events.append(event)
    jax.monitoring.register_event_listener(note)
    for call in calls:
        jax.clear_caches()
        events.clear()
        call()
        hits.append(events.count(FROM_CACHE))
    jax.monitoring.unregister_event_listener(note)
    plain_hits, *others = hits
    assert plain_hits > 0 == sum(others)


COLLECTIVES = {
    "psum": lambda x: lax.psum(x, "data"),
    "pmax": lambda x: lax.pmax(x, "data"),
    "all_gather": lambda x: lax.all_gather(x, "data").sum(0),
    "ppermute": lambda x: lax.ppermute(x, "data", [(0, 1), (1, 0)]),
    "psum_scatter": lambda x: jnp.tile(lax.psum_scatter(x, "data", tiled=True), (2, 1)),
    "all_to_all": lambda x: lax.all_to_all(x, "data", 0, 0, tiled=True),
    "axis_index": lambda x: x + lax.axis_index("data").astype(x.dtype),
    "none": jnp.sin,
}


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("axes", [{"data"}, {"data", "model"}])
def test_nested_collectives_are_those_of_the_compiled_program(name, axes):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def run(x):
        return lax.fori_loop(0, x[0, 0].astype(int), lambda _, s: COLLECTIVES[name](s), x)

    mapped = jax.shard_map(run, mesh=mesh, in_specs=P("data"), out_specs=P("data"),
                           axis_names=axes, check_vma=False)  # fmt: skip
    traced = jax.jit(lambda x: jnp.sin(mapped(x))).trace(X)
    nested = traced.lower().compile().as_text().split("ENTRY")[0]
    # The compiler may put any collective where arrays are split over an axis that nobody mapped.
    expected = bool(re.search(r" (all-|reduce-scatter|collective-)", nested)) or len(axes) == 1
    assert has_nested_collective(traced.jaxpr) == expected
