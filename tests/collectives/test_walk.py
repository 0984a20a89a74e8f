"""A bare `all_reduce` enters few functions of ours while it is traced, in few files."""

import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from cases import mapped

import jaxcoll as jc

all_reduce = jc.all_reduce  # whose modules are imported here: an import is no part of the walk
HOME = str(Path(jc.__file__).parent)
TREE = {"b": np.ones(4, "f"), "w": np.ones((8, 4), "f")}


def entered(f):
    """The functions of the package that a trace of `f` enters; Python 3.11 calls comprehensions."""
    codes = set()

    def note(frame, event, arg):
        code = frame.f_code
        is_ours = code.co_filename.startswith(HOME) and not code.co_name.endswith(
            ("comp>", "expr>")
        )
        if event == "call" and is_ours:
            codes.add(code)

    sys.setprofile(note)
    try:
        mapped(f, jax.sharding.PartitionSpec(), check_vma=False).trace(TREE)
    finally:
        sys.setprofile(None)
    return codes


@pytest.mark.parametrize(("before", "most"), [(0, 63), (1, 60)], ids=["first", "second"])
def test_bare_call_is_short(before, most):
    all_reduce = jc.all_reduce  # the name's first use imports files
    jax.clear_caches()
    for _ in range(before + 1):
        codes = entered(lambda tree: all_reduce("mean", tree, "data"))
    names = "\n".join(sorted(f"{Path(code.co_filename).name}: {code.co_name}" for code in codes))
    assert len(codes) <= most, names
    assert len({code.co_filename for code in codes}) <= 15 - before, names
