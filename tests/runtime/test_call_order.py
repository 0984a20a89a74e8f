"""What follows as it did before is expected; who departs from the others is surprised, or they are."""

from hypothesis import given
from hypothesis import strategies as st

from jaxcoll._runtime import call_order
from jaxcoll._runtime.call_order import CallOrder

MARKS = st.text("abcd", max_size=60)
RUNS = st.lists(
    st.tuples(st.sampled_from("abcd"), st.sampled_from([1, 1, 2, 3, 10])), min_size=1, max_size=8
)


def surprises(order, marks):
    """Make calls, and count those that were not expected."""
    return sum(not order.follow(mark) for mark in marks)


@given(RUNS)
def test_loop_surprises_first_rounds_only(runs):
    marks = "".join(mark * length for mark, length in runs)
    order = CallOrder()
    assert surprises(order, marks * 25) <= 3 * len(marks)
    assert surprises(order, marks * 5) == 0


@given(MARKS, st.sampled_from("abcd"), st.sampled_from("abcd"), st.booleans())
def test_one_of_two_orders_surprises(marks, one, other, is_interrupted):
    here, there = CallOrder(), CallOrder()
    for order in (here, there):
        surprises(order, marks)
        if marks and is_interrupted:
            order.interrupt()
    expected = [here.follow(one), there.follow(other)]
    assert not all(expected) or (one == other and not (marks and is_interrupted))


def test_long_training_stays_in_bounds():
    order = CallOrder()
    assert surprises(order, "t" * 100_000) == 1
    assert surprises(order, "e") == 1
    assert len(order._history[1]) <= 2 * call_order.RECENT
    assert (order.ran(100_000), order.ran(100_001), order.ran(100_002)) == ("t", "e", None)
    assert order.ran(1) is None


def test_interruption_keeps_its_place():
    order = CallOrder()
    surprises(order, "abc")
    order.interrupt()
    surprises(order, "a")
    assert [order.ran(position) for position in range(6)] == [None, "a", "b", "", "a", None]
