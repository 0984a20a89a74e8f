"""Texts mean what XLA's own parser makes of them, in every layout: compare_hlo.py for this machine."""

from pathlib import Path

import jax
import numpy as np
import pytest
from hlo.compare_hlo import PROGRAMS, compare, compile_text

NOT_HERE = ("ragged_experts", "broadcast")  # XLA's CPU compiler has none
REFUSED = ("gpu-0.12.0.1-branches", "gpu-0.12.0.1-loop", "gpu-0.12.0.1-variadic", "v6e-0.12.0.1-layers")  # fmt: skip
"""Texts that jaxlib's parser takes for damaged."""
GOLDEN = [
    file
    for file in sorted((Path(__file__).parents[1] / "report" / "golden").iterdir())
    if file.suffix in (".hlo", ".txt") and file.stem not in REFUSED
]


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in NOT_HERE])
def test_text_reads_as_proto(name):
    text, proto = compile_text(name, np.array(jax.devices()[:8]))
    assert compare(name, text, proto)


@pytest.mark.parametrize("file", GOLDEN, ids=lambda file: file.stem)
def test_texts_of_other_compilers(file):
    assert compare(file.stem, file.read_text())
