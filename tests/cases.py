"""Runners, trees and references that the suites share."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

import jaxcoll as jc
from jaxcoll._hlo.hlo import read_hlo
from jaxcoll._report.shown_plan import Plan

P = PartitionSpec
ROWS, WHOLE = P("data"), P()
RUNNERS = ("vmap", "pmap", "checked", "unchecked")

OPTIONS = {
    "auto": jc.CommunicationOptions(),
    "packed": jc.CommunicationOptions(bytes_per_pack=40),
    "ring": jc.CommunicationOptions(implementation="ring"),
    "ring-in-2": jc.CommunicationOptions(algorithm="ring", bytes_per_pack=1 << 10, shards=2),
    "halving_doubling": jc.CommunicationOptions(algorithm="rechd", bytes_per_pack=1 << 10),
    "shuffle": jc.CommunicationOptions(algorithm="psgpu", bytes_per_pack=1 << 10),
    "one-owner": jc.CommunicationOptions(algorithm="shuffle", bytes_per_pack=1 << 10, shards=1),
}


def plans_of(step, *args):
    """The plans of a step's reductions, from a trace alone; `jc.inspect` compiles, too."""
    plans = []
    step.trace_recorded(plans.append, *args)
    return tuple(map(Plan.of, plans))


def mesh_of(n, axis="data", kind=AxisType.Auto):
    return Mesh(np.array(jax.devices()[:n]), (axis,), axis_types=(kind,))


def grid(*shape, kind=AxisType.Auto):
    """A mesh of several axes, of which "data" is the last, "node" the one before, and so on."""
    names = ("pod", "node", "data")[-len(shape) :]
    devices = np.array(jax.devices()[: math.prod(shape)]).reshape(shape)
    return Mesh(devices, names, axis_types=(kind,) * len(shape))


def mapped(f, ins=ROWS, outs=WHOLE, mesh=4, **how):
    """`jax.shard_map` in a program, over a mesh or over so many devices along "data"."""
    mesh = mesh_of(mesh) if isinstance(mesh, int) else mesh
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=ins, out_specs=outs, **how))


def devices(n):
    return jax.devices()[:n]


def of_replicas(n, fun):
    """A value between programs: of replica i, on device i, what `fun` gives for i."""
    return jc.PerReplica.from_function(fun, devices=devices(n))


def each_row(n, tree):
    """A value between programs of the n rows of every leaf."""
    return jc.PerReplica([jax.tree.map(lambda a, i=i: jnp.asarray(a[i]), tree) for i in range(n)])


def split(n, tree):
    """Consecutive rows for each of n replicas, as `run` takes them."""
    return jax.tree.map(lambda x: x.reshape(n, -1, *x.shape[1:]), tree)


def on_replicas(runner, f, n, *batch, **how):
    """`f` of consecutive rows of the batch on each replica; what the first one has of it."""
    return jax.tree.map(lambda x: x[0], run(runner, f, n, *split(n, batch), **how))


def vmapped(f, *args):
    return fetched(jax.jit(jax.vmap(f, axis_name="data"))(*args))


def refused(words, f, *args, error=ValueError):
    """Tracing `f` on replicas raises an error of these words."""
    with pytest.raises(error, match=words):
        jax.eval_shape(jax.vmap(f, axis_name="data"), *args)


def fetched(tree):
    """The leaves in NumPy: every operation on a `jax.Array` would be compiled by itself."""
    return jax.tree.map(np.asarray, tree)


def held(array):
    """What each device holds of an array that is the same on all of them, stacked."""
    return np.stack([shard.data for shard in array.addressable_shards])


def program(runner, f, n, jit=True, varying=False):
    """`run` of everything but the values: called again, it is not traced and compiled again."""
    checked = runner == "checked"
    if runner == "vmap":
        mapped = jax.vmap(f, axis_name="data")
    elif runner == "pmap":
        mapped = jax.pmap(f, axis_name="data", devices=devices(n))
    else:
        spec, stacked = PartitionSpec("data"), varying or not checked

        def body(*blocks):
            out = f(*jax.tree.map(lambda x: x[0], blocks))
            return jax.tree.map(lambda x: x[None], out) if stacked else out

        outs = spec if stacked else PartitionSpec()
        mapped = jax.shard_map(
            body, mesh=mesh_of(n), in_specs=spec, out_specs=outs, check_vma=checked
        )
    mapped = jax.jit(mapped) if jit and runner != "pmap" else mapped
    read = held if checked and not varying else np.asarray
    return lambda *given: jax.tree.map(read, mapped(*given))


def run(runner, f, n, *stacked, jit=True):
    """Call `f` on n replicas; each takes row i of every leaf. Returns the replicas' results, stacked.

    Under the checked runner the result must be invariant: `out_specs=P()` is the proof, and what
    comes back is what each device holds.
    """
    return program(runner, f, n, jit)(*stacked)


