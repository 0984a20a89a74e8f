"""Hold the reader against real profiles, by a plain reading of the same files.

    python -m tests.report.real_profiles FOLDER

FOLDER has profiles of https://github.com/openxla/xprof, vllm-project/tpu-inference and
AMD-AGI/TraceLens, and of older versions of JAX on CPUs; docs/compatibility.md says which. Files
that are not there are left out. The plain reading uses `jax.profiler.ProfileData`, and knows of each
file what its runs are.
"""

from __future__ import annotations

import gzip
import itertools
import json
import re
import sys
import tempfile
import warnings
from collections import Counter, defaultdict
from pathlib import Path
from statistics import mean, median

from jax.profiler import ProfileData

from jaxcoll._compat.running import decode_text
from jaxcoll._report.profile.backends import GPU as GPU_DEVICES
from jaxcoll._report.profile.event_names import event_names
from jaxcoll._report.profile.profile import modules_in, read_profile
from jaxcoll._report.profile.rank_times import _events
from jaxcoll._report.profile.watch import read_folder
from jaxcoll._report.profile.xspace import read_planes
from tests.report.xplanes import ADD, Plane, programs, task

RENDEZVOUS = re.compile(r"RunId: (-?\d+)")


def plain(executions, collectives):
    """Runs, step, transfer of all collectives and exposed time of (run, device, name, start, end)."""
    runs = defaultdict(lambda: defaultdict(list))
    for run, device, *event in executions:
        runs[run][device].append(event)
    ordered = sorted(runs, key=lambda run: min(e[1] for own in runs[run].values() for e in own))
    starts = [min(e[1] for own in runs[run].values() for e in own) for run in ordered]
    transfer, exposed = [], []
    for run in ordered:
        least = Counter()
        for name in collectives:
            took = [sum(b - a for n, a, b in own if n == name) for own in runs[run].values()]
            least[name] = min(took)
        transfer.append(sum(least.values()))
        exposed.append(mean(uncovered(own, collectives) for own in runs[run].values()))
    steps = [b - a for a, b in itertools.pairwise(starts)]
    step = median(steps) if len(steps) > 1 else None  # fewer than two steps are none
    return {"runs": len(ordered), "step": step, "transfer": median(transfer), "exposed": median(exposed)}  # fmt: skip


def uncovered(events, collectives):
    """The time that only collectives take, by the edges of all events."""
    edges = sorted((t, d, n in collectives) for n, a, b in events for t, d in ((a, 1), (b, -1)))
    sending = computing = total = last = 0
    for time, change, sends in edges:
        total += (time - last) * (sending > 0 and computing == 0)
        last = time
        sending += change * sends
        computing += change * (not sends)
    return total


def tpu(path):
    """Runs are the k-th `jit__psum` of each device."""
    executions = []
    for plane in ProfileData.from_file(str(path)).planes:
        if device := re.fullmatch(r"/device:TPU:(\d)", plane.name):
            lines = {line.name: list(line.events) for line in plane.lines}
            modules = [e for e in lines["XLA Modules"] if e.name.startswith("jit__psum")]
            for run, whole in enumerate(sorted(modules, key=lambda e: e.start_ns)):
                for e in lines["XLA Ops"]:
                    if whole.start_ns <= e.start_ns <= whole.start_ns + whole.duration_ns:
                        name = e.name.split()[0].lstrip("%")
                        executions.append((run, device[1], name, e.start_ns, e.start_ns + e.duration_ns))  # fmt: skip
    truth = plain(executions, {"all-reduce"})
    return path.read_bytes(), "jit__psum", truth | {"wire bytes": 5 << 30, "groups": [[0, 4], [1, 5], [2, 6], [3, 7]]}  # fmt: skip


