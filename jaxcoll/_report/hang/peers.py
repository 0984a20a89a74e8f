"""What the processes of a job tell one another about a hang, and what a host says of a silent one.

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
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxcoll._compat.coordination import Store
from jaxcoll._job.key_value import CoordinatorClient, Keys
from jaxcoll._job.stacks import is_user, show_place

ANSWER_SECONDS = 1.0
_SAMPLE_SECONDS = 0.3  # to see whether a silent process computes
_REST_SECONDS = 10.0  # without requests, after the coordinator did not answer
_SIGNAL = (
    getattr(signal, "SIGRTMIN", 0) + 11
)  # its C handler writes the stacks, whoever has the GIL
_STATES = {"T": "stopped", "t": "debugger", "Z": "dead", "X": "dead", "D": "disk"}

Row = dict[str, Any]


class HangPeers:
    """One process's view of the others.

    Args:
      keys: the job's key-value store.
      beat: seconds between two looks of a process that runs.
    """

    def __init__(self, keys: Store, beat: float) -> None:
        self.rank, self.size, self.keys = keys.process, keys.processes, keys
        self._client, self._beat, self._silent_at = CoordinatorClient(keys), beat, 0.0
        token = self._request(lambda keys: keys.agree("jaxcoll/hang", f"{time.time_ns():x}"), 60)
        if token is None:
            raise TimeoutError("the coordinator does not answer")
        self._key = f"jaxcoll/hang/{token}"
        self.folder = Path(tempfile.gettempdir(), f"jaxcoll-hang-{os.getuid()}-{token}")
        self.folder.mkdir(mode=0o700, exist_ok=True)
        self._stacks = (self.folder / f"stacks-{self.rank}.txt").open("w")
        if _SIGNAL > 11:
            faulthandler.register(_SIGNAL, file=self._stacks, all_threads=True)

    def tell_host(self, row: Row) -> None:
        """Leave a row for processes of this host, in case that this one falls silent."""
        about = {
            "thread": threading.get_native_id(),
            "main": threading.main_thread().ident,
            "at": time.time(),
        }
        self._write(f"last-{self.rank}", row | {"about": about})

    def exchange(self, number: int, row: Row | None, until: float = 0.0) -> dict[int, Row]:
        """Post a row for question `number`, and return all rows that are there by `until`.

        Anybody's first row asks the question. Without a row, only look.
        """
        # Unlike `jaxcoll._job.exchange`, it needs no coordinator on one host, where it may be
        # the coordinator's process that hangs, and a coordinator that is silent ends no wait.
        if row is not None:
            self._write(f"row-{number}-{self.rank}", row)
            if not self._is_one_host():
                text = base64.b85encode(zlib.compress(json.dumps(row).encode())).decode()
                self._request(lambda keys: keys.set(f"{self._key}/{number}/{self.rank}", text))
        while True:
            rows = self._rows(number)
            if len(rows) == self.size or time.monotonic() >= until:
                return rows
            time.sleep(0.05)

    def last_word(self, rank: int) -> Row:
        """Return what is known of a process that did not answer."""
        try:
            row = json.loads((self.folder / f"last-{rank}").read_text())
        except OSError:  # it is on another host; without the coordinator nobody can say more
            is_cut_off = rank != 0 and self._silent_at > 0
            return {"rank": rank, "kind": "unknown" if is_cut_off else "silent"}
        about = row.pop("about")
        row["silence"] = time.time() - about["at"]
        try:
            state, before = _process(row["pid"])
            if state in _STATES:
                row["kind"] = _STATES[state]
            elif row["silence"] > 5 * self._beat + ANSWER_SECONDS:
                row["kind"], row["where"] = "locked", self._where(row, about)
                row["cpu"] = (_process(row["pid"])[1] - before) / _SAMPLE_SECONDS
        except OSError:
            row["kind"] = "dead"
        return row

    def write_stacks(self) -> None:
        """Write the stacks of all threads to this rank's file."""
        self._stacks.write(f"{time.strftime('%F %T')}\n")
        self._stacks.flush()
        faulthandler.dump_traceback(self._stacks, all_threads=True)

    def write_report(self, report: Row) -> str:
        """Write a report beside the stacks, and return the folder."""
        self._write(f"report-{time.time_ns():x}.json", report)
        return str(self.folder)

    def close(self) -> None:
        """Leave; the last process of a host removes the files, unless a report refers to them."""
        self._client.close()
        if _SIGNAL > 11:
            faulthandler.unregister(_SIGNAL)
        self._stacks.close()
        with contextlib.suppress(OSError):
            (self.folder / f"last-{self.rank}").unlink(missing_ok=True)
            if not [*self.folder.glob("last-*"), *self.folder.glob("report*")]:
                for file in self.folder.iterdir():
                    file.unlink()
                self.folder.rmdir()

    def _is_one_host(self) -> bool:
        return len([*self.folder.glob("last-*")]) == self.size

    def _rows(self, number: int) -> dict[int, Row]:
        rows = {}
        for file in self.folder.glob(f"row-{number}-*"):
            rows[int(file.name.rpartition("-")[2])] = json.loads(file.read_text())
        if len(rows) < self.size and not self._is_one_host():
            texts = self._request(lambda keys: keys.all(f"{self._key}/{number}")) or {}
            for rank, text in texts.items():
                rows[int(rank)] = json.loads(zlib.decompress(base64.b85decode(text)))
        return rows

    def _request(self, call: Callable[[Keys], Any], seconds: float = 3 * ANSWER_SECONDS) -> Any:
        """Return the coordinator's answer; None if there is none. It is then left alone."""
        if time.monotonic() < self._silent_at + _REST_SECONDS:
            return None
        try:
            answer = self._client.request(call, seconds)
        except (OSError, RuntimeError):
            self._silent_at = time.monotonic()
            return None
        self._silent_at = 0.0
        return answer

    def _write(self, name: str, row: Row) -> None:
        (self.folder / f".{name}").write_text(json.dumps(row))
        (self.folder / f".{name}").replace(self.folder / name)

    def _where(self, row: Row, about: Row) -> list[list[Any]]:
        """Make a process that holds the GIL write its stacks; return the user's frames."""
        if _SIGNAL > 11:
            # To the watcher's thread, so that no system call of the program's is interrupted.
            ctypes.CDLL(None).tgkill(row["pid"], about["thread"], _SIGNAL)
        time.sleep(_SAMPLE_SECONDS)
        stacks = (self.folder / f"stacks-{row['rank']}.txt").read_text()
        of_main = stacks.rpartition(f"0x{about['main']:016x}")[2].partition("\n\n")[0]
        return [
            show_place(file, int(line), name, linecache.getline(file, int(line)), row["silence"])
            for file, line, name in re.findall(r'File "(.*)", line (\d+) in (\S+)', of_main)
            if is_user(file)
        ]


def _process(pid: int) -> tuple[str, float]:
    """Return the state of a process of this host, and the processor seconds that it has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
