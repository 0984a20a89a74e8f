"""Measures how CPU time and memory of reading HLO text grow, beside jaxlib's own parser.

    python -m benchmarks.hlo_text              texts of n and of 2n collectives, and 100 MB
    python -m benchmarks.hlo_text FILE [...]   texts of your own

A text is read by `jc.inspect` and by jaxlib, each in a process of its own, three times in turn; the
least CPU seconds count, without imports, and the peak memory of the process with them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HEAD = """HloModule jit_step, is_scheduled=true, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

"""
ARRAY, MATRIX = "f32[128]{0}", "f32[128,128]{1,0}"
GROUPS = "replica_groups=[1,8]<=[8], use_global_device_ids=true, to_apply=%add"
DOT = f"{MATRIX} dot(%w, %w), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}"
NAMED = 'metadata={op_name="jit(step)/psum" source_file="train.py" source_line=3}'
LAYER = """%gemm_{k} (p.{k}: f32[128,128]) -> f32[128,128] {{
  %p.{k} = f32[128,128]{{1,0}} parameter(0)
  ROOT %dot.{k} = f32[128,128]{{1,0}} dot(%p.{k}, %p.{k}), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}, metadata={{op_name="jit(step)/layer_{k}/dot_general" stack_frame_id=9}}
}}

%fused_{k} (q.{k}: f32[128,128]) -> f32[128,128] {{
  %q.{k} = f32[128,128]{{1,0}} parameter(0)
  %e.{k} = f32[128,128]{{1,0}} exponential(%q.{k}), metadata={{op_name="jit(step)/layer_{k}/exp" stack_frame_id=8}}
  %n.{k} = f32[128,128]{{1,0}} negate(%e.{k}), metadata={{op_name="jit(step)/layer_{k}/neg" stack_frame_id=8}}
  ROOT %m.{k} = f32[128,128]{{1,0}} multiply(%n.{k}, %q.{k}), metadata={{op_name="jit(step)/layer_{k}/mul" stack_frame_id=8}}
}}

"""  # noqa: E501
CONFIG = 'backend_config={"operation_queue_id":"0","wait_on_operation_queues":[],"fusion_backend_config":{"kind":"__triton_gemm"},"force_earliest_schedule":false}'  # noqa: E501


def entry(lines: list[str]) -> str:
    """Return the computation that runs, and that ends with the last line."""
    start = [f"%p = {ARRAY} parameter(0)", f"%w = {MATRIX} parameter(1)"]
    body = "".join(f"  {line}\n" for line in [*start, *lines[:-1], f"ROOT {lines[-1]}"])
    return f"ENTRY %main {{\n{body}}}\n"


def results(n: int) -> str:
    """Collectives without a name, whose results leave in one tuple."""
    lines = [f"%r.{i} = {ARRAY} all-reduce(%p), channel_id={i + 1}, {GROUPS}" for i in range(n)]
    whole = ", ".join(f"%r.{i}" for i in range(n))
    return HEAD + entry([*lines, f"%t = ({', '.join([ARRAY] * n)}) tuple({whole})"])


def in_flight(n: int) -> str:
    """Asynchronous collectives, all in flight together, with products between."""
    starts, ends = [], []
    for i in range(n):
        of = f"{ARRAY} all-reduce-start(%p), channel_id={i + 1}, {GROUPS}, {NAMED}"
        starts += [f"%r.{i} = {of}", f"%m.{i} = {DOT}"]
        ends += [f"%d.{i} = {ARRAY} all-reduce-done(%r.{i})", f"%k.{i} = {DOT}"]
    return HEAD + entry([*starts, *ends, "%o = f32[] constant(0)"])


def state(n: int) -> str:
    """A loop that carries arrays, and reduces each without a name."""
    kinds = f"(s32[], {', '.join([ARRAY] * n)})"
    body = [f"%q = {kinds} parameter(0)", "%i = s32[] get-tuple-element(%q), index=0"]
    body += ["%one = s32[] constant(1)", "%j = s32[] add(%i, %one)"]
    for k in range(n):
        body.append(f"%g.{k} = {ARRAY} get-tuple-element(%q), index={k + 1}")
        body.append(f"%r.{k} = {ARRAY} all-reduce(%g.{k}), channel_id={k + 1}, {GROUPS}")
    body.append(f"ROOT %o = {kinds} tuple(%j, {', '.join(f'%r.{k}' for k in range(n))})")
    test = [f"%q = {kinds} parameter(0)", "%i = s32[] get-tuple-element(%q), index=0"]
    test += ["%l = s32[] constant(5)", "ROOT %c = pred[] compare(%i, %l), direction=LT"]
    loops = "".join(
        f"%{name} (q: {kinds}) -> {result} {{\n" + "".join(f"  {x}\n" for x in lines) + "}\n\n"
        for name, result, lines in (("body", kinds, body), ("more", "pred[]", test))
    )
    start = ["%z = s32[] constant(0)", f"%t = {kinds} tuple(%z, {', '.join(['%p'] * n)})"]
    run = f"%v = {kinds} while(%t), condition=%more, body=%body"
    return HEAD + loops + entry([*start, run, "%c0 = f32[] constant(0)"])


def layers(n: int) -> str:
    """Fusions, products and collectives, as XLA's compiler for GPUs prints them."""
    lines = []
    for k in range(n):
        name = f'metadata={{op_name="jit(step)/layer_{k}/dot_general" stack_frame_id=9}}'
        lines.append(
            f"%g.{k} = {MATRIX} fusion(%w), kind=kCustom, calls=%gemm_{k}, {name}, {CONFIG}"
        )
        after = f"{MATRIX} fusion(%g.{k}), kind=kLoop, calls=%fused_{k}, {name}, {CONFIG}"
        lines += [f"%f.{k}.{i} = {after}" for i in range(20)]
        if k % 8 == 0:
            start = f"all-reduce-start(%f.{k}.0), channel_id={k + 1}, {GROUPS}, {NAMED}, {CONFIG}"
            lines.append(f"%s.{k} = {MATRIX} {start}")
            lines.append(f"%e.of.{k} = {MATRIX} all-reduce-done(%s.{k})")
    fused = "".join(LAYER.format(k=k) for k in range(n))
    return HEAD + fused + entry([*lines, "%o = f32[] constant(0)"])


