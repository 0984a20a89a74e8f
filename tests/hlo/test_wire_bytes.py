"""What leaves a device, from a list of collectives."""

import pytest

from jaxcoll._hlo.collective import KINDS, Collective, Operand, count_bytes, wire_bytes
from jaxcoll._report.row_table import totals


def collective(kind, n, *operands, **more):
    return Collective(kind, "c", operands, n, (tuple(range(n)),), "main", **more)


def test_each_kind():
    for kind, n, size, expected in [
        ("all-reduce", 8, 1024, 2 * 7 * 512),
        ("all-reduce", 3, 1024, 2 * (342 + 341 + 341 - 341) * 4),
        ("all-reduce", 1024, 3, 2 * 3 * 4),
        ("reduce-scatter", 8, 1024, 7 * 512),
        ("all-to-all", 8, 1024, 7 * 512),
        ("all-gather", 8, 1024, 7 * 4096),
        ("collective-permute", 8, 1024, 4096),
        ("collective-broadcast", 8, 1024, 4096),
        ("ragged-all-to-all", 8, 1024, 4096),
    ]:
        assert wire_bytes([collective(kind, n, Operand("f32", (size,)))]) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_group_of_one_sends_nothing(kind):
    assert wire_bytes([collective(kind, 1, Operand("f32", (1024,)))]) == 0


def test_element_types():
    for dtype, size, expected in [
        *[("f32", 3, 12), ("f64", 3, 24), ("bf16", 3, 6), ("f16", 3, 6), ("pred", 3, 3)],
        *[("s8", 3, 3), ("u64", 3, 24), ("c64", 3, 24), ("c128", 3, 48)],
        *[("f8e4m3fn", 3, 3), ("f8e5m2fnuz", 3, 3), ("f8e8m0fnu", 3, 3)],
        *[("s4", 3, 2), ("u4", 8, 4), ("s2", 3, 1), ("f4e2m1fn", 3, 2)],
    ]:
        assert count_bytes(dtype, size) == expected


def test_unknown_element_types_are_refused():
    for dtype in ["token", "tf32", "q8", ""]:
        with pytest.raises(ValueError, match=f"expected an element type of HLO.*got '{dtype}'"):
            count_bytes(dtype, 1)


def test_operands_and_trips_all_count():
    pair = collective("all-reduce", 4, Operand("f32", (8,)), Operand("bf16", (4,)), trips=3)
    assert pair.nbytes == 40
    assert wire_bytes([pair]) == 3 * (2 * 3 * 2 * 4 + 2 * 3 * 1 * 2)


def test_largest_branch_counts():
    def sends(nbytes, *branches):
        return collective("collective-permute", 2, Operand("s8", (nbytes,)), branches=branches)

    outer_0, outer_1 = ("outer", 0), ("outer", 1)
    inner_0, inner_1 = ("outer/inner", 0), ("outer/inner", 1)
    one = [sends(1000), sends(10, outer_0), sends(20, outer_0), sends(25, outer_1)]
    assert wire_bytes(one) == 1030
    nested = [sends(10, outer_0), sends(3, outer_1, inner_0), sends(9, outer_1, inner_1)]
    assert wire_bytes(nested) == 10
    assert wire_bytes([*nested, sends(2, outer_1)]) == 11


def test_cut_exchange_sends_whole_shares():
    eight = tuple(range(8))
    cut = Collective("all-to-all", "a", (Operand("f32", (13,)),) * 8, 8, (eight,), "main")
    assert cut.wire_bytes == 7 * 13 * 4


@pytest.mark.parametrize(("trips", "turns"), [(None, 1), (0, 0), (3, 3)])
def test_unknown_loop_counts_one_turn(trips, turns):
    found = collective("all-reduce", 8, Operand("f32", (4,)), trips=trips)
    assert found.turns == turns
    assert wire_bytes([found]) == turns * found.wire_bytes
    least = "≥ " if trips is None else ""
    assert totals([found]).startswith(f"{least}{turns} all-reduce")
    assert totals([found]).endswith(f", {least}{16 * turns} B")
