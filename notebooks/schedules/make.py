"""Compile the stacks for eight H100s, store their reports, and print the table of docs/gpus.md.

    JAXCOLL_AOT_PYTHON=... python notebooks/schedules/make.py [NAME ...]

All of them take three minutes. It needs the compiler for GPUs (docs/clusters.md), but no GPU.
"""

from __future__ import annotations

import gzip
import shutil
import sys
from pathlib import Path

import jax

import jaxcoll as jc

HERE = Path(__file__).parent
IMAGES = HERE.parents[1] / "docs" / "images"
sys.path.insert(0, str(HERE.parents[1] / "docs" / "examples"))
STORED = ("scanned_plain", "scanned", "scanned_by_sixes", "unrolled_plain", "unrolled")
DRAWN = ("scanned", "unrolled_plain", "unrolled")
NAMES = (*STORED, "small_plain", "small")


def main() -> None:
    """Compile, store, draw and print."""
    import stacks  # of docs/examples

    jax.config.update("jax_platforms", "cpu")
    for name in sys.argv[1:] or NAMES:
        fun, args = getattr(stacks, name)()
        report = jc.inspect(fun, *args, topology="h100:8")
        print(
            f"| `{name}` | {report.runs} | {report.overlapped:.0%} | "
            f"{report.overlap.flops / 1e12:.2f} T | {report.seconds * 1e3:.2f} ms | "
            f"{report.exposed_seconds * 1e3:.2f} ms, "
            f"{report.exposed_seconds / report.seconds:.0%} |",
            flush=True,
        )
        if name in STORED:
            text = report.to_json().replace(f"{HERE.parents[1]}/", "")
            packed = gzip.compress(text.encode(), mtime=0)
            (HERE / f"{name}.json.gz").write_bytes(packed)
        if name in DRAWN:
            report.plot(HERE / f"{name}.png")
    shutil.copy(HERE / "unrolled.png", IMAGES / "overlap.png")


if __name__ == "__main__":
    main()
