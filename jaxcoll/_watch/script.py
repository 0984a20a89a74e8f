"""Run a Python program in this process as `python` runs it, and come back when it has ended."""

from __future__ import annotations

import builtins
import importlib.util
import os
import sys
import threading
import types
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any


class Script:
    """A program that is found and compiled, and not run yet, of a command as behind `python`."""

    def __init__(self, command: Sequence[str]) -> None:
        if not command or (command[0] == "-m" and len(command) < 2):
            raise ValueError("--run: what is to run? Give a script.py, or -m and a module.")
        spec: ModuleSpec | None = None
        if command[0] == "-m":
            # As for `python -m`, modules are looked for in the current folder first.
            sys.path.insert(0, os.getcwd())
            spec, words = _spec_of(command[1]), command[2:]
            file, own_folder = str(spec.origin), os.getcwd()
            sys.path.pop(0)
        else:
            file, words = command[0], command[1:]
            own_folder = os.path.dirname(os.path.realpath(file))
        try:
            self._code = compile(Path(file).read_bytes(), file, "exec", dont_inherit=True)
        except OSError as error:
            raise ValueError(f"--run {file}: {error.strerror}.") from None
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"--run {file} is no Python: {error}") from None
        self._arguments, self._folder = [file, *words], own_folder
        self._main = types.ModuleType("__main__")
        vars(self._main).update(
            __builtins__=builtins, __file__=file, __spec__=spec, __loader__=spec and spec.loader,
            __package__=spec.parent if spec else None, __cached__=None,
        )  # fmt: skip

    def run(self) -> int:
        """Run it to the end of all its threads; the exit status that Python would have.

        What it raises is shown as Python shows it. 130 is that of Ctrl-C.
        """
        sys.argv[:] = self._arguments
        if not sys.flags.safe_path:
            sys.path[:1] = [self._folder]
        # What is pickled, or started by `multiprocessing`, is looked up there.
        sys.modules["__main__"] = self._main
        try:
            exec(self._code, vars(self._main))
            return self._ended(0)
        except SystemExit as end:
            return self._ended(_status(end.code))
        except KeyboardInterrupt as error:
            self._show(error)
            return 130
        except BaseException as error:
            self._show(error)
            return self._ended(1)

    def _ended(self, status: int) -> int:
        """Wait for threads, as Python does before it calls what was registered with `atexit`."""
        try:
            shutdown: Any = threading._shutdown  # pyright: ignore[reportAttributeAccessIssue]
            shutdown()
        except KeyboardInterrupt as error:
            self._show(error)
            return 130
        return status

    @staticmethod
    def _show(error: BaseException) -> None:
        # The first frame is this file's.
        trace = error.__traceback__ and error.__traceback__.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)


def _status(code: Any) -> int:
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    print(code, file=sys.stderr)
    return 1


def _spec_of(module: str) -> ModuleSpec:
    """Return the specification of a module that runs, of a package that of its `__main__`."""
    try:
        spec = importlib.util.find_spec(module)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{module}.__main__")
    except (ImportError, ValueError, AttributeError) as error:
        raise ValueError(f"--run -m {module}: {error}.") from None
    if spec is None or not spec.has_location:
        raise ValueError(f"--run -m {module}: there is no such module, or none that runs.")
    return spec
