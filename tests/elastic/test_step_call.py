"""A step that is no longer waited for does not hold up the next one."""

import threading
import types

import pytest

from jaxcoll._elastic import run
from jaxcoll._elastic.run import outcome_of
from jaxcoll._threads import any_blocked


class Interrupted(threading.Event):
    def wait(self, timeout=None):
        raise KeyboardInterrupt


def test_an_interrupt_in_the_wait_leaves_the_step_to_its_thread():
    release = threading.Event()
    membership = types.SimpleNamespace(
        woken=Interrupted(), check=lambda: None, check_members=lambda: None
    )
    with pytest.raises(KeyboardInterrupt):
        outcome_of(release.wait, membership, None, "step 0")
    assert run._worker is None
    assert any_blocked()
    release.set()