def per_replica(runner, f, n, *stacked):
    """As `run`, for an `f` whose result varies: every replica's own comes back, stacked."""
    return program(runner, f, n, varying=True)(*stacked)


def rows(n, *shape, dtype=np.float32, seed=0):
    """n replicas' values of one leaf: small integers and halves, so that sums can be exact."""
    rng = np.random.default_rng([seed, n, *shape])
    x = rng.integers(-8, 8, (n, *shape))
    return x.astype(dtype)


def noise(n, *shape, seed=0):
    """n replicas' values of one leaf: normal numbers of very different sizes."""
    rng = np.random.default_rng([seed, n, *shape])
    return (rng.standard_normal((n, *shape)) * 10.0 ** rng.integers(-3, 4, (n, *shape))).astype("f")


def gaussian(n, *shape, seed=0):
    """n replicas' values of one leaf: normal numbers of one size, in NumPy."""
    return np.random.default_rng([seed, n, *shape]).standard_normal((n, *shape)).astype("f")


def tree(n):
    """A tree with everything that trips packers up."""
    return {
        "scalar": rows(n),
        "odd": (rows(n, 7), [rows(n, 3, 5), None]),
        "empty": rows(n, 0, 4),
        "half": rows(n, 11, dtype=np.float16),
        "int": rows(n, 5, dtype=np.int32),
        "last": rows(n, 2, 2, 2),
    }


def assert_trees_equal(got, want):
    """Same structure, dtypes, shapes and bits."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.asarray(g).dtype == np.asarray(w).dtype
        assert np.shape(g) == np.shape(w)
        assert np.asarray(g).tobytes() == np.asarray(w).tobytes()


def close(got, want, *, shapes=False, dtypes=False, **tolerance):
    """Same structure, nearly the same numbers, and if asked the same shapes and types."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    tolerance = {"rtol": 1e-5, "atol": 1e-6, **tolerance}
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert not shapes or np.shape(g) == np.shape(w)
        assert not dtypes or np.asarray(g).dtype == np.asarray(w).dtype
        np.testing.assert_allclose(np.asarray(g), np.asarray(w), **tolerance)


def alike(got, want, tolerance=1e-5):
    """Same structure and types, and numbers that differ by this share or this much at most."""
    close(got, want, dtypes=True, rtol=tolerance, atol=tolerance)


def lowered(f, n, *stacked):
    spec = PartitionSpec("data")
    body = functools.partial(lambda *b: f(*jax.tree.map(lambda x: x[0], b)))
    mapped = jax.shard_map(body, mesh=mesh_of(n), in_specs=spec, out_specs=PartitionSpec())
    return jax.jit(mapped).lower(*stacked)


def compiled_and_planned(shape, value, **asked):
    """A compiled SUM over a mesh of this shape, its collectives, and its plan."""
    mesh = grid(*shape)
    axes = mesh.axis_names if len(shape) > 1 else "data"
    options = jc.CommunicationOptions(**asked)
    f = jax.shard_map(
        lambda t: jc.all_reduce("sum", jax.tree.map(lambda x: x[0], t), axes, options=options),
        mesh=mesh, in_specs=PartitionSpec(mesh.axis_names), out_specs=PartitionSpec(),
    )  # fmt: skip
    stacked = jax.tree.map(lambda x: jnp.zeros((mesh.size, *x.shape), x.dtype), value)
    program = jax.jit(f).lower(stacked).compile()
    plan = jc.plan(value, mesh=mesh, axis_name=axes, options=options, reduce_op="sum")
    return program, read_hlo(program.as_text()).collectives, plan


class CompileCounter:
    """Counts backend compilations while it is entered."""

    def __enter__(self):
        self.count = 0
        self._open = True
        jax.monitoring.register_event_duration_secs_listener(self._heard)
        return self

    def _heard(self, event, duration, **kwargs):
        if self._open and "backend_compile" in event:
            self.count += 1

    def __exit__(self, *exc):
        self._open = False


def on(devices):
    """Destinations: a value that lies on these devices."""
    return jc.distribute.Mirrored.from_function(lambda i: 0, devices=devices)


def check(result, want, destinations):
    """`want` everywhere it should be, wrapped as documented."""
    if isinstance(destinations, str) or len(destinations) == 1:
        assert isinstance(result, jax.Array)
        assert result.devices() == {jax.devices()[0]}
        assert result.item() == want
    else:
        assert isinstance(result, jc.distribute.Mirrored)
        assert result.devices == destinations.devices
        assert [x.item() for x in result] == [want] * len(destinations)
        assert [x.devices() for x in result] == [{d} for d in destinations.devices]
