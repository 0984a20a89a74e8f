"""The page of TensorFlow's cases says what the tests hold, and nothing that they do not."""

import pytest
from tensorflow_cases import (
    CASES,
    DIFFERS,
    NO_MEANING,
    PAGE,
    PASSES,
    by_case_carried,
    every_test,
    page,
)


def test_the_page_is_what_the_program_makes_of_the_table_and_the_tests():
    assert PAGE.read_text(encoding="utf-8") == page(), "run `python tests/tensorflow_cases.py`"


def test_a_case_that_passes_or_differs_is_held_by_a_test_that_is_there():
    by_case, names = by_case_carried(), set(every_test())
    for name, case in CASES.items():
        assert case.here in (PASSES, DIFFERS, NO_MEANING), name
        assert set(case.by) <= names, f"{name}: {set(case.by) - names} are not there"
        held = {*by_case.get(name, ()), *case.by}
        assert bool(held) == (case.here != NO_MEANING), f"{name}: {case.here}, held by {held}"
        assert case.words or case.here == PASSES, f"{name} does not say why"


def test_every_row_that_a_test_carries_is_a_case():
    assert sorted(set(by_case_carried()) - set(CASES)) == []
    assert len(CASES) > 230


@pytest.mark.parametrize(
    ("name", "rows"),
    [("test_H13_H14_x", ["H13", "H14"]), ("test_M1_x", []), ("test_x_H1_y", []), ("test_L2", [])],
)
def test_rows_stand_at_the_beginning_of_a_name(name, rows):
    from tensorflow_cases import carried

    assert carried(name) == rows
