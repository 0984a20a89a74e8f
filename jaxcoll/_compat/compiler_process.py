"""The process that compiles for a cluster: reads one request, writes one reply, and ends.

    python -m jaxcoll._compat.compiler_process FOLDER

It reads `request.json` and `program.mlir` in the folder, and writes `answer.json` and
`compiled.txt` there. Whoever starts it ends it, so that it never outlives that process.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

COMPILERS = {
    "cpu": (),
    "gpu": ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12"),
    "tpu": ("libtpu",),
}
"""For each platform the modules any of which brings its compiler."""


def has_compiler(platform: str) -> bool:
    """Whether the compiler of a platform is installed for this Python."""
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
    import jax

    from jaxcoll._compat import compiler

    jax.config.update("jax_platforms", "cpu")
    if request["platform"] == "cpu":
        jax.config.update("jax_num_cpu_devices", request["size"])
        devices = list(jax.devices("cpu"))
    else:
        devices = compiler.cluster_devices(request["cluster"], request["mesh_sizes"])
    program = (folder / "program.mlir").read_text()
    compiled = compiler.compile_text(program, devices, request["compiler_options"])
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


if __name__ == "__main__":
    main(Path(sys.argv[1]))
