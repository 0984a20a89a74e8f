"""Malloc keeps what is freed where it was asked to, and whether it does is found out."""

import subprocess
import sys

import pytest

from jaxcoll._job import initialize
from jaxcoll._job import malloc as _malloc

ALONE = "import runpy; here = runpy.run_path({path!r}); keep, keeps = here['keep_freed_memory'], here['keeps_freed_memory']; "
FAULTS = """
import ctypes, resource
libc = here['_glibc']()
ctypes.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(48 << 20)
    ctypes.memset(block, 1, 48 << 20)
    libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(faults() > 1000, faults() > 1000, keep(), faults() > 1000, faults() > 1000)
"""
on_glibc = pytest.mark.skipif(_malloc._glibc() is None, reason="needs glibc")


def printed(program, **variables):
    """What a process of its own prints."""
    program = ALONE.format(path=_malloc.__file__) + program
    return subprocess.run(
        [sys.executable, "-c", program], env=variables, check=True, capture_output=True, text=True
    ).stdout.split()


@on_glibc
def test_users_variables_stay():
    for variables, kept in (
        ({}, ["False", "True", "True"]),
        ({"MALLOC_MMAP_MAX_": "65536"}, ["False", "True", "False"]),
        (dict.fromkeys(_malloc.SETTINGS, "0"), ["False", "False", "False"]),
        ({"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}, ["True", "True", "True"]),
        ({"GLIBC_TUNABLES": "glibc.malloc.mmap_max=0"}, ["False", "True", "True"]),
    ):  # fmt: skip
        assert printed("print(keeps(), keep(), keeps())", **variables) == kept, variables


@on_glibc
def test_freed_block_keeps_pages():
    assert printed(FAULTS) == ["True", "True", "True", "True", "False"]


def test_other_libc_is_left_alone(monkeypatch):
    monkeypatch.setattr(_malloc, "_glibc", lambda: None)
    assert not _malloc.keep_freed_memory()
    assert not _malloc.keeps_freed_memory()


def test_only_gloo_keeps_memory(monkeypatch, caplog):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(initialize, "keep_freed_memory", lambda: True)
    for platforms, plugins, collectives, kept in (
        ("cpu", ["cuda"], "gloo", True),
        ("cpu,cuda", ["cuda"], "gloo", True),
        ("cuda,cpu", [], "gloo", False),
        (None, [], "gloo", True),
        (None, ["cuda"], "gloo", False),
        ("cpu", [], "mpi", False),
    ):
        settings = {"platforms": platforms, "cpu_collectives_implementation": collectives}
        monkeypatch.setattr(initialize.settings, "read_option", settings.__getitem__)
        monkeypatch.setattr(
            "importlib.metadata.entry_points", lambda group, plugins=plugins: plugins
        )
        caplog.clear()
        with caplog.at_level("DEBUG", "jaxcoll"):
            initialize._keep_memory()
        assert ("malloc keeps freed memory" in caplog.text) is kept, (platforms, plugins)
