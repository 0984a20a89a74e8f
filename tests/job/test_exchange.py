"""What processes tell one another through the store, by threads in the place of processes."""

import dataclasses
import threading

import pytest

import jaxcoll as jc
from jaxcoll._job.exchange import LateError, exchange
from jaxcoll._job.key_value import LocalKeys


@pytest.fixture
def stores():
    keys = LocalKeys(processes=3)
    return [dataclasses.replace(keys, process=process) for process in range(3)]


def test_missing_are_named(stores):
    exchange(stores[2], "name", "c", [2], 0)
    with pytest.raises(LateError, match=r"^ranks 1, 3 did not answer within 0\.05 s\.$") as late:
        exchange(stores[0], "name", "a", range(4), 0.05)
    assert isinstance(late.value, jc.errors.DeadlineExceededError)
    assert (late.value.ranks, late.value.values) == ((1, 3), {0: "a", 2: "c"})


def test_check_may_end_the_wait(stores):
    seen, woken = [], threading.Event()

    def check(late):
        seen.append(late)
        woken.set()
        if len(seen) == 3:
            raise ConnectionError

    with pytest.raises(ConnectionError):
        exchange(stores[0], "name", 1, ["a", "b"], 60, me="a", check=check, woken=woken)
    assert seen == [["b"]] * 3
