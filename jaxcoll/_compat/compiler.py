"""Private parts of JAX for compiling, and a program that compiles for another cluster.

    python -m jaxcoll._compat.compiler FOLDER

reads `request.json` and `program.mlir` in the folder, writes `answer.json` and `compiled.txt`
there, and exits. The parent process kills it if the parent ends first.
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

from jaxcoll._compat.private import CompileOptions, DeviceAssignment, DeviceList

COMPILERS = {
    "cpu": (),
    "gpu": ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12"),
    "tpu": ("libtpu",),
}
"""For each platform, the modules that contain its compiler; one of them is enough."""


def has_compiler(platform: str) -> bool:
    return not COMPILERS[platform] or any(map(_is_there, COMPILERS[platform]))


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its package is missing
        return False


def answer(folder: Path) -> dict[str, Any]:
    """Compile the program in `folder`, write the compiled text there, and return its memory."""
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
    """Write the answer, or the error, to a file that appears only when it is complete."""
    try:
        reply = answer(folder)
    except Exception as error:
        reply = {"error": type(error).__name__, "message": str(error)}
    (folder / "answer.part").write_text(json.dumps(reply))
    (folder / "answer.part").rename(folder / "answer.json")


def compiler_options(traced: Any) -> dict[str, Any]:
    return dict(getattr(traced, "_params", {}).get("compiler_options_kvs", ()))


def cluster_devices(request: dict[str, Any], mesh_sizes: Sequence[int]) -> list[Any]:
    """List the devices of a cluster, in the order of `jax.make_mesh` if it supports the sizes."""
    from jax.experimental import topologies

    cluster = topologies.get_topology_desc(**request)
    names = tuple(f"axis{i}" for i in range(len(mesh_sizes)))
    try:
        mesh = topologies.make_mesh(cluster, tuple(mesh_sizes), names)
    except (NotImplementedError, AssertionError, ValueError):  # no order for these sizes
        return list(cluster.devices)
    return list(mesh.devices.flat)


def compile_text(program: str, devices: Sequence[Any], options: dict[str, Any]) -> dict[str, Any]:
    """Compile StableHLO text for `devices`, as `jax.jit` compiles a lowered program.

    JAX's ahead-of-time compilation needs a program traced in the same process. The text of another
    process goes directly to the client, by the same call that JAX makes. In the result, "text" is
    the compiled program and "memory" has bytes by name.
    """
    from jax.extend.mlir import ir
    from jax.interpreters.mlir import make_ir_context

    settings = CompileOptions()
    settings.num_replicas, settings.num_partitions = 1, len(devices)
    settings.device_assignment = DeviceAssignment.create(np.array([[d.id for d in devices]]))
    build = settings.executable_build_options
    build.use_spmd_partitioning = True
    build.use_shardy_partitioner = "sdy." in program
    for name in ("optimization_level", "memory_fitting_level"):
        if name in options:
            setattr(build, name, options[name])
    settings.env_option_overrides = [(k, v) for k, v in options.items() if not hasattr(build, k)]
    client = devices[0].client
    # A client of real devices compiles and loads; a client of a topology cannot load.
    run = client.compile_and_load if devices[0] in jax.devices() else client.compile
    with make_ir_context():
        module = ir.Module.parse(program)
        main: Any = next(f for f in module.body if str(f.attributes["sym_name"]) == '"main"')
        build.allow_spmd_sharding_propagation_to_parameters = _find_unsharded(main, "arg_attrs")
        build.allow_spmd_sharding_propagation_to_output = _find_unsharded(main, "res_attrs")
        compiled = run(module, DeviceList(tuple(devices)), settings)
    return {
        "text": compiled.hlo_modules()[0].to_string(),
        "memory": memory_by_name(compiled.get_compiled_memory_stats()),
    }


def memory_by_name(stats: Any) -> dict[str, int]:
    names = ("argument", "output", "alias", "temp", "generated_code")
    return {name: getattr(stats, f"{name}_size_in_bytes") for name in names}


def _find_unsharded(function: Any, which: str) -> list[bool]:
    """Find the arguments or results whose sharding the compiler chooses."""
    if which not in function.attributes:
        return []
    return [
        not {"sdy.sharding", "mhlo.sharding"} & {named.name for named in attributes}
        for attributes in function.attributes[which]
    ]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
