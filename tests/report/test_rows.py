"""Compiled collectives are matched to requested ones, with the changes to each."""

from jaxcoll._hlo.collective import Collective, Operand
from jaxcoll._hlo.hlo import Program
from jaxcoll._report.rows import make_rows


def sends(name, *sizes, kind="all-reduce", loops=(), dtype="f32"):
    operands = tuple(Operand(dtype, (n,)) for n in sizes)
    return Collective(kind, "c", operands, 4, ((0, 1, 2, 3),), "main", op_name=name, loops=loops)


FOUR = [sends("x", n) for n in (1, 2, 3, 4)]
LOOP = {"loops": ("while",)}
CASES = {  # what is requested, what is compiled, and of each of these (requested, by, changes)
    "merged": ([sends("a", 3), sends("b", 4)], [sends("f/(a:b)", 3, 4)], [((0, 1), "name", "merged 2")]),
    "two of one name": ([sends("a", 3)] * 2, [sends("a", 3)] * 2, [((0,), "name", ""), ((1,), "name", "")]),
    "two names of three": (
        [sends("a", 3), sends("b", 3), sends("a", 7)], [sends("f/(a:b)", 3, 3)],
        [((0, 1), "name", "merged 2")],
    ),
    "the larger of one name": (FOUR, [sends("x", 4)], [((3,), "name", "")]),
    "neighbours copied into one": (FOUR, [sends("x", 5)], [((1, 2), "order", "merged 2")]),
    "split": (
        [sends("a", 10)], [sends("a", 4), sends("a", 6)],
        [((0,), "name", "split"), ((0,), "name", "split")],
    ),
    "repeated": (
        [sends("a", 3, **LOOP)], [sends("a", 3), sends("a", 3, **LOOP)],
        [((0,), "name", "repeated, moved out of its loop"), ((0,), "name", "")],
    ),
    "in loops to in loops": (
        [sends("a", 3, **LOOP), sends("a", 3)], [sends("a", 3), sends("a", 3, **LOOP)],
        [((1,), "name", ""), ((0,), "name", "")],
    ),
    "another kind": (
        [sends("a", 8, kind="reduce-scatter"), sends("a", 8)], [sends("a", 8), sends("a", 8)],
        [((1,), "name", ""), ((0,), "name", "was reduce-scatter")],
    ),
    "another type": ([sends("a", 3, dtype="bf16")], [sends("a", 3)], [((0,), "name", "bf16 → f32")]),
    "added": ([sends("a", 3)], [sends("a", 3), sends("b", 9)], [
        ((0,), "name", ""), ((), "", "added by the compiler")]),
    "of an unknown origin": ([sends("a", 3)], [sends("b", 3)], [((), "", "origin unknown")]),
}  # fmt: skip


def test_compiled_joins_requested():
    for case in CASES:
        requested, compiled, expected = CASES[case]
        program = Program("f", 4, 9, tuple(compiled), (), (), (), (), ())
        rows = make_rows(program, requested, (), None)
        found = [(row.requested, row.matched_by, ", ".join(row.changes)) for row in rows]
        assert found == expected
