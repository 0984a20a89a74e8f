"""`jaxcoll bench`: start a world, measure the trees in it, show a table, write the lines."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

from jaxcoll.bench.launch import LaunchError, join, launch

_LINE = "JAXCOLL-RESULT "
_WIDTH = 112
_COLUMNS = (
    "ms", "÷ per-leaf [95 %]", "algbw GB/s", "busbw GB/s", "compile s", "÷", "temp MB", "error",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    world = parser.add_mutually_exclusive_group()
    world.add_argument(
        "--devices", type=int, default=8, metavar="N", help="simulated CPU devices of one process"
    )
    world.add_argument(
        "--processes", type=int, metavar="N", help="processes of one device each, over Gloo"
    )
    world.add_argument(
        "--platform", metavar="NAME", help="the accelerators that are here: gpu, tpu, or auto"
    )
    parser.add_argument(
        "--tree",
        action="append",
        metavar="NAME",
        help="resnet50 (default), gpt2-small, many-small, one-big, 200x1KiB, or a FILE.json; "
        "may be given several times",
    )
    parser.add_argument(
        "--variants",
        default="auto",
        help="comma-separated: auto, one pack, 4 MiB packs, ring, halving_doubling, shuffle "
        "(default: auto); per-leaf psum and its A/A twin are always measured",
    )
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--reduce-op", choices=["mean", "sum"], default="mean")
    parser.add_argument("--rounds", type=int, default=20, help="timed rounds (default: 20)")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for all processes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write one JSON line a result")


def run(args: argparse.Namespace) -> int:
    """Measure and show.

    Returns:
      The exit status: 0, or 2 with one line on standard error.
    """
    try:
        _check_extras()
        trees = args.tree or ["resnet50"]
        lines = _launched(args) if args.processes and "JAXCOLL_RANK" not in os.environ else None
        if lines is None:
            lines = _measured(args, trees)
        if not lines:
            return 0
        _show(lines)
        if args.json:
            _write(args.json, lines)
    except (LaunchError, ValueError, OSError) as error:
        print(f"jaxcoll bench: {error}", file=sys.stderr)
        return 2
    return 0


def _check_extras() -> None:
    if not importlib.util.find_spec("rich"):
        raise ValueError("needs rich, which is not installed: pip install 'jaxcoll[bench]'")


def _launched(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The results that rank 0 of a new world prints; this process only waits."""
    if args.processes < 2:
        raise ValueError(f"--processes must be at least 2; got {args.processes}.")
    command = [sys.executable, "-m", "jaxcoll", *sys.argv[1:]]
    print(f"measuring over {args.processes} processes…", file=sys.stderr)
    ended = launch(command, args.processes, timeout=args.timeout)
    lines = [line for line in ended[0].log.splitlines() if line.startswith(_LINE)]
    return [json.loads(line.removeprefix(_LINE)) for line in lines]


def _measured(args: argparse.Namespace, trees: list[str]) -> list[dict[str, Any]]:
    """Measure in this process; in a launched world rank 0 prints, and nobody shows a table."""
    import jax

    if args.rounds < 1:
        raise ValueError(f"--rounds must be at least 1; got {args.rounds}.")
    launched = join()
    if not launched and not args.platform:
        if args.devices < 1:
            raise ValueError(f"--devices must be at least 1; got {args.devices}.")
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.devices)
    elif args.platform and args.platform != "auto":
        jax.config.update("jax_platforms", {"gpu": "cuda"}.get(args.platform, args.platform))
    from jaxcoll.bench.all_reduce import measure
    from jaxcoll.bench.trees import tree_of

    names = [name.strip() for name in args.variants.split(",") if name.strip()]
    for tree in trees:
        tree_of(tree, args.dtype)
    lines = []
    for tree in trees:
        results = measure(
            tree, names=names, dtype=args.dtype, reduce_op=args.reduce_op, rounds=args.rounds,
            progress=lambda stage, tree=tree: _progress(f"{tree}: {stage}"),
        )  # fmt: skip
        lines += [{**dataclasses.asdict(r), "jax": jax.__version__} for r in results]
    _progress("")
    if launched:
        if jax.process_index() == 0:
            print("\n".join(_LINE + json.dumps(line) for line in lines))
        return []
    return lines


def _progress(stage: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{stage}", end="", file=sys.stderr, flush=True)


def _show(lines: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if console.width < _WIDTH:  # a log, or a narrow window: lines that wrap beat cells that are cut
        console = Console(width=_WIDTH)
    for tree in dict.fromkeys(line["tree"] for line in lines):
        rows = [line for line in lines if line["tree"] == tree]
        world = rows[0]
        table = Table(
            title=f"{tree}: {world['bytes'] / 1e6:,.1f} MB over {world['devices']} devices, "
            f"{world['processes']} process{'es' if world['processes'] > 1 else ''}",
            title_justify="left",
            box=box.SIMPLE_HEAD,
        )
        table.add_column("variant", no_wrap=True)
        for column in _COLUMNS:
            table.add_column(column, justify="right", no_wrap=True)
        for row in rows:
            table.add_row(row["variant"], *_cells(row))
        console.print(table)


def _cells(row: dict[str, Any]) -> list[str]:
    ratio = row["ratio"]
    return [
        f"{row['seconds'] * 1e3:,.1f}",
        f"{ratio['median']:.3g} [{ratio['low']:.3g}, {ratio['high']:.3g}]",
        f"{row['algbw']:.3g}",
        f"{row['busbw']:.3g}",
        f"{row['compile_seconds']:.2f}",
        f"{row['compile_ratio']['median']:.2f}",
        f"{row['temporary_bytes'] / 1e6:,.1f}",
        f"{row['error']:.1e}",
    ]


def _write(path: Path, lines: list[dict[str, Any]]) -> None:
    """All lines or none: a file that is there is never half a result."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text("".join(json.dumps(line) + "\n" for line in lines))
    partial.replace(path)
