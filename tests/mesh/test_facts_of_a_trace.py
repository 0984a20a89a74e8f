"""A trace reads no file, no environment and no clock: packs follow from sizes and the world."""

import builtins
import contextlib
import os
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import mapped, mesh_of

import jaxcoll as jc
from jaxcoll._collectives.scope import Scope, entered
from jaxcoll._step.mesh.world import make_worlds

ROWS = np.ones((8, 4), "f")


@contextlib.contextmanager
def asks_nobody():
    """No environment, file or clock is read in here."""

    def refused(*args, **kwargs):
        raise AssertionError(f"a trace read {args}")

    with pytest.MonkeyPatch.context() as patch:
        for owner, names in (
            (type(os.environ), "__getitem__ get"),
            (os, "getenv sched_getaffinity scandir listdir"),
            (builtins, "open"),
            (pathlib.Path, "open read_text exists glob"),
            (time, "time monotonic perf_counter"),
        ):
            for name in names.split():
                patch.setattr(owner, name, refused)
        yield


def collectives(x, axis):
    """Every in-program function that makes a plan."""
    with asks_nobody():
        grads = jc.grad(lambda w, x: jnp.mean((x @ w) ** 2), axis)(jnp.ones((4, 2)), x)
        halves = jc.all_gather(jc.reduce_scatter("sum", {"a": x}, axis), axis)
        total, first = jc.all_reduce("sum", x, axis), jc.broadcast(x, axis)
        return sum(map(jnp.sum, jax.tree.leaves((grads, halves, total, first))))


RUNS = {
    "data_parallel": lambda f: jc.data_parallel(lambda x: f(x, "data"), mesh=mesh_of(4))(ROWS),
    "a strategy": lambda f: jc.MirroredStrategy().run(lambda x: f(x, "replica"), (np.ones((8, 4), "f"),)),
    "shard_map, above which nobody stands": lambda f: mapped(lambda x: f(x, "data"))(ROWS),
}  # fmt: skip


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_trace_reads_no_surroundings(run):
    run(collectives)
    with pytest.raises(AssertionError, match="a trace read"), asks_nobody():
        os.environ.get("HOME")


def test_equal_scopes_share_traces():
    mesh, traces = mesh_of(4), []
    assert Scope(make_worlds(mesh)) == Scope(make_worlds(mesh))
    assert hash(Scope(make_worlds(mesh))) == hash(Scope(make_worlds(mesh)))
    assert Scope(make_worlds(mesh)) != Scope(make_worlds(mesh_of(2)))

    @jax.jit
    def total(x):
        traces.append(x.shape)
        return jc.all_reduce("sum", x, "data")

    def program(x):
        with entered(Scope(make_worlds(mesh))):
            return total(x)

    for _ in range(2):
        mapped(lambda x: program(x), mesh=mesh)(ROWS)
    assert traces == [(2, 4)]
