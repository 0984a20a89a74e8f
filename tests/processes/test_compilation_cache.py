"""JAX's persistent compilation cache holds the programs of several processes, too."""

import re
import sys
from pathlib import Path

import pytest
from processes.ranks import launch

pytestmark = pytest.mark.processes
PROGRAM = Path(__file__).with_name("compilation_cache.py")
FOUND = re.compile(r"persistent compilation cache (hit|miss) for 'jit_step' with key '(.*)'", re.I)


def runs(folder):
    """Of each process what it computed, and what the cache had under which key."""
    logs = launch([sys.executable, PROGRAM, folder], 2, timeout=120)
    found = [[(what.lower(), key) for what, key in FOUND.findall(log)] for log in logs]
    return [re.search("VALUES .*", log)[0] for log in logs], found


def test_a_second_run_asks_for_the_same_programs_and_reads_what_was_written(tmp_path):
    values, first = runs(str(tmp_path))
    again, second = runs(str(tmp_path))
    assert again == values
    assert len(set(values)) == 1
    assert [what for found in first for what, _ in found] == ["miss", "miss"]
    keys = [[key for _, key in found] for found in first]
    assert [[key for _, key in found] for found in second] == keys
    # JAX lets process 0 alone write, and on CPUs each process has a key of its own.
    assert second[0][0][0] == "hit"
