"""Record the text of every communicating program that is compiled, and count its calls."""

from __future__ import annotations

import re
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxcoll._compat.running import (
    COMPILED,
    FROM_CACHE,
    find_wrapped_names,
    live_executables,
    program_id,
)
from jaxcoll._report.profile.calls import Calls
from jaxcoll._report.profile.profile import Compiled, sends
from jaxcoll._report.profile.shield import Shield

_DEVICES = re.compile(r"num_(?:partitions|replicas)=(\d+)")
_SEEN_IN_A_ROW = 16
"""The search for new executables ends after this many known ones in a row."""


class Compilations:
    """The programs that are compiled between `start` and `stop`, in any thread, by any library.

    Programs without collectives are only counted. Cost: 0.1 ms for each compilation, nothing for
    each run. Those that are compiled already count if not `only_new`.
    """

    def __init__(self, shield: Shield, calls: Calls, *, only_new: bool = True) -> None:
        self.quiet = 0  # programs without collectives
        self.at = time.monotonic()  # of the last compilation
        self.calls = calls
        self.modules: dict[str, int] = {}  # programs with collectives, and their devices
        self.quiet_modules: set[str] = set()  # the names of the others
        self._texts: dict[Any, tuple[bytes, int, dict[str, str], bool, str]] = {}
        self._from_cache = False
        self._seen = {_key(executable) for executable in live_executables() if only_new}
        self._lock = threading.Lock()
        self._shield = shield
        self._on_compiled, self._on_event = shield(self._note_compilation), shield(self._note_event)

    def start(self) -> None:
        jax.monitoring.register_event_duration_secs_listener(self._on_compiled)
        jax.monitoring.register_event_listener(self._on_event)
        self._shield(self.calls.start)()

    def stop(self) -> None:
        """Stop recording, after a last look for programs that were compiled without an event."""
        # The program may have removed all listeners; JAX refuses to remove one twice.
        monitoring = jax.monitoring
        self._shield(monitoring.unregister_event_duration_listener)(self._on_compiled)
        self._shield(monitoring.unregister_event_listener)(self._on_event)
        self._shield(self.calls.stop)()
        self.look()

    def programs(self) -> list[Compiled]:
        """List the communicating programs, with their numbers, and their calls if known."""
        from jaxcoll._report.programs import fingerprint

        texts = {key: zlib.decompress(packed).decode() for key, (packed, *_) in self._texts.items()}
        prints = {key: fingerprint(text) for key, text in texts.items()}
        calls = _count_by_program(self.calls, prints)
        found = []
        for key, text in texts.items():
            _, number, wrapped, runs_here, _ = self._texts[key]
            number = None if self._from_cache else number
            found.append(Compiled(text, number, calls.get(prints[key]), wrapped, runs_here))
        return found

    def find_text(self, is_wanted: Callable[[str], bool]) -> str:
        """Find the text of the newest program with such a name; "" if there is none."""
        for packed, *_, module in reversed(self._texts.values()):
            if is_wanted(module):
                return zlib.decompress(packed).decode()
        return ""

    def _note_compilation(self, event: str, duration_secs: float, **fields: Any) -> None:
        if event == COMPILED:
            self.at = time.monotonic()
            self.look(str(fields.get("fun_name", "")))

    def _note_event(self, event: str, **fields: Any) -> None:
        self._from_cache |= event == FROM_CACHE

    def look(self, name: str = "") -> None:
        """Read the programs that are new; the function of that name has compiled the newest."""
        with self._lock:
            in_a_row = 0
            for n, executable in enumerate(live_executables()):
                key = _key(executable)
                is_new = key not in self._seen
                in_a_row = 0 if is_new else in_a_row + 1
                if in_a_row == _SEEN_IN_A_ROW:
                    break
                if not is_new and (n or not name):
                    continue
                module = executable.hlo_modules()[0]
                if is_new:
                    self._read(key, module, executable)
                if n == 0:  # JAX compiles a program anew for each function that has it
                    made = re.sub(r"[^\w.\-]", "_", name).rstrip("_")  # from "jit(step)"
                    self.calls.join(key, name if module.name.rstrip("_") == made else "")
                elif is_new:
                    self.calls.join(key, "")

    def _read(self, key: Any, module: Any, executable: Any) -> None:
        text = module.to_string()
        if sends(text):
            proto = module.as_serialized_hlo_module_proto()
            packed = zlib.compress(text.encode(), 1)
            runs_here = bool(executable.local_devices())
            self._texts[key] = (
                packed, program_id(proto), find_wrapped_names(proto), runs_here, module.name,
            )  # fmt: skip
            devices = map(int, _DEVICES.findall(text.partition("\n")[0]))
            self.modules[module.name] = max(devices, default=1)
        else:
            self.quiet += 1
            self.quiet_modules.add(module.name)
        self._seen.add(key)


def _key(executable: Any) -> Any:
    module = executable.hlo_modules
    return executable.fingerprint or module()[0].as_serialized_hlo_module_proto()


def _count_by_program(calls: Calls, prints: Mapping[Any, str]) -> dict[str, int]:
    """Count the calls of each program; none of one whose function has other programs, too."""
    known: Counter[str] = Counter()
    unknown = {prints.get(key, "") for key in calls.unknown}
    for keys, n in calls.totals().items():
        found = {prints.get(key, "") for key in keys}  # "": no collectives
        if len(found) == 1:
            known[found.pop()] += n
        else:
            unknown |= found
    return {key: n for key, n in known.items() if key not in unknown}
