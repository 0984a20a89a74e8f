"""What follows as it always did is not asked about; what departs from it is."""

import random

from hypothesis import given
from hypothesis import strategies as st

from jaxcoll._dispatch import call_predictor
from jaxcoll._dispatch.call_predictor import Order

RUNS = st.lists(
    st.tuples(st.sampled_from("abcd"), st.sampled_from([1, 1, 2, 3, 10])), min_size=1, max_size=8
)


def called(one, marks):
    """Calls, and how many of them were asked about."""
    asked = 0
    for mark in marks:
        asks = one.asks(mark)
        one.follow(mark, asks)
        asked += asks
    return asked


@given(RUNS)
def test_a_loop_is_asked_about_only_in_its_first_rounds(runs):
    marks = "".join(mark * length for mark, length in runs)
    one = Order()
    assert called(one, marks * 25) < 16
    assert called(one, marks * 5) == 0


@given(RUNS, st.integers(0, 100), st.sampled_from("abcd"))
def test_who_departs_from_a_loop_or_who_does_not_asks_first(runs, at, other):
    marks = "".join(mark * length for mark, length in runs)
    at %= len(marks)
    here, there = Order(), Order()
    for one in (here, there):
        called(one, marks * 25 + marks[:at])
    if other != marks[at]:
        assert here.asks(marks[at]) or there.asks(other)


def test_training_that_is_as_long_as_it_likes_is_asked_about_once():
    assert called(Order(), "t" * 10_000) == 1


def test_an_irregular_order_is_asked_about_at_every_hundredth_call_and_kept_in_bounds():
    rng = random.Random(0)
    one = Order()
    asked = called(one, (rng.choice("ab") for _ in range(20_000)))
    assert 200 < asked <= call_predictor.ALLOWED + 20_000 // call_predictor.EVERY
    assert len(one._followed) <= call_predictor.MOST


def test_after_an_interruption_the_next_call_is_asked_about():
    one = Order()
    called(one, "ab" * 20)
    one.interrupt()
    assert one.asks("a")
    assert called(one, "ab" * 20) <= 3
