"""Write profiles in the form of real ones: TPUs, GPUs and CPUs, of several versions of JAX.

`Run` is what happened on one device, and a `Form` writes it as a backend does. Times are
nanoseconds. What real files look like is in `python -m tests.report.real_profiles`.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from jaxlib import _hlo

from jaxcoll._report.profile.profile import Compiled, read_profile
from jaxcoll._report.programs import programs_from, read_rank

BEGAN, MS = 1_700_000_000 * 10**9, 10**6
ADD = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}
"""
REDUCE = "channel_id=1, replica_groups={}, use_global_device_ids=true, to_apply=%add"
PLAIN = "  %all-reduce.1 = f32[1000]{0} all-reduce(%dot.1), " + REDUCE


def hlo(body=PLAIN, *, devices=2, before="", groups="{}"):
    """A program of two products, and what is between them."""
    return f"""HloModule jit_step, is_scheduled=true, num_partitions={devices}
{ADD}{before}
ENTRY %main (x: f32[1000]) -> f32[1000] {{
  %x = f32[1000]{{0}} parameter(0)
  %dot.1 = f32[1000]{{0}} multiply(%x, %x)
{body.replace("replica_groups={}", f"replica_groups={groups}")}
  ROOT %dot.2 = f32[1000]{{0}} multiply(%dot.1, %dot.1)
}}
"""


def steps(*ops, runs=12, devices=2, step=20 * MS):
    """Runs of some (name, start, end) in milliseconds."""
    return [
        Execution(device, run, name, *(MS + step * run + round(MS * t) for t in times))
        for run in range(runs)
        for device in range(devices)
        for name, *times in ops
    ]


def programs_in(profile, text=None, number=7, **compiled):
    """The report of a program that one process runs, measured."""
    program = Compiled(text or hlo(), number, **compiled)
    reports, rows = read_rank([program], read_profile(profile), 99)
    return programs_from(reports, {0: rows}, 0)


def times_in(profile, text=None, number=7, **compiled):
    """The measured times of a program that one process runs, and the notes on it."""
    found = programs_in(profile, text, number, **compiled)
    return found.reports[0].measured, found.notes


def varint(number):
    number &= (1 << 64) - 1  # a negative number has ten bytes
    small = bytearray()
    while number > 127:
        small.append(number & 127 | 128)
        number >>= 7
    return bytes([*small, number])


def field(number, value):
    """A field: an integer, or a string or message of some length."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    value = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(value)) + value


class Plane:
    """A plane; events and stats are numbered as they come, and strings are references."""

    def __init__(self, name, **stats):
        self.head, self.lines, self.events, self.stats = field(2, name), b"", {}, {}
        self.own = self._all(6, stats)

    def event(self, name, start, end, metadata=None, /, **stats):
        if name not in self.events:
            self.events[name] = len(self.events) + 1, self._all(5, metadata or {})
        content = field(1, self.events[name][0])
        content += field(2, 1000 * start) + field(3, 1000 * (end - start))
        return field(4, content + self._all(4, stats))

    def line(self, number, name, events, origin=0):
        head = field(1, number) + field(2, name) + field(3, origin)
        self.lines += field(3, head + b"".join(events))

    def bytes(self):
        kinds = [field(4, field(1, k) + field(2, field(1, k) + field(2, name) + stats)) for name, (k, stats) in self.events.items()]  # fmt: skip
        names = [field(5, field(1, k) + field(2, field(1, k) + field(2, name))) for name, k in self.stats.items()]  # fmt: skip
        return field(1, self.head + self.lines + b"".join(kinds + names) + self.own)

    def _all(self, number, stats):
        return b"".join(field(number, self._stat(*stat)) for stat in stats.items())

    def _stat(self, name, value):
        key = field(1, self.stats.setdefault(name, len(self.stats) + 1))
        if isinstance(value, str):
            return key + field(7, self.stats.setdefault(value, len(self.stats) + 1))
        return key + field(6 if isinstance(value, bytes) else 4, value)


def programs(*modules, number=7):
    """The plane with the programs of a profile: HLO texts, or protos as they are."""
    plane = Plane("/host:metadata")
    for k, module in enumerate(modules):
        name = "jit_step"
        if isinstance(module, str):
            name, devices = re.match(r"HloModule ([\w.]+).*num_partitions=(\d+)", module).groups()
            proto = _hlo.hlo_module_from_text(module).as_serialized_hlo_module_proto()
            places = [field(3, field(1, bytes([device]))) for device in range(int(devices))]
            module = proto + field(15, field(1, 1) + field(2, len(places)) + b"".join(places))
        plane.event(f"{name}({number + k})", 0, 0, {"Hlo Proto": field(1, module)})
    return plane.bytes()


def task(began=BEGAN):
    return Plane("Task Environment", profile_start_time=began).bytes()


class Execution(NamedTuple):
    """An instruction on a device in a run, in nanoseconds since the session began."""

    device: int
    run: int
    name: str
    start: int
    end: int


def tpu(executions, *, module="jit_step", number=7, background=()):
    """Planes of TPUs. `run_id` counts each device's programs, and begins anywhere."""
    planes = b""
    for device in sorted({e.device for e in executions}):
        plane = Plane(f"/device:TPU:{device}", device_type_string="TPU v6 Lite")
        own = [e for e in executions if e.device == device]
        runs = sorted({e.run for e in own})
        spans = [[e for e in own if e.run == run] for run in runs]
        of = number if callable(number) else lambda _: number
        modules = [
            plane.event(f"{module}({of(span[0].run)})", min(e.start for e in span), max(e.end for e in span), run_id=850 if k + device == 0 else 247 + k, replica_id=0)
            for k, span in enumerate(spans)
        ]  # fmt: skip
        plane.line(2, "XLA Modules", modules)
        ops = [
            plane.event(f"%{e.name} = f32[1000]{{0:T(1024)}} op(f32[1000]{{0}} %x), channel_id=1", e.start, e.end, {"hlo_category": "op", "program_id": of(e.run)}, device_offset_ps=1000 * e.start)
            for e in own
        ]  # fmt: skip
        plane.line(3, "XLA Ops", ops)
        copies = [plane.event(f"%copy-start.{k} = (f32[9]) copy-start(%x)", start, end, hlo_op=f"copy-done.{k}", flow=616168039) for k, (start, end) in enumerate(background)]  # fmt: skip
        plane.line(4, "Async XLA Ops", copies if device == 0 else [])
        planes += plane.bytes()
    return planes


