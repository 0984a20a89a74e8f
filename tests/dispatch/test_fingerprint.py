"""What processes compare of a program is what there is to compare."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxcoll._dispatch.call import Call
from jaxcoll._dispatch.executable import compiled_for
from jaxcoll._dispatch.fingerprint import collectives, first_difference
from jaxcoll._dispatch.watchdog import group_of, watchdog
from jaxcoll._observe.build import report_of

GOLDEN = sorted((Path(__file__).parents[1] / "observe" / "golden").rglob("*.hlo*"))


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.name)
def test_every_collective_that_a_report_finds_is_compared(path):
    text = path.read_text()
    found = report_of(text)
    lines = collectives(text)
    assert len(lines) == found.count
    for kind in {c.kind for c in found.collectives}:
        wanted = sum(c.kind == kind for c in found.collectives)
        assert sum(line.split()[0] == kind for line in lines) == wanted


def test_a_difference_in_length_is_one():
    said = first_difference({0: ("a",), 1: ("a", "b")})
    assert said == "process 0: (nothing more)\nprocess 1: b"


def test_what_processes_must_have_in_common_is_compared_in_every_call():
    program, x = jax.jit(lambda x: x + 1), jnp.arange(3)

    def mark(settings):
        call = Call(program, (x,), jax.devices()[:1], "a call", settings=settings)
        return compiled_for(call, shared=True).mark

    assert len({mark("leaf a"), mark("leaf b"), mark("leaf a")}) == 2


def test_one_process_has_nobody_to_ask():
    assert watchdog() is None
    assert group_of(jax.devices()) is None
