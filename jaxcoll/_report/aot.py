"""Ahead-of-time compilation for other clusters: trace with their mesh, compile in a subprocess."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxcoll._collectives.scope import Scope
from jaxcoll._compat.compiler import compiler_options, has_compiler
from jaxcoll._job.launch.subprocesses import killed_on_exit
from jaxcoll._plan.packs.leaves import abstract_shape
from jaxcoll._plan.plan import CollectivePlan
from jaxcoll._report.cost.rates import find_rates
from jaxcoll._report.lowering import Texts, jit_arrays, print_requested, trace, unwrap
from jaxcoll._report.shown_plan import Plan
from jaxcoll._step.mesh.clusters import (
    Topology,
    abstract_mesh,
    fit_mesh,
    topology_named,
    topology_world,
)
from jaxcoll._step.mesh.mesh import axis_names, bind_mesh, has_axes, no_mesh, takes_mesh
from jaxcoll._step.mesh.world import Worlds, platform_and_kind
from jaxcoll.errors import DeadlineExceededError

if TYPE_CHECKING:
    from jaxcoll._step.step import DataParallel

PYTHON = "JAXCOLL_AOT_PYTHON"
"""Environment variable with the path of a Python that has the compilers installed."""

_MESH = re.compile(r"sdy\.mesh @\w+ = <\[(.*?)\]")
_PARTITIONS = re.compile(r"mhlo\.num_partitions = (\d+)")
_FORCED = re.compile(r"--xla_force_host_platform_device_count=\d+")


def compile_for(
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    topology: str,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    timeout_seconds: float = 600,
) -> Texts:
    """Compile a call of `fun` for a cluster that this process cannot reach.

    Guarantee: the program is traced and lowered in this process. A subprocess gets its text and
    returns the text that JAX would get from the compiler on that cluster. This process loads no
    other backend, and its own is not changed.

    Cost: about 3 s plus the compiler's time.

    Raises:
      ImportError: the compiler is not installed; the message has the command that installs it.
    """
    where = topology_named(topology)
    python = os.environ.get(PYTHON) or sys.executable
    if python == sys.executable and not has_compiler(where.platform):
        raise ImportError(_how_to_install(where, python))
    plans: list[CollectivePlan] = []
    traced = trace_for(fun, args, kwargs, where, mesh, plans.append)
    lowered = lower_for(traced, where)
    program = lowered.as_text(debug_info=True)
    # Sizes of the program's mesh, which determine the order of the devices
    meshes = ([int(n) for n in re.findall(r"=(\d+)", axes)] for axes in _MESH.findall(program))
    request = {
        "platform": where.platform,
        "size": where.size,
        "cluster": where.request(),
        "mesh_sizes": next((sizes for sizes in meshes if len(sizes) > 1), [where.size]),
        "compiler_options": compiler_options(traced),
    }
    with tempfile.TemporaryDirectory(prefix="jaxcoll-") as name:
        folder = Path(name)
        (folder / "request.json").write_text(json.dumps(request))
        (folder / "program.mlir").write_text(program)
        memory = _compile(folder, python, where, timeout_seconds)
        compiled = (folder / "compiled.txt").read_text()
    requested, rates = print_requested(lowered), find_rates(topology_world(where))
    return Texts(compiled, requested, tuple(map(Plan.of, plans)), str(where), rates, memory)


def _compile(folder: Path, python: str, topology: Topology, timeout: float) -> dict[str, int]:
    """Compile in a subprocess; return the program's memory in bytes by name."""
    environment = {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",  # or it queries the network for its location
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # or two processes exclude each other
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "XLA_FLAGS": _FORCED.sub("", os.environ.get("XLA_FLAGS", "")),
    }
    if python == sys.executable:
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [python, "-m", "jaxcoll._compat.compiler", str(folder)]
    with (folder / "log").open("wb") as log, killed_on_exit() as running:
        streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        try:
            status = running.start(command, environment, **streams).wait(timeout)
        except subprocess.TimeoutExpired:
            raise DeadlineExceededError(
                f"Compiling for {topology} did not finish within {timeout:g} s and was stopped. "
                "Compile less of the model, such as a few of its layers."
            ) from None
    if not (folder / "answer.json").exists():
        last = (folder / "log").read_text(errors="replace")[-2000:].strip()
        raise jax.errors.JaxRuntimeError(
            f"Compiling for {topology}: the compiler's process ({shlex.join(command[:3])}) exited "
            f"with status {status} and no answer. The end of its output:\n{last}"
        )
    answer = json.loads((folder / "answer.json").read_text())
    if "missing" in answer:
        raise ImportError(_how_to_install(topology, python))
    if "error" in answer:
        raise jax.errors.JaxRuntimeError(
            f"Compiling for {topology}: {answer['error']}: {answer['message']}"
        )
    return answer["memory"]


def _how_to_install(topology: Topology, python: str) -> str:
    extra = {"gpu": "cuda13-local", "tpu": "tpu"}[topology.platform]
    command = [python, "-m", "pip", "install", f"jax[{extra}]=={jax.__version__}"]
    return (
        f"Compiling for {topology} needs the compiler for {topology.platform.upper()}s, which is "
        f"not installed for {python}. Install it:\n\n    {shlex.join(command)}\n\n"
        f"(`pip install 'jaxcoll[{topology.platform}-aot]'` does the same.) No accelerator and no "
        f"driver is needed. To use the compiler of another environment, set {PYTHON} to its Python."
    )