def tpu_llm(path):
    """One step of two devices; its text is made of the collectives that the file has."""
    records = json.loads(gzip.decompress(path.read_bytes()))
    (number,) = {re.search(r"\d+", r["name"])[0] for r in records if r["name"].startswith("jit_step_fun")}  # fmt: skip
    spans = {r["plane"]: (r["start_ps"], r["start_ps"] + r["duration_ps"]) for r in records if r["name"].startswith("jit_step_fun")}  # fmt: skip
    planes, executions, texts = b"", [], {}
    for name, (first, last) in spans.items():
        plane, lines = Plane(name), defaultdict(list)
        for r in (r for r in records if r["plane"] == name):
            start, end = r["start_ps"] // 1000, (r["start_ps"] + r["duration_ps"]) // 1000
            text = (
                r.get("text", f"%{r['name']} = f32[] op()") if r["line"] == "XLA Ops" else r["name"]
            )
            lines[r["line"]].append(plane.event(text, start, end, **({"run_id": r["run_id"]} if "run_id" in r else {"device_offset_ps": r["start_ps"], "device_duration_ps": r["duration_ps"]})))  # fmt: skip
            if r["line"] == "XLA Ops" and first <= r["start_ps"] <= last:
                executions.append((0, name, r["name"], start, end))
                if "text" in r:
                    texts[r["name"]] = re.sub(r"(?<=[(])\S+ (%[\w.\-]+)", r"\1", re.sub(r"to_apply=%[\w.]+", "to_apply=%add", r["text"]))  # fmt: skip
        for k, (line, events) in enumerate(lines.items()):
            plane.line(k, line, events)
        planes += plane.bytes()
    operands = {
        re.search(r"\((%[\w.\-]+)\)", t)[1]: re.search(r"= (\S+)", t)[1] for t in texts.values()
    }
    for t in texts.values():
        if " all-gather(" in t:  # its operand is smaller
            operands[re.search(r"\((%[\w.\-]+)\)", t)[1]] = "s32[1,1,8]"
    body = [f"  {name} = {kind} parameter({k})" for k, (name, kind) in enumerate(operands.items()) if name not in {f"%{n}" for n in texts}]  # fmt: skip
    body += [f"  {t}" for t in texts.values()]
    text = f"HloModule jit_step_fun, is_scheduled=true, num_partitions=2\n{ADD}\nENTRY %main () -> f32[] {{\n" + "\n".join(body) + "\n  ROOT %end = f32[] constant(0)\n}\n"  # fmt: skip
    kinds = Counter(re.search(r" ([a-z\-]+)\(", t)[1] for t in texts.values())
    return planes + programs(text, number=int(number)) + task(), "jit_step_fun", plain(executions, set(texts)) | {"step": median((b - a) / 1000 for a, b in spans.values()), "kinds": dict(kinds)}  # fmt: skip


def cpu(path):
    """Runs have numbers, from JAX 0.8 on at each instruction, before in the rendezvous."""
    executions, numbered = [], {}
    for plane in ProfileData.from_file(str(path)).planes:
        for line in plane.lines:
            events = [(e, dict(e.stats)) for e in line.events if not e.name.startswith("end: ")]
            run = number = None
            for e, stats in sorted(events, key=lambda x: -x[0].start_ns):  # a rendezvous comes last
                if e.name == "Rendezvous":
                    run = RENDEZVOUS.search(stats["name"])[1]
                    number = numbered[run] = numbered.get(run, 0) + 1
                if "hlo_op" in stats:
                    key = stats.get("run_id", run), stats.get("device_ordinal", number)
                    executions.append((*key, e.name, e.start_ns, e.start_ns + e.duration_ns))
    groups = [[0, 2, 4, 6], [1, 3, 5, 7]]
    return path.read_bytes(), "jit_step", plain(executions, {"all-reduce"}) | {"wire bytes": 192, "groups": groups}  # fmt: skip


def seen(profile, name):
    """What jaxcoll reads."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "host.xplane.pb").write_bytes(profile)
        found = read_folder(Path(folder))
    (report,) = [report for report in found.reports if report.name == name]
    m = report.measured
    return {
        "runs": m.runs,
        "step": m.step_seconds and 1e9 * m.step_seconds,
        "transfer": 1e9 * sum(times.transfer for times in m.times),
        "exposed": 1e9 * m.exposed_seconds,
        "wire bytes": report.wire_bytes,
        "groups": [list(group) for group in report.rows[0].compiled.groups],
        "kinds": dict(Counter(row.compiled.kind for row in report.rows)),
    }


def gpu(path):
    """It has no collective: four instructions of five runs, one with two kernels, on eight devices."""
    profile = path.read_bytes()
    (executions,) = read_profile(profile).executions.values()
    (plane,) = [
        plane for plane in read_planes(memoryview(profile)) if plane.name == "/host:metadata"
    ]
    (text,) = [
        decode_text(module)
        for name, module in modules_in(plane)
        if name.startswith("jit_forward_3d")
    ]
    names = event_names(text, [], {})
    runs = _events(names, executions, GPU_DEVICES, {})
    return {"executions": len(runs.run), "runs of each device": [int(runs.run[runs.device == d].max()) for d in range(8)]}  # fmt: skip


FORMS = {
    "tpu_v6e_4dev_psum.xplane.pb": tpu,
    "tpu_2dev_llm_step.json.gz": tpu_llm,
    **{f"cpu_jax_{version}.xplane.pb": cpu for version in ("0.5.3", "0.6.2", "0.8.3", "0.9.2")},
}
GPU = "amd_mi300x_8gpu_conv.xplane.pb"


def main(folder):
    warnings.simplefilter("ignore", DeprecationWarning)
    wrong = 0
    for name, read in FORMS.items():
        if (folder / name).exists():
            profile, program, truth = read(folder / name)
            found = seen(profile, program)
            for key, value in truth.items():
                is_time = value is not None and key in ("step", "transfer", "exposed")
                is_right = abs(found[key] / value - 1) < 0.01 if is_time else found[key] == value
                wrong += not is_right
                print(
                    f"{'ok   ' if is_right else 'WRONG'} {name}: {key}: {value}, read {found[key]}"
                )
    if (folder / GPU).exists():
        found, truth = gpu(folder / GPU), {"executions": 160, "runs of each device": [5] * 8}
        wrong += found != truth
        print(f"{'ok   ' if found == truth else 'WRONG'} {GPU}: {truth}, read {found}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
