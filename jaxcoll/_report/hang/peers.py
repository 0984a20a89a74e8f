"""Rows that the processes of a job exchange about a hang; a host speaks for a silent process.

Processes of one host write files, which they read also if the coordinator is dead or stopped.
Between hosts they use the job's key-value store.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import faulthandler
import json
import linecache
import os
import re
import signal
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxcoll._compat.coordination import Store
from jaxcoll._job.key_value import CoordinatorClient, Keys
from jaxcoll._job.stacks import is_user, show_place
from jaxcoll._report.hang.judge import Row

ANSWER_SECONDS = 1.0
_SAMPLE_SECONDS = 0.3  # to see whether a silent process computes
_REST_SECONDS = 10.0  # without requests, after the coordinator did not answer
# Its C handler writes the stacks, whoever has the GIL.
_SIGNAL = signal.SIGRTMIN + 11 if hasattr(signal, "SIGRTMIN") else None
_STATES = {"T": "stopped", "t": "debugger", "Z": "dead", "X": "dead", "D": "disk"}


class HangPeers:
    """One process's view of the others.

    Each keeps its newest row in a file, whose name also has the number of the last question that
    it answered. Whoever raises the number asks.

    Args:
      keys: the job's key-value store.
      beat: seconds between two looks of a process that runs.
    """

    # Unlike `jaxcoll._job.exchange`, it needs no coordinator on one host, where it may be the
    # coordinator's process that hangs, and a coordinator that is silent ends no wait.

    def __init__(self, keys: Store, beat: float) -> None:
        self.rank, self.size, self.keys = keys.process, keys.processes, keys
        self._client, self._beat, self._silent_at = CoordinatorClient(keys), beat, 0.0
        token = self._request(lambda keys: keys.agree("jaxcoll/hang", f"{time.time_ns():x}"), 60)
        if token is None:
            raise TimeoutError("the coordinator does not answer")
        self._key, self._question, self._file = f"jaxcoll/hang/{token}", 0, Path()
        self.folder = Path(tempfile.gettempdir(), f"jaxcoll-hang-{os.getuid()}-{token}")
        self.folder.mkdir(mode=0o700, exist_ok=True)
        self._stacks = (self.folder / f"stacks-{self.rank}.txt").open("w")
        if _SIGNAL is not None:
            faulthandler.register(_SIGNAL, file=self._stacks, all_threads=True)

    def tell(self, row: Row) -> bool:
        """Leave a row, in case that this process falls silent; True if somebody has a question."""
        before, self._file = self._file, self.folder / f"row-{self._question}-{self.rank}"
        self._write(self._file.name, vars(row))
        if before not in (self._file, Path()):
            before.unlink(missing_ok=True)
        numbers = [number for number, _ in self._files().values()]
        return max(numbers) > self._question or bool(self._post("all", self._question + 1))

    def answer(self, row: Row, until: float) -> dict[int, Row]:
        """Answer the question, or ask one, and return all answers that are there by `until`."""
        asked = max(number for number, _ in self._files().values())
        self._question = max(asked, self._question + 1)
        self.tell(row)
        packed = zlib.compress(json.dumps(vars(row)).encode())
        self._post("set", self._question, base64.b85encode(packed).decode())
        while True:
            rows = self._read_answers()
            if len(rows) == self.size or time.monotonic() >= until:
                return rows
            time.sleep(0.05)

    def examine(self, rank: int) -> Row:
        """Find out about a process that did not answer."""
        if rank not in (files := self._files()):
            # It is on another host; without the coordinator nobody can say more.
            return Row(rank, "unknown" if rank and self._silent_at else "silent")
        row = _read(files[rank][1])
        row.silence = time.time() - row.at
        if not os.path.exists("/proc/self/stat"):
            row.kind = "silent"
            return row
        try:
            state, before = _look_up_process(row.pid)
            if state in _STATES:
                row.kind = _STATES[state]
            elif row.silence > 5 * self._beat + ANSWER_SECONDS:
                row.kind, row.where = "locked", self._read_frames(row)
                row.cpu = (_look_up_process(row.pid)[1] - before) / _SAMPLE_SECONDS
        except OSError:
            row.kind = "dead"
        return row

    def write_stacks(self) -> None:
        """Write the stacks of all threads to this rank's file."""
        self._stacks.write(f"{time.strftime('%F %T')}\n")
        self._stacks.flush()
        faulthandler.dump_traceback(self._stacks, all_threads=True)

    def write_report(self, report: Mapping[str, Any]) -> None:
        """Write a report beside the stacks."""
        self._write(f"report-{time.time_ns():x}.json", report)

    def close(self) -> None:
        """Leave; the last process of a host removes the files, unless a report refers to them."""
        self._client.close()
        if _SIGNAL is not None:
            faulthandler.unregister(_SIGNAL)
        self._stacks.close()
        with contextlib.suppress(OSError):
            self._file.unlink(missing_ok=True)
            if not [*self._files(), *self.folder.glob("report*")]:
                for file in self.folder.iterdir():
                    file.unlink()
                self.folder.rmdir()

    def _files(self) -> dict[int, tuple[int, Path]]:
        """Find the processes of this host: the question that each answered, and its file."""
        found: dict[int, tuple[int, Path]] = {}
        for file in self.folder.glob("row-*"):
            _, number, rank = file.name.split("-")
            # For a moment a process that answers has two.
            found[int(rank)] = max((int(number), file), found.get(int(rank), (-1, file)))
        return found

    def _read_answers(self) -> dict[int, Row]:
        rows = {}
        for rank, (number, file) in self._files().items():
            if number == self._question:
                with contextlib.suppress(FileNotFoundError):  # it answers the next one
                    rows[rank] = _read(file)
        for rank, text in (self._post("all", self._question) or {}).items():
            row = Row(**json.loads(zlib.decompress(base64.b85decode(text))))
            rows.setdefault(int(rank), row)
        return rows

    def _post(self, method: str, number: int, *text: str) -> Any:
        """Read or write answers in the key-value store, unless all processes are on this host."""
        if len(self._files()) == self.size:
            return None
        key = f"{self._key}/{number}{f'/{self.rank}' * bool(text)}"
        return self._request(lambda keys: getattr(keys, method)(key, *text), 3 * ANSWER_SECONDS)

    def _request(self, call: Callable[[Keys], Any], seconds: float) -> Any:
        """Ask the coordinator; None if it does not answer. It is then left alone for a while."""
        if time.monotonic() < self._silent_at + _REST_SECONDS:
            return None
        try:
            answer = self._client.request(call, seconds)
        except (OSError, RuntimeError):
            self._silent_at = time.monotonic()
            return None
        self._silent_at = 0.0
        return answer

    def _write(self, name: str, value: Mapping[str, Any]) -> None:
        (self.folder / f".{name}").write_text(json.dumps(value))
        (self.folder / f".{name}").replace(self.folder / name)

    def _read_frames(self, row: Row) -> list[list[Any]]:
        """Make a process that holds the GIL write its stacks; return the user's frames."""
        watcher, main = row.threads
        if _SIGNAL is not None:
            # To the watcher's thread, so that no system call of the program's is interrupted.
            ctypes.CDLL(None).tgkill(row.pid, watcher, _SIGNAL)
        time.sleep(_SAMPLE_SECONDS)
        stacks = (self.folder / f"stacks-{row.rank}.txt").read_text()
        of_main = stacks.rpartition(f"0x{main:016x}")[2].partition("\n\n")[0]
        return [
            show_place(file, int(line), name, linecache.getline(file, int(line)), row.silence or 0)
            for file, line, name in re.findall(r'File "(.*)", line (\d+) in (\S+)', of_main)
            if is_user(file)
        ]


def _read(file: Path) -> Row:
    return Row(**json.loads(file.read_text()))


def _look_up_process(pid: int | None) -> tuple[str, float]:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
