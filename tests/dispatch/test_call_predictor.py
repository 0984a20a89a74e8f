"""What follows as it always did is not asked about; what departs from it is."""

import random

from hypothesis import given
from hypothesis import strategies as st

from jaxcoll._dispatch import call_history
from jaxcoll._dispatch.call_history import CallPredictor

RUNS = st.lists(
    st.tuples(st.sampled_from("abcd"), st.sampled_from([1, 1, 2, 3, 10])), min_size=1, max_size=8
)


def called(one, marks):
    """Calls, and how many of them were asked about."""
    asked = 0
    for mark in marks:
        unexpected = one.is_unexpected(mark)
        one.follow(mark, unexpected)
        asked += unexpected
    return asked


@given(RUNS)
def test_a_loop_is_asked_about_only_in_its_first_rounds(runs):
    marks = "".join(mark * length for mark, length in runs)
    one = CallPredictor()
    assert called(one, marks * 25) < 16
    assert called(one, marks * 5) == 0


@given(RUNS, st.integers(0, 100), st.sampled_from("abcd"))
def test_who_departs_from_a_loop_or_who_does_not_asks_first(runs, at, other):
    marks = "".join(mark * length for mark, length in runs)
    at %= len(marks)
    here, there = CallPredictor(), CallPredictor()
    for one in (here, there):
        called(one, marks * 25 + marks[:at])
    if other != marks[at]:
        assert here.is_unexpected(marks[at]) or there.is_unexpected(other)


def test_training_that_is_as_long_as_it_likes_is_asked_about_once():
    assert called(CallPredictor(), "t" * 10_000) == 1


def test_an_irregular_order_is_asked_about_at_every_hundredth_call_and_kept_in_bounds():
    rng = random.Random(0)
    one = CallPredictor()
    asked = called(one, (rng.choice("ab") for _ in range(20_000)))
    assert 200 < asked <= call_history.FREE_CHECKS + 20_000 // call_history.CALLS_PER_CHECK
    assert len(one._followed) <= call_history.MAX_PLACES


def test_after_an_interruption_the_next_call_is_asked_about():
    one = CallPredictor()
    called(one, "ab" * 20)
    one.interrupt()
    assert one.is_unexpected("a")
    assert called(one, "ab" * 20) <= 3
