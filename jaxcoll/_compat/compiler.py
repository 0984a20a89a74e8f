"""Private parts of JAX for compiling, and a process that compiles for another cluster.

    python -m jaxcoll._compat.compiler FOLDER

reads `request.json` and `program.mlir` in the folder, writes `answer.json` and `compiled.txt`
there, and ends. Whoever starts it ends it, so that it never outlives that process.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

COMPILERS = {
    "cpu": (),
    "gpu": ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12"),
    "tpu": ("libtpu",),
}
"""For each platform the modules any of which brings its compiler."""


def has_compiler(platform: str) -> bool:
    """True if the compiler of a platform is installed for this Python."""
    return not COMPILERS[platform] or any(map(_is_there, COMPILERS[platform]))


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # what it is a part of
        return False


def answer(folder: Path) -> dict[str, Any]:
    """Compile what lies in `folder`; the text of it is written there, the rest returned."""
    request = json.loads((folder / "request.json").read_text())
    if not has_compiler(request["platform"]):
        return {"missing": request["platform"]}
    jax.config.update("jax_platforms", "cpu")
    if request["platform"] == "cpu":
        jax.config.update("jax_num_cpu_devices", request["size"])
        devices = list(jax.devices("cpu"))
    else:
        devices = cluster_devices(request["cluster"], request["mesh_sizes"])
    program = (folder / "program.mlir").read_text()
    compiled = compile_text(program, devices, request["compiler_options"])
    (folder / "compiled.txt").write_text(compiled.pop("text"))
    return compiled


def main(folder: Path) -> None:
    """Answer, or say what went wrong, in a file that is there only when it is whole."""
    try:
        found = answer(folder)
    except Exception as error:
        found = {"error": type(error).__name__, "message": str(error)}
    (folder / "answer.part").write_text(json.dumps(found))
    (folder / "answer.part").rename(folder / "answer.json")


def compiler_options(traced: Any) -> dict[str, Any]:
    """The `compiler_options` that a function was jitted with, which JAX keeps to itself."""
    return dict(getattr(traced, "_params", {}).get("compiler_options_kvs", ()))


def cluster_devices(request: dict[str, Any], mesh_sizes: Sequence[int]) -> list[Any]:
    """Devices of a cluster that is not here, in the order of `jax.make_mesh` if it has one."""
    from jax.experimental import topologies

    cluster = topologies.get_topology_desc(**request)
    names = tuple(f"axis{i}" for i in range(len(mesh_sizes)))
    try:
        mesh = topologies.make_mesh(cluster, tuple(mesh_sizes), names)
    except (NotImplementedError, AssertionError, ValueError):  # it knows no order of this shape
        return list(cluster.devices)
    return list(mesh.devices.flat)


def compile_text(program: str, devices: Sequence[Any], options: dict[str, Any]) -> dict[str, Any]:
    """Compile StableHLO text for `devices`, as `jax.jit` compiles what it lowered.

    JAX compiles ahead of time for what it has traced itself; a text of another process goes to
    the client, by the same call that JAX makes. "text" of the result is the compiled program,
    "memory" bytes by name.
    """
    from jax.extend.mlir import ir
    from jax.interpreters.mlir import make_ir_context
    from jaxlib.xla_client import CompileOptions, DeviceAssignment, DeviceList

    asked = CompileOptions()
    asked.num_replicas, asked.num_partitions = 1, len(devices)
    asked.device_assignment = DeviceAssignment.create(np.array([[d.id for d in devices]]))
    build = asked.executable_build_options
    build.use_spmd_partitioning = True
    build.use_shardy_partitioner = "sdy." in program
    for name in ("optimization_level", "memory_fitting_level"):
        if name in options:
            setattr(build, name, options[name])
    asked.env_option_overrides = [(k, v) for k, v in options.items() if not hasattr(build, k)]
    client = devices[0].client
    # One of real devices compiles what it then loads, the other cannot load anything.
    run = client.compile_and_load if devices[0] in jax.devices() else client.compile
    with make_ir_context():
        module = ir.Module.parse(program)
        main: Any = next(f for f in module.body if str(f.attributes["sym_name"]) == '"main"')
        build.allow_spmd_sharding_propagation_to_parameters = _unsharded(main, "arg_attrs")
        build.allow_spmd_sharding_propagation_to_output = _unsharded(main, "res_attrs")
        compiled = run(module, DeviceList(tuple(devices)), asked)
    return {
        "text": compiled.hlo_modules()[0].to_string(),
        "memory": memory_by_name(compiled.get_compiled_memory_stats()),
    }


def memory_by_name(stats: Any) -> dict[str, int]:
    """Bytes on one device, as a compiled program's statistics have them."""
    names = ("argument", "output", "alias", "temp", "generated_code")
    return {name: getattr(stats, f"{name}_size_in_bytes") for name in names}


def _unsharded(function: Any, which: str) -> list[bool]:
    """Return, for each argument or result, whether the compiler chooses its sharding."""
    if which not in function.attributes:
        return []
    return [
        not {"sdy.sharding", "mhlo.sharding"} & {named.name for named in attributes}
        for attributes in function.attributes[which]
    ]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
