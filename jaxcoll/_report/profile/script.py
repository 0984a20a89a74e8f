"""Run a Python program in this process as `python` does, and return when it has ended."""

from __future__ import annotations

import builtins
import contextlib
import importlib.util
import os
import sys
import threading
import types
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any


class Script:
    """A program and its arguments, given as to `python`; compiled, but not run yet."""

    def __init__(self, command: Sequence[str]) -> None:
        if not command or (command[0] == "-m" and len(command) < 2):
            raise ValueError("--run: no program to run: give a script.py, or -m and a module.")
        spec: ModuleSpec | None = None
        if command[0] == "-m":
            # Like `python -m`, look for modules in the current folder first.
            sys.path.insert(0, os.getcwd())
            spec, arguments = _find_spec(command[1]), command[2:]
            file, folder = str(spec.origin), os.getcwd()
            sys.path.pop(0)
        else:
            # Like `python`, which names the program's file by its whole path.
            file, arguments = os.path.abspath(command[0]), command[1:]
            folder = os.path.dirname(os.path.realpath(file))
        try:
            self._code = compile(Path(file).read_bytes(), file, "exec", dont_inherit=True)
        except OSError as error:
            raise ValueError(f"--run {command[0]}: {error.strerror}.") from None
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"--run {command[0]} is not Python: {error}") from None
        self._arguments, self._folder = [(spec and file) or command[0], *arguments], folder
        self._main = types.ModuleType("__main__")
        vars(self._main).update(
            __builtins__=builtins, __file__=file, __spec__=spec, __loader__=spec and spec.loader,
            __package__=spec.parent if spec else None, __cached__=None,
        )  # fmt: skip

    def run(self) -> int:
        """Run the program to its end as Python does, and return Python's exit status."""
        sys.argv[:] = self._arguments
        if not sys.flags.safe_path:
            sys.path[:1] = [self._folder]
        # pickle and `multiprocessing` look up the program's names there.
        sys.modules["__main__"] = self._main
        try:
            exec(self._code, vars(self._main))
            return self._end(0)
        except SystemExit as end:
            code: Any = end.code
            if code is None or isinstance(code, int):
                return self._end((code or 0) & 0xFF)
            print(code, file=sys.stderr)
            return self._end(1)
        except KeyboardInterrupt as error:
            self._show(error)
            return 130  # after Ctrl-C
        except BaseException as error:
            self._show(error)
            return self._end(1)

    def _end(self, status: int) -> int:
        """Wait for threads, as Python does before it calls `atexit` functions."""
        try:
            shutdown: Any = threading._shutdown  # pyright: ignore[reportAttributeAccessIssue]
            shutdown()
        except KeyboardInterrupt as error:
            self._show(error)
            return 130
        return status

    @staticmethod
    def _show(error: BaseException) -> None:
        # Skip the first frame, which is in this file.
        trace = error.__traceback__ and error.__traceback__.tb_next
        error = error.with_traceback(trace)
        sys.last_exc = sys.last_value = error  # pyright: ignore[reportAttributeAccessIssue]
        sys.last_type, sys.last_traceback = type(error), trace
        try:
            sys.excepthook(type(error), error, trace)
        except Exception as own:  # of the program's own hook
            print("Error in sys.excepthook:", file=sys.stderr)
            own.__context__, own_trace = None, own.__traceback__ and own.__traceback__.tb_next
            sys.__excepthook__(type(own), own.with_traceback(own_trace), own_trace)
            print("\nOriginal exception was:", file=sys.stderr)
            sys.__excepthook__(type(error), error, trace)


class OnImport(MetaPathFinder):
    """Calls `then` as soon as the program has imported a module, or at once if it has."""

    def __init__(self, module: str, then: Callable[[], None]) -> None:
        self._module, self._then = module, then
        if module in sys.modules:
            then()
        else:
            sys.meta_path.insert(0, self)

    def stop(self) -> None:
        """Call nothing any more."""
        with contextlib.suppress(ValueError):  # it has been called
            sys.meta_path.remove(self)

    def find_spec(self, fullname: str, *_: Any) -> ModuleSpec | None:
        """Find the module as if this were not here, and have its loader call `then`."""
        if fullname != self._module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                execute(module)
                self._then()

            spec.loader.exec_module = exec_module
        return spec


def _find_spec(module: str) -> ModuleSpec:
    try:
        spec = importlib.util.find_spec(module)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{module}.__main__")
    except (ImportError, ValueError, AttributeError) as error:
        raise ValueError(f"--run -m {module}: {error}.") from None
    if spec is None or not spec.has_location:
        raise ValueError(f"--run -m {module}: no such module, or it is not a file.")
    return spec
