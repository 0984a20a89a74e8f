"""Compiled programs mean what their text says, in every layout: compare_hlo.py for this machine."""

import jax
import numpy as np
import pytest
from hlo.compare_hlo import PROGRAMS, compare, compile_text

NOT_HERE = ("ragged_experts", "broadcast")  # XLA's CPU compiler has none


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in NOT_HERE])
def test_text_reads_as_proto(name):
    text, proto = compile_text(name, np.array(jax.devices()[:8]))
    assert compare(name, text, proto)
