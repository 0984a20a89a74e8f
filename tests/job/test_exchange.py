"""What processes tell one another through the store, by threads in the place of processes."""

import dataclasses
import threading

import pytest
from at_once import at_once

import jaxcoll as jc
from jaxcoll._job.exchange import LateError, agree, exchange
from jaxcoll._job.key_value import LocalKeys


@pytest.fixture
def stores():
    keys = LocalKeys(processes=3)
    return [dataclasses.replace(keys, process=process) for process in range(3)]


def test_all_get_all_values(stores):
    found = at_once(
        *(lambda k=k: exchange(k, "name", [k.process, None], range(3), 10) for k in stores)
    )
    assert found == [{0: [0, None], 1: [1, None], 2: [2, None]}] * 3


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


def test_first_value_counts(stores):
    assert [agree(keys, "name", [keys.process]) for keys in stores] == [[0]] * 3
