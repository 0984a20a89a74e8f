"""Flags that several commands share, and their values: pytrees, algorithms, sizes, devices."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jaxcoll as jc

if TYPE_CHECKING:  # a script that `inspect` runs may set variables that JAX reads when imported
    import jax
    import numpy as np

SIMULATED = 8
"""The default number of simulated CPU devices."""

UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_EVERYTHING = 1 << 60
Shapes = dict[str, tuple[int, ...]]


def resnet50_shapes() -> Shapes:
    """Make 161 shapes, 25,557,032 elements: kernels, and a scale and a bias for each."""
    kernels: Shapes = {"conv1": (7, 7, 3, 64)}
    channels = 64
    for k, (width, blocks) in enumerate(zip((64, 128, 256, 512), (3, 4, 6, 3), strict=True), 1):
        for block in range(blocks):
            at = f"layer{k}.{block}"
            kernels[f"{at}.conv1"] = (1, 1, channels, width)
            kernels[f"{at}.conv2"] = (3, 3, width, width)
            kernels[f"{at}.conv3"] = (1, 1, width, 4 * width)
            if block == 0:
                kernels[f"{at}.shortcut"] = (1, 1, channels, 4 * width)
            channels = 4 * width
    shapes: Shapes = {}
    for name, kernel in kernels.items():
        shapes |= {name: kernel, f"{name}.scale": kernel[-1:], f"{name}.bias": kernel[-1:]}
    return {**shapes, "out": (2048, 1000), "out.bias": (1000,)}


def gpt2_small_shapes() -> Shapes:
    """Make 148 shapes, 124,439,808 elements."""
    d = 768
    layer = {
        "norm1.scale": (d,), "norm1.bias": (d,), "qkv": (d, 3 * d), "qkv.bias": (3 * d,),
        "attention": (d, d), "attention.bias": (d,), "norm2.scale": (d,), "norm2.bias": (d,),
        "up": (d, 4 * d), "up.bias": (4 * d,), "down": (4 * d, d), "down.bias": (d,),
    }  # fmt: skip
    layers = {f"layer{k}.{name}": shape for k in range(12) for name, shape in layer.items()}
    ends = {"norm.scale": (d,), "norm.bias": (d,)}
    return {"tokens": (50257, d), "positions": (1024, d), **layers, **ends}


TREES = {
    "resnet50": resnet50_shapes,
    "gpt2-small": gpt2_small_shapes,
    # Leaves of 1 to 4,096 elements, in the order of a multiplicative hash.
    "many-small": lambda: {str(i): (1 + (i * 2654435761 % 2**32) % 4096,) for i in range(1000)},
    "200x1KiB": lambda: {str(i): (256,) for i in range(200)},
}


def read_tree(name: str, dtype: str) -> OrderedDict[str, jax.ShapeDtypeStruct]:
    """Make one of `TREES`, or read a file of `[{"shape": .., "dtype": .., "name": ..}, ..]`."""
    import jax

    try:
        parse_dtype(dtype)
    except ValueError as error:
        raise ValueError(f"--dtype: {error}") from None
    try:
        if name in TREES:
            rows = [(k, tuple(shape), dtype) for k, shape in TREES[name]().items()]
        else:
            rows = [
                (str(row.get("name", k)), tuple(row["shape"]), row.get("dtype", dtype))
                for k, row in enumerate(json.loads(Path(name).read_text()))
            ]
        leaves = [(k, jax.ShapeDtypeStruct(shape, parse_dtype(t))) for k, shape, t in rows]
        if not leaves or not all(type(n) is int and n >= 0 for _, x in leaves for n in x.shape):
            raise ValueError("no leaves, or an invalid shape")
        if len(tree := OrderedDict(leaves)) < len(leaves):
            raise ValueError("two leaves have the same name")
        return tree
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}".rstrip(".")
        raise ValueError(
            f"--tree {name}: expected one of {', '.join(TREES)}, or a file of "
            f'[{{"shape": [..], "dtype": ".."}}, ..] ({why}).'
        ) from None


def parse_options(name: str) -> jc.CommunicationOptions:
    """Parse an algorithm's name: "auto+int8", "ring@4MiB", "shuffle/native@all".

    After "+" comes the wire format; after "@" the largest pack, or "all" for a single pack.

    Raises:
      ValueError: there is no such algorithm or format, or the size is invalid.
    """
    from jaxcoll._plan.algorithms import DESCRIPTIONS, canonical

    rest, at, pack = name.partition("@")
    algorithm, plus, wire_format = rest.partition("+")
    options: dict[str, Any] = {"compression": wire_format} if plus else {}
    if at:
        options["bytes_per_pack"] = _EVERYTHING if pack == "all" else parse_bytes(pack)
    if algorithm == "reproducible":
        options["reproducible"] = True
    elif algorithm != "auto":
        try:
            options["algorithm"] = canonical(algorithm)
        except ValueError:
            names = ", ".join(["auto", "reproducible", *DESCRIPTIONS])
            raise ValueError(f"no algorithm {name!r}: choose {names}, or inner/outer.") from None
    return jc.CommunicationOptions(**options)


def parse_bytes(text: str) -> int:
    """Parse a size with a unit ("1.5KiB"), or a plain number of bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(B|KiB|MiB|GiB)?", text.strip())
    size = int(float(match[1]) * UNITS[match[2] or "B"]) if match else 0
    if not size:
        raise ValueError(f"expected a size such as 1KiB, 4MiB or 1GiB; got {text!r}.")
    return size