def trace_for(
    fun: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    topology: Topology,
    mesh: Mesh | AbstractMesh | None,
    record: Callable[[CollectivePlan], None],
) -> jax.stages.Traced:
    """Trace `fun` as a program for `topology`.

    Guarantee: no array is placed, and no devices are used except those that `fun` itself names.

    `fun` is a `jc.data_parallel` step; a function with a parameter `mesh`; or any other function,
    jitted or not, which uses the mesh of `jax.set_mesh` or a mesh of the topology's size. Arguments
    may be static. Without `mesh`, the mesh of `fun` is used if it fits or has only one axis.
    """
    fun, args, kwargs = unwrap(fun, args, kwargs)
    if hasattr(fun, "trace_recorded"):  # a `data_parallel` step
        shapes, keywords = jax.tree.map(abstract_shape, (args, kwargs))
        return lay_out_step(fun, topology, mesh).trace_recorded(record, *shapes, **keywords)
    context = jax.sharding.get_abstract_mesh()
    if takes_mesh(fun, kwargs):
        over = abstract_mesh(topology, ("data",)) if mesh is None else fit_mesh(mesh, topology)
        return trace_for(bind_mesh(fun, over), args, kwargs, topology, over, record)
    if mesh is None and not context.empty and context.size != topology.size:
        mesh = context
    over = None if mesh is None else fit_mesh(mesh, topology)
    shapes, keywords = jax.tree.map(
        functools.partial(_abstract_argument, mesh=over), (args, kwargs)
    )
    # Without `trace`, it is a plain function or was jitted by another library.
    if not hasattr(fun, "trace"):
        fun, shapes, keywords = jit_arrays(fun, shapes, keywords)
    with contextlib.ExitStack() as around:
        if over is not None:  # leave the current mesh, which may have another size
            around.enter_context(no_mesh())
            around.enter_context(jax.sharding.use_abstract_mesh(over))
        traced = trace(fun, shapes, keywords, Scope(topology_worlds(topology), record=record))
    assert isinstance(traced, jax.stages.Traced)
    return traced


def lay_out_step(
    step: DataParallel, topology: Topology, mesh: Mesh | AbstractMesh | None = None
) -> DataParallel:
    """Lay a step out over `topology`: the result can be traced and lowered but not called.

    Without `mesh`, the step's mesh is used if it fits or has axes beside `axis_name`.
    """
    axes, mesh_of_step = axis_names(step.axis_name), step.chosen_mesh
    mesh = mesh_of_step if mesh is None else mesh
    if mesh is None or (mesh is mesh_of_step and set(mesh.axis_names) == set(axes)):
        fits = mesh is not None and mesh.size == topology.size
        mesh = mesh if fits else abstract_mesh(topology, axes)
    mesh = has_axes(fit_mesh(mesh, topology), axes, "data_parallel")
    return step.over(mesh, topology_worlds(topology), topology.hosts)


def topology_worlds(topology: Topology) -> Worlds:
    """Describe the worlds of reductions in programs for a topology."""
    # The processes of a TPU slice, or of CPUs, count as one host: there is no other kind of network
    # between them.
    hosts = tuple((k, k * (topology.platform == "gpu")) for k in range(topology.hosts))
    return Worlds(*platform_and_kind(topology.platform, topology.kind), hosts)


def lower_for(traced: jax.stages.Traced, topology: Topology) -> jax.stages.Lowered:
    platform = "cuda" if topology.platform == "gpu" else topology.platform
    try:
        with no_mesh():
            lowered = traced.lower(lowering_platforms=(platform,))
    except ValueError as error:
        if "different from the lowering platform" in str(error):
            error.add_note(
                "jaxcoll: callbacks into Python (`jax.debug.print`, `jax.pure_callback`) cannot be "
                f"lowered for {topology.name!r} on this machine; inspect the program without them."
            )
        raise
    match = _PARTITIONS.search(lowered.as_text())
    size = int(match[1]) if match else 1
    if size != topology.size:
        raise ValueError(
            f"The program runs on {size} of the {topology.size} devices of {topology}. If it has a "
            "mesh of this machine's devices, that must have as many devices. Or let the topology "
            "make the mesh: pass a `jc.data_parallel` step, a function with a parameter `mesh`, or "
            "the argument `mesh=jax.sharding.AbstractMesh(sizes, names)`, under which the function "
            "is traced as under `jax.set_mesh`."
        )
    return lowered


def _abstract_argument(x: Any, mesh: AbstractMesh | None) -> Any:
    """Reduce an array to its type, with its sharding if that has a meaning on the topology."""
    if isinstance(x, bool | int | float | complex):
        return x  # a number may be a static argument
    shape, sharding = abstract_shape(x), getattr(x, "sharding", None)
    if not isinstance(shape, jax.ShapeDtypeStruct):
        return x
    if isinstance(sharding, NamedSharding):
        if mesh is not None and sharding.mesh.axis_names == mesh.axis_names:
            sharding = NamedSharding(mesh, sharding.spec)
        return shape.update(sharding=sharding)
    if mesh is None:
        return shape
    # The compiler chooses, unless the axis types are explicit.
    free = all(kind == AxisType.Auto for kind in mesh.axis_types)
    unknown = [PartitionSpec.UNCONSTRAINED] * (len(shape.shape) * free)
    return shape.update(sharding=NamedSharding(mesh, PartitionSpec(*unknown)))