def gpu(executions, *, launches=True, kernels=1, bare=(), module="jit_step", number=7):
    """Planes of GPUs, and the launches of their kernels. `bare` are kernels without annotation."""
    planes, launched, host = b"", [], Plane("/host:CPU")
    for device in sorted({e.device for e in executions}):
        plane, streams = Plane(f"/device:GPU:{device}", device_vendor="Nvidia"), {13: [], 14: []}
        for k, e in enumerate(e for e in executions if e.device == device):
            says = {"hlo_op": e.name, "hlo_module": module, "program_id": number}
            sends = re.match(r"(all|reduce-|collective-|psum)", e.name)
            several = kernels if sends else 1
            for n in range(several):
                start, end = (e.start + (e.end - e.start) * m // several for m in (n, n + 1))
                kind = re.sub("[^a-z]", "", e.name)
                name = f"ncclDevKernel_{kind}_{n}(Args)" if sends else f"{e.name}.kd"
                own = {} if (e.run, e.name) in bare else {"tf_op": "XlaModule:", **says}
                kernel = plane.event(name, start, end, correlation_id=k, **own)
                streams[14 if sends else 13].append(kernel)
                times = max(0, e.start - 20_000), max(8000, e.start - 12_000)
                ids = {"device_id": 47645, "correlation_id": k}
                launched.append(host.event("cuLaunchKernelExC", *times, **ids, **says))
        for stream, events in streams.items():
            plane.line(stream, f"Stream #{stream}(Kernel)", events)
        planes += plane.bytes()
    host.line(4711, "Host Threads/4711", launched)
    return planes + (host.bytes() if launches else b"")


def cpu(executions, *, module="jit_step", number=7, first=-310526449, rank=0):
    """The plane of simulated devices, as JAX 0.9 and later write it."""
    plane, threads = Plane("/host:CPU"), {}
    for e in executions:
        says = {"hlo_op": e.name, "hlo_module": module, "program_id": number}
        events = threads.setdefault((e.device + e.run) % 3, [])
        events += [
            plane.event(e.name, e.start, e.end, **says, run_id=first + e.run, device_ordinal=2048 * rank + e.device, _p=1 << 40),
            plane.event(f"end: {e.name}", e.end, e.end + 100, _c=1 << 40),
        ]  # fmt: skip
    for k, events in threads.items():
        plane.line(k, f"tf_XLAPjRtCpuClient/{k}", events)
    plane.line(9, "python", [plane.event("$profiler.py:92 start_trace", 0, 10)])
    return plane.bytes()


def old_cpu(executions, *, module="jit_step", number=7, is_oldest=False):
    """The same as JAX 0.5 writes it: without runs and devices. Threads execute any device's."""
    plane, threads = Plane("/host:CPU"), {}
    spans = {}
    for e in executions:
        spans.setdefault((e.run, e.device), []).append(e)
    for (run, device), span in spans.items():
        events = threads.setdefault(device if is_oldest else (device + run) % 8, [])
        first = min(e.start for e in span)
        events.append(plane.event("ThreadpoolListener::StartRegion", first - 10, first - 10))
        for e in span:
            says = {"hlo_op": e.name, "hlo_module": module, "program_id": number}
            events.append(plane.event(e.name, e.start, e.end, **says))
            if e.name.startswith("all-") and not is_oldest:
                key = f"all reduce RendezvousKey{{run_id=RunId: {run - 382017608}, global_devices=[0,2]}}"
                events.append(
                    plane.event("Rendezvous", e.start + 1, e.end - 1, num_threads=4, name=key)
                )
            events.append(plane.event(f"end: {e.name}", e.end, e.end + 10))
    for k, events in threads.items():
        plane.line(k, f"tf_XLATfrtCpuClient/{k}", events)
    return plane.bytes()
