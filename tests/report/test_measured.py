"""Transfer, waiting and the late rank, of times that are made up; runs, of profiles that are."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxcoll._hlo.collective import Collective, Operand
from jaxcoll._report.measured import compare, fold_rows
from jaxcoll._report.profile.profile import Compiled, Profile
from jaxcoll._report.programs import Programs, programs_from, read_rank
from jaxcoll._report.row_table import table
from jaxcoll._report.rows import Row
from jaxcoll._show.units import WIDTH
from tests.report.xplanes import MS, REDUCE, Execution, cpu, hlo, programs_in, steps, times_in

GRADIENT = (Operand("f32", (1000,)),)


def row(kind="all-reduce", name="ar", *, trips=1, source="train.py:1"):
    return Row(
        Collective(kind, name, GRADIENT, 4, (tuple(range(4)),), "main", trips, source=source)
    )


def rank(durations, *, first=0, clock=0, step=20 * MS, starts=None):
    """Times of a rank: for each run the durations of each fold; all ranks end at the same time."""
    n = len(durations)
    ends = [10**18 + (starts[k] if starts else k * step) + 15 * MS for k in range(n)]
    return {
        "runs": [first + k for k in range(n)],
        "starts": [end + clock - sum(map(sum, d)) for end, d in zip(ends, durations, strict=True)],
        "ends": [end + clock for end in ends],
        "step": step,
        "turns": [[]] * n,
        "devices": 1,
        "exposed": [sum(map(sum, d)) for d in durations],
        "times": durations,
        "lanes": [[(-1, 0, MS), (0, MS, MS + sum(map(sum, d)))] for d in durations],
    }


def late_by(lateness, *, transfer=3.0, runs=20, seed=0):
    """Durations of one all-reduce on ranks that come so many milliseconds late."""
    noise = np.random.default_rng(seed)
    ranks = {}
    for r, ms in enumerate(lateness):
        own = transfer + max(lateness) - ms + noise.uniform(0, 0.3, runs)
        ranks[r] = rank([[[int(x * MS)]] for x in own])
    return ranks


@given(
    st.lists(st.floats(0, 0.2), min_size=2, max_size=8),
    st.integers(0, 7),
    st.floats(2.0, 100.0),
    st.integers(0, 99),
)
def test_only_late_rank_is_named(lateness, who, ms, seed):
    who %= len(lateness)
    lateness[who] = ms
    measured = compare([row()], late_by(lateness, seed=seed))
    ((last, position),) = measured.late
    assert (last.rank, position, last.share) == (who, 0, 1.0)
    assert last.seconds == pytest.approx(ms / 1e3, abs=6e-4)
    (times,) = measured.times
    assert times.transfer == pytest.approx(3.2e-3, abs=3e-4)
    assert times.waiting[who] == 0.0
    assert times.busbw == pytest.approx(6000 / times.transfer)
    assert times.algbw == pytest.approx(4000 / times.transfer)
    (sentence,) = measured.sentences([row()])
    assert sentence.startswith(
        f"rank {who} arrives late: last at all-reduce #0 in 100 % of 20 runs"
    )


@given(st.permutations(range(4)), st.booleans(), st.integers(0, 99))
def test_ranks_compare_within_their_groups(order, meets, seed):
    # Two groups of ranks, of which one sends four times as long; rank 0 or nobody is late.
    groups = [tuple(order[:2]), tuple(order[2:])]
    apart = Collective("all-reduce", "ar", GRADIENT, 2, tuple(groups), "main")
    fast, slow = (late_by([20 * meets * (r == 0) for r in g], transfer=t, seed=seed)
                  for g, t in zip(groups, (5.0, 20.0), strict=True))  # fmt: skip
    ranks = {
        r: times[k] for g, times in zip(groups, (fast, slow), strict=True) for k, r in enumerate(g)
    }
    measured = compare([Row(apart)], ranks)
    assert [last.rank for last, _ in measured.late] == [0] * meets
    (times,) = measured.times
    own = next(g for g in groups if 0 in g)
    for rank, waited in enumerate(times.waiting):
        assert waited == pytest.approx(0.02 * (meets and rank in own and rank != 0), abs=4e-4)
    assert times.transfer == pytest.approx(20.2e-3, abs=4e-4)


def test_small_lateness_names_nobody():
    assert compare([row()], late_by([0, 0.9, 0, 0])).late == ()  # under 5 % of 20 ms
    few = compare([row()], late_by([0, 50, 0, 0], runs=4))
    assert few.late == ()
    assert "in 4 runs on 4 ranks, too few to name a late rank: a step" in few.summary()
    alone = compare([row()], late_by([0]))
    assert (alone.late, alone.times[0].last, alone.runs) == ((), None, 20)


def test_packs_permutes_compare_together():
    rows = [row("collective-permute", f"p{k}") for k in range(3)]
    rows += [row(), row("collective-permute", "other", source="train.py:9")]
    assert fold_rows(rows) == [[0, 1, 2], [3], [4]]
    measured = compare(rows[:3], late_by([0, 20]))
    assert {times.rows for times in measured.times} == {(0, 1, 2)}


@pytest.mark.parametrize("kind", ["all-reduce", "collective-permute"])
@pytest.mark.parametrize("width", [80, WIDTH])
def test_table_names_the_last_rank(kind, width):
    rows = [row(kind, f"p{k}") for k in range(2)]
    lateness = late_by([0, 20.3, 0.123, 0.123])
    if kind == "all-reduce":  # each is measured alone
        for times in lateness.values():
            times["times"] = [turns * 2 for turns in times["times"]]
    text = table(rows, compare(rows, lateness)).text(width)
    assert f"\n0  2 × {kind}" in text
    assert re.search(r"\n   last to arrive: rank 1 in 100 % of runs, by 20\.\d ms$", text)
    assert max(map(len, text.splitlines())) <= width
    assert ("waiting, by rank" in text.splitlines()[0]) == (width == WIDTH)
    assert ("waiting, by rank: 20." in text) == (width == 80)


def test_loop_turns_compare_singly():
    # Each is late to one of two turns: both wait, though their sums are equal.
    ranks = {0: rank([[[3 * MS, 9 * MS]]] * 6), 1: rank([[[9 * MS, 3 * MS]]] * 6)}
    (times,) = compare([row(trips=2)], ranks).times
    assert times.transfer == pytest.approx(6e-3)
    assert times.waiting == pytest.approx((6e-3, 6e-3))


@given(
    st.integers(-(10**8), 10**8),
    st.integers(0, 5),
    st.integers(0, 5),
    st.integers(0, 99),
    st.booleans(),
)
def test_runs_match_number_or_rhythm(clock, early, late, seed, agree):
    starts = np.cumsum(np.random.default_rng(seed).integers(10 * MS, 30 * MS, 20)).tolist()
    numbers = [[[(k + 1) * MS]] for k in range(20)]
    ranks = {
        0: rank(numbers, starts=starts),
        1: rank(numbers, starts=starts, clock=clock, first=0 if agree else 1 << 20),
    }
    cut = slice(early, 20 - late)  # the other window begins and ends elsewhere
    ranks[1] = {k: v[cut] if isinstance(v, list) else v for k, v in ranks[1].items()}
    measured = compare([row()], ranks)
    assert measured.runs == 20 - early - late
    assert measured.times[0].waiting == (0.0, 0.0)
    assert {len(lane) for lane in measured.lanes} == {3}


def test_profile_knows_unknown_turns():
    ranks = late_by([0, 20], transfer=3.0)
    for times in ranks.values():
        times["times"] = [[[ns // 40] * 40 for (ns,) in run] for run in times["times"]]
        times["turns"] = [[40]] * 20
    rows = [row(trips=None)]
    measured = compare(rows, ranks)
    assert measured.turns == (40,)
    assert measured.times[0].busbw == pytest.approx(40 * 6000 / measured.times[0].transfer)
    text = table(rows, measured).text()
    assert re.search(r"all-reduce  f32    4\.00 kB    40    240\.0 kB  ", text)
    for times in ranks.values():
        times["turns"] = [[40 + run % 2] for run in range(20)]
    measured = compare(rows, ranks)
    assert measured.turns == (None,)
    assert measured.times[0].busbw == pytest.approx(40.5 * 6000 / measured.times[0].transfer)
    assert re.search(r"4\.00 kB     \?   ≥ 6\.00 kB  ", table(rows, measured).text())


@pytest.mark.parametrize("runs", [1, 2, 3])
def test_three_runs_have_a_step(runs):
    programs = programs_in(cpu(steps(("all-reduce.1", 0, 3), runs=runs, devices=1, step=10 * MS)))
    assert (programs.reports[0].measured.step_seconds is None) == (runs < 3)
    said = [
        "a step takes 10 ms under the profiler, 3 ms of it",
        "too few to tell the time of a step",
    ]
    assert [text in str(programs) for text in said] == [runs == 3, runs < 3]
    exposed = r" 0 %  10 ms     30 %\n" if runs == 3 else r" 0 %     –     3 ms\n"
    assert re.search(exposed, str(programs))


@pytest.mark.parametrize("width", [60, 80, WIDTH])
def test_narrow_table_keeps_all_figures(width):
    pairs, halves = "source_target_pairs={{0,1}}", REDUCE.partition(", to_apply")[0]
    given = {
        "all-reduce": REDUCE,
        "all-gather": f"{halves}, dimensions={{0}}",
        "reduce-scatter": f"{REDUCE}, dimensions={{0}}",
        "collective-permute": f"channel_id=1, {pairs}",
    }
    lines = [f"  %c{k} = f32[1000]{{0}} {kind}(%x), {how}" for k, (kind, how) in enumerate(given.items())]  # fmt: skip
    events = steps(*((f"c{k}", k, k + 1) for k in range(4)), ("dot.2", 4, 5), runs=9, step=10 * MS)
    printed = programs_in(cpu(events), hlo("\n".join(lines))).text(width)
    assert max(map(len, printed.splitlines())) <= width
    first = printed.split("\n\n")[0]
    words = " ".join(first.split())
    for figure in ("1 collective-permute", "wire bytes", "step", "exposed", "10 ms", "40 %"):
        assert figure in words, first
    assert "…" not in first


def test_nameless_function_shows_its_line():
    text = hlo().replace("jit_step,", "jit__unnamed_function,").replace(
        "to_apply=%add", 'to_apply=%add, metadata={source_file="a/train.py" source_line=7}'
    )  # fmt: skip
    programs = programs_in(b"", text)
    (report,) = programs.reports
    assert (report.name, report.title) == ("jit__unnamed_function", "jit at train.py:7")
    assert "\njit at train.py:7  " in str(programs)


def test_lanes_share_one_clock():
    ranks = late_by([0, 20])
    shifted = (
        [x + 7 * 10**12 for x in ranks[1]["starts"]],
        [x + 7 * 10**12 for x in ranks[1]["ends"]],
    )
    ranks[1]["starts"], ranks[1]["ends"] = shifted
    first, second = compare([row()], ranks).lanes
    kinds = [kind for kind, _, _ in first]
    assert kinds == ["computing", "waiting", "transfer"]
    assert first[-1][2] == pytest.approx(second[-1][2], abs=1e-3)
    assert first[1][2] - first[1][1] == pytest.approx(20e-3, abs=1e-3)


def test_containers_hide_nothing():
    events = [
        ("while.9", 0, 100), ("dot.1", 0, 4), ("all-reduce.1", 2, 10), ("fusion", 8, 9),
        ("all-reduce.1", 2, 6, 1),
    ]  # fmt: skip
    profile = [Execution(*device or [0], 1, name, a * MS, b * MS) for name, a, b, *device in events]
    found, _ = times_in(cpu(profile))
    assert found.exposed_seconds == pytest.approx((5 + 4) / 2 / 1e3)  # the devices' mean
    assert found.times[0].transfer == pytest.approx(4e-3)  # on the device that waited least


def test_unshared_programs_are_noted():
    reports, rows = read_rank([Compiled(hlo(), calls=3)], Profile(), 9)
    _, other = read_rank([Compiled(hlo().replace("jit_step", "jit_g"))], Profile(), 9)
    rows["notes"].append("not measured: x")
    programs = programs_from(reports, {0: rows, 1: other, 2: rows}, 2)
    assert "rank 1: compiled other programs: jit_g." in programs.notes
    assert "ranks 0, 2: not measured: x" in programs.notes
    assert re.search(r"jit_step +3 +1 all-reduce, 4\.00 kB", str(programs))
    key = next(iter(reports))
    for number, apart in enumerate((rows, other)):
        times = rank([[[MS]]] * 9, first=99 * number)
        times["ends"] = [99 * 10**12 * number + k for k in range(9)]
        apart["programs"] = {key: {"name": "jit_step", "times": times}}
    (note,) = programs_from(reports, {0: rows, 3: other}, 0).notes[1:]
    assert note == "jit_step: not measured: the profiles of ranks 0, 3 share no run."
    assert "No program with collectives was compiled; 3 programs" in str(Programs(quiet=3))


def test_process_without_devices_is_noted():
    _, rows = read_rank([Compiled(hlo(), 7, runs_here=False)], Profile(is_there=True), 9)
    (note,) = rows["notes"]
    assert note.startswith("jit_step: this process has none of its devices, and does no part of it")