def parse_dtype(name: str) -> np.dtype:
    """Find the dtype of that name, if JAX does not convert it to another one."""
    import jax
    import numpy as np

    try:
        kept = jax.dtypes.canonicalize_dtype(dtype := np.dtype(name))
    except TypeError:
        raise ValueError(f"no dtype {name!r}: expected one such as float32 or bfloat16.") from None
    if kept != dtype:
        raise ValueError(f"JAX converts {dtype} to {kept}: use that, or set JAX_ENABLE_X64=1.")
    return kept


def minimum(least: int) -> Callable[[str], int]:
    """Make a type for flags: integers of at least `least`."""

    def integer(text: str) -> int:
        number = int(text)
        if number < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}; got {number}")
        return number

    return integer


def add_hang(parser: argparse.ArgumentParser) -> None:
    """Add `--hang-seconds` and `--hang-exit`."""
    text = "report who waits for whom, and where, when a process waits for others for S seconds"
    parser.add_argument("--hang-seconds", type=float, metavar="S", help=text)
    text = "with --hang-seconds: end the process that reports a hang, with status 124"
    parser.add_argument("--hang-exit", action="store_true", help=text)


def hang_command(args: argparse.Namespace) -> list[str]:
    """Make the beginning of the command that runs a program and reports its hangs; or []."""
    if (seconds := args.hang_seconds) is None:
        if args.hang_exit:
            raise ValueError("--hang-exit needs --hang-seconds, as in --hang-seconds 60.")
        return []
    if not 0 < seconds < float("inf"):
        raise ValueError(f"--hang-seconds must be a number above 0; got {seconds}.")
    ends = ["--hang-exit"] * args.hang_exit
    flags = ["--hang-seconds", f"{seconds}", *ends, "--run"]
    return [sys.executable, "-m", "jaxcoll", "inspect", *flags]


def add_devices(parser: argparse.ArgumentParser) -> None:
    """Add `--devices` and `--platform`."""
    text = f"number of devices (default: {SIMULATED} simulated ones, or all accelerators)"
    parser.add_argument("--devices", type=minimum(1), metavar="N", help=text)
    text = "simulated CPU devices (default), or this machine's accelerators"
    parser.add_argument("--platform", choices=["cpu", "gpu", "tpu", "auto"], help=text)


def add_tree(parser: argparse.ArgumentParser, **settings: Any) -> None:
    """Add `--tree`, `--dtype` and `--reduce-op`."""
    add = parser.add_argument
    text = f"{', '.join(TREES)}, or a FILE.json of [{{shape, dtype, name}}, ...]"
    add("--tree", metavar="NAME", help=f"{text} (default: resnet50)", **settings)
    add("--dtype", default="float32", help="for arrays without a dtype (default: float32)")
    add("--reduce-op", choices=["mean", "sum"], default="mean", help="(default: mean)")


def choose_platform(platform: str | None, count: int | None) -> None:
    """Set JAX's platform, or simulated CPU devices; call it before JAX looks for devices.

    Raises:
      ValueError: this machine has no device of that platform.
    """
    import jax

    if platform in (None, "cpu"):
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count or SIMULATED)
        return
    if platform != "auto":
        jax.config.update("jax_platforms", {"gpu": "cuda"}.get(platform, platform))
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # JAX may fail an assertion without a message
        raise ValueError(
            f"--platform {platform}: JAX finds no such device ({str(error) or 'no reason given'}). "
            f"Install JAX for {platform}, or leave --platform out for simulated CPU devices."
        ) from error


def choose_devices(platform: str | None, count: int | None) -> list[jax.Device]:
    """Choose the devices of this process's job, or else those that the flags select."""
    import jax

    if platform is None and count is None:
        jc.initialize()
    if jax.distributed.is_initialized():
        return jax.devices()
    choose_platform(platform, count)
    devices = jax.devices()
    if count is not None and count > len(devices):
        here = f"{len(devices)} {devices[0].platform} devices"
        raise ValueError(f"--devices {count}: this machine has {here}.")
    return devices[:count]


def write_json(file: str | None, data: Any, *, as_lines: bool = False) -> None:
    """Write JSON to the file of --json; "-" is standard output, None writes nothing."""
    rows = map(json.dumps, data) if as_lines else [json.dumps(data, indent=1)]
    text = "".join(f"{row}\n" for row in rows)
    if file == "-":
        sys.stdout.write(text)
    elif file is not None:
        Path(file).write_text(text)