READ = """
import json, resource, sys, time
text = open(sys.argv[2], encoding="utf-8").read()
if sys.argv[1] == "jaxlib":
    from jaxlib import _hlo
    read = _hlo.hlo_module_from_text
else:
    import jaxcoll
    read = jaxcoll.inspect
start = time.process_time()
result = read(text)
seconds = time.process_time() - start
print(json.dumps([seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024]))
"""


def measure(reader: str, file: Path) -> tuple[float, float]:
    """Return CPU seconds, and MiB of peak memory, of one process that reads a file."""
    command = [sys.executable, "-c", READ, reader, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return tuple(json.loads(done.stdout.splitlines()[-1]))


def compare(name: str, file: Path) -> None:
    """Print what jaxcoll needs for a text, and what jaxlib does."""
    pairs = [(measure("jaxcoll", file), measure("jaxlib", file)) for _ in range(3)]
    ours, our_memory = (min(of) for of in zip(*(pair[0] for pair in pairs), strict=True))
    theirs, their_memory = (min(of) for of in zip(*(pair[1] for pair in pairs), strict=True))
    print(
        f"{name:12} {file.stat().st_size / 1e6:6.1f} MB  {ours:6.2f} s, {our_memory:5.0f} MiB; "
        f"jaxlib {theirs:6.2f} s, {their_memory:5.0f} MiB; "
        f"ratios {ours / theirs:.2f}, {our_memory / their_memory:.2f}"
    )


def requested(n: int) -> float:
    """Return the CPU seconds of matching n requested collectives of one scope to compiled ones."""
    from jaxcoll._report.report import make_report

    lines = [f"%r.{i} = {ARRAY} all-reduce(%p), channel_id=1, {GROUPS}, {NAMED}" for i in range(n)]
    text = HEAD + entry([*lines, "%o = f32[] constant(0)"])
    start = time.process_time()
    make_report(text, text)
    return time.process_time() - start


def show(name: str, once: float, twice: float) -> None:
    """Print the seconds for a text, and for twice as much."""
    print(f"{name:12} {once:.2f} s, twice the text {twice:.2f} s, ratio {twice / once:.2f}")


def main(*files: str) -> None:
    """Print a line for each text."""
    for file in map(Path, files):
        compare(file.stem, file)
    if files:
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "step.hlo"
        for make in (results, in_flight, state):
            seconds = []
            for n in (2500, 5000):
                file.write_text(make(n))
                seconds.append(min(measure("jaxcoll", file)[0] for _ in range(3)))
            show(make.__name__, *seconds)
        show("requested", *(min(requested(n) for _ in range(3)) for n in (2000, 4000)))
        file.write_text(layers(14_000))
        compare("layers", file)


if __name__ == "__main__":
    main(*sys.argv[1:])
