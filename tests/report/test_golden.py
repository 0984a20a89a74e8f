"""Texts that compilers have printed (golden/make.py), of several versions and backends.

hlo/test_compare_hlo.py counts those that XLA's own parser reads: here are the others, and what no
proto says.
"""

import contextlib
from pathlib import Path

import pytest

from jaxcoll._hlo.collective import Operand, wire_bytes
from jaxcoll._hlo.hlo import read_hlo
from jaxcoll._plan.scope_names import names, parse_pack

GOLDEN = Path(__file__).parent / "golden"
ALL = (tuple(range(8)),)
AROUND = tuple((i, (i + 1) % 8) for i in range(8))


def text(name):
    return (GOLDEN / f"{name}.hlo").read_text()


def compiled(name):
    return read_hlo(text(name)).collectives


def requested(name):
    return read_hlo((GOLDEN / f"requested-{name}.txt").read_text()).collectives


def outline(collectives):
    return [(c.kind, len(c.operands), c.nbytes, c.trips) for c in collectives]


LOOP = [("all-reduce", 1, 1024, 5), ("all-reduce", 1, 1024, 1)]
ADDED_FIRST = [("all-reduce", 1, 4, 1), ("all-reduce", 1, 256, 1), ("all-reduce", 1, 256, 1)]


def test_counts_and_bytes():
    for name, expected, nbytes in [
        ("gpu-0.12.0.1-loop", LOOP, 10752),
        ("gpu-0.12.0.1-branches", ADDED_FIRST, 8 + 448),
        # XLA's GPU compiler copies the two f32 operands into one before it sums them.
        ("gpu-0.12.0.1-variadic", [("all-reduce", 1, 460, 1), ("all-reduce", 1, 28, 1)], 864),
        ("v6e-0.12.0.1-layers", [("all-reduce", 1, 16 << 20, 1)] * 2, 2 * (28 << 20)),
    ]:
        collectives = compiled(name)
        assert outline(collectives) == expected
        assert wire_bytes(collectives) == nbytes


MESH = {
    ((0, 4), (1, 5), (2, 6), (3, 7)): (2, 128),
    ((0, 1, 2, 3), (4, 5, 6, 7)): (4, 192),
    ALL: (8, 224),
}


@pytest.mark.parametrize("name", ["cpu-0.10.2", "cpu-0.12.0.1", "gpu-0.12.0.1", "v6e-0.12.0.1"])
def test_mesh_groups_and_merged_names(name):
    assert {c.groups: (c.group_size, c.wire_bytes) for c in compiled(f"{name}-mesh")} == MESH
    (merged,) = compiled(f"{name}-packs")
    found = [parse_pack(each).partition("/")[2] for each in names(merged.op_name)]
    assert sorted(found) == ["pack0", "pack1", "pack2"]
    assert merged.nbytes == (600 + 7) * 4


def test_arithmetic_between_start_and_end():
    inside = [c.meanwhile for c in compiled("gpu-0.12.0.1-overlapped")]
    assert [(m.matmuls, m.flops) for m in inside] == [(1, 2 * 2048**3)] * 2
    first, second = compiled("v6e-0.12.0.1-layers")
    # A start without operands only prepares: what is multiplied before the update hides nothing.
    assert (first.meanwhile.flops, second.meanwhile.flops) == (2 * 2048**3, 0)


def test_asynchronous_pair_counts_once():
    first, last = compiled("gpu-0.12.0.1-loop")
    assert first.name == "all-reduce-start"
    assert first.operands == (Operand("f32", (1, 256)),)
    assert first.groups == ALL
    assert first.computation == "region_0.0_spmd"
    assert first.op_name == "jit(loop)/shard_map/while/body/eval_jaxpr/psum_invariant"
    assert (first.is_async, last.is_async, last.computation) == (True, False, "main.0_spmd")
    scattered, permuted = compiled("gpu-0.12.0.1-overlapped")
    assert (scattered.is_async, permuted.is_async, permuted.groups) == (True, True, AROUND)
    # custom-call-start, -update and -done around a computation that holds the all-reduce
    first, second = compiled("v6e-0.12.0.1-layers")
    assert (first.is_async, second.is_async) == (True, True)
    assert first.computation == "called_computation.2" != second.computation


LT, ONE = "direction=LT", "sunk = s32[]{:T(128)} constant(1)"
LIMIT = "constant.1.clone.1 = s32[]{:T(128)} constant(5)"
ADD, SUBTRACT = " add(%get-tuple-element.35", " subtract(%get-tuple-element.35"
UNEVEN = {LT: "direction=NE", ONE: ONE.replace("(1)", "(2)")}
COUNTED = {  # changes of a loop that counts 0, 1, … while it is less than 5, and its iterations
    "up to the limit": ({LT: "direction=LE"}, 6),
    "in steps of two": ({ONE: ONE.replace("(1)", "(2)")}, 3),
    "until it is the limit": ({LT: "direction=NE"}, 5),
    "down": ({LT: "direction=GT", ADD: SUBTRACT, LIMIT: LIMIT.replace("(5", "(-5")}, 5),
    "down to the limit": (
        {LT: "direction=GE", ONE: ONE.replace("(1)", "(-2)"), LIMIT: LIMIT.replace("(5", "(-4")},
        3,
    ),
    "the limit on the left": (
        {LT: "direction=GT", "(%get-tuple-element.21, %constant.1.clone.1)": "(%constant.1.clone.1, %get-tuple-element.21)"},
        5,
    ),
    "not once": ({LIMIT: LIMIT.replace("(5", "(-1")}, 0),
    "another comparison": ({LT: "direction=EQ"}, None),
    "past the limit": (UNEVEN, None),
    "away from the limit": ({ADD: SUBTRACT}, None),
    "around its type's range": ({LT: "direction=LE", LIMIT: LIMIT.replace("(5", "(2147483647")}, None),
    "compared with what is computed": ({"constant(5)": "negate(%wide.param.1)"}, None),
    "a step that is a product": ({ADD: ADD.replace("add", "multiply")}, None),
    "a step from another element": ({"(%wide.param.2), index=0": "(%wide.param.2), index=2"}, None),
    "a start that is computed": ({"copy(%constant.3.clone.1)": "negate(%constant.3.clone.1)"}, None),
}  # fmt: skip


def test_loop_count_is_proven():
    """libtpu drops the count."""
    for name in COUNTED:
        loop = text("v6e-0.12.0.1-loop")
        changes, turns = COUNTED[name]
        for old, new in changes.items():
            assert loop.count(old) == 1
            loop = loop.replace(old, new)
        program = read_hlo(loop)
        collectives = program.collectives
        assert [c.trips for c in collectives] == [turns, 1]
        assert len(program.unbounded) == (turns is None)
        assert wire_bytes(collectives) == sum(c.turns * c.wire_bytes for c in collectives)


def test_damaged_loop_keeps_count():
    lines = text("v6e-0.12.0.1-loop").splitlines()
    for k in range(len(lines)):
        with contextlib.suppress(ValueError):
            found = read_hlo("\n".join([*lines[:k], *lines[k + 1 :]])).collectives
            assert {c.trips for c in found} <= {None, 1, 5}


def test_requested_branches_are_known():
    for version in ["0.10.2", "0.12.0.1"]:
        always, *some = requested(f"{version}-branches")
        assert [always.branches, *(c.branches[0][1] for c in some)] == [(), 0, 0, 1]
        assert wire_bytes([always, *some]) == 8 + 896
