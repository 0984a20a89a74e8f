"""How much slower the automatic choice is than the best by hand: the cases, and the arithmetic."""

import contextlib
import json
import math

import pytest

from jaxcoll.bench.naming import BASELINE, options_of
from jaxcoll.bench.targets import from_checkout

regret = from_checkout("--regret: it is", "regret")
AUTO, HOPELESS, TWIN = regret.AUTO, regret.HOPELESS, regret.TWIN
Case, Regret, candidates, cases = regret.Case, regret.Regret, regret.candidates, regret.cases

CASE = Case(0, 2, 4, "1gbit", (100, 200))


def test_cases_are_of_their_seed_and_of_every_kind_of_world():
    found = cases(200, seed=0)
    assert found == cases(200, seed=0)
    assert found[:5] == cases(5, seed=0)
    assert found[:5] != cases(5, seed=1)
    assert {(case.hosts, case.rate) for case in found} == {
        (1, "none"),
        *((2, r) for r in regret.RATES),
    }
    assert {case.processes for case in found} == set(regret.PROCESSES)
    assert all(min(case.elements) >= 1 for case in found)
    assert all(0.5 * regret.FEWEST_BYTES < case.nbytes < 1.1 * regret.MOST_BYTES for case in found)
    for case in found:
        for name in candidates(case):
            assert name == BASELINE or options_of(name)


def test_two_levels_are_tried_where_there_are_two():
    assert "shuffle/native@all" in candidates(CASE)
    for one in (Case(0, 1, 4, "none", (100,)), Case(0, 2, 2, "none", (100,))):
        assert not any("/" in name for name in candidates(one))


def test_the_best_is_picked_in_other_rounds_than_it_is_compared_in():
    seconds = {AUTO: (3.0,) * 4, TWIN: (1.0,) * 4, "a": (1.0, 3.0, 1.0, 3.0), "b": (4.0,) * 4}
    found = Regret(CASE, seconds)
    assert found.ratio == pytest.approx(math.sqrt(2 / 3 * 2 / 1)), "2 is the median of both twins"
    assert found.twin == 3.0
    assert found.best == "a"


def test_a_candidate_of_the_same_plan_is_the_same_program():
    seconds = {AUTO: (2.0,) * 4, TWIN: (2.0,) * 4, "b": (4.0,) * 4}
    assert Regret(CASE, seconds, ("a",)).ratio == 1.0
    assert Regret(CASE, seconds).ratio == 0.5
    assert Regret(CASE, {**seconds, "b": (1.0,) * 4}, ("a",)).ratio == 2.0


def test_what_was_found_is_read_again():
    found = Regret(CASE, {AUTO: (2.0, 1.0), TWIN: (2.0, 1.0), "a": (1.0, 1.0)}, ("b",))
    assert regret.regret_of(json.loads(json.dumps(found.to_dict()))) == found


def test_a_summary_has_means_and_the_worst():
    def of(auto, twin):
        return Regret(CASE, {AUTO: (auto,) * 2, TWIN: (twin,) * 2, "a": (1.0,) * 2})

    total = regret.summary([of(1.0, 1.0), of(4.0, 8.0)])
    assert total == {
        "cases": 2,
        "mean": pytest.approx(math.sqrt(6)),
        "worst": 6.0,
        "twin_mean": pytest.approx(math.sqrt(2)),
        "twin_worst": 2.0,
    }


class Ranks:
    """Ranks of which each contestant takes a time of its own."""

    SLOW = "native@all"
    barrier_bytes = 0.0

    def __init__(self, asked):
        self.asked = asked

    def sent_bytes(self):
        return None

    def do(self, method, **arguments):
        name = arguments.get("name")
        self.asked.append((method, name))
        if method == "plan":
            return [{AUTO: "x", "halving-doubling@all": "x"}.get(name, name)]
        seconds = HOPELESS + 1 if name == self.SLOW else 1.0
        return [{"seconds": seconds * arguments.get("calls", 1), "cpu_seconds": 0.0}]


def test_cases_of_one_world_share_their_processes_and_hopeless_candidates_are_left_out(monkeypatch):
    worlds, rates, asked, words = [], [], [], []

    @contextlib.contextmanager
    def ranks(hosts, processes, timeout):
        worlds.append((hosts, processes))
        yield Ranks(asked), rates.append

    monkeypatch.setattr(regret, "_ranks", ranks)
    wanted = [
        Case(k, 2, n, rate, (9,) * 9)
        for k, n, rate in ((0, 4, "1gbit"), (1, 2, "none"), (2, 4, "none"))
    ]
    found = list(regret.measure(wanted, 5, 1.0, words.append))
    assert worlds == [(2, 2), (2, 4)]
    assert [each.case.number for each in found] == [1, 0, 2]
    assert rates == ["none", "1gbit", "none"]
    assert len(words) == 3
    for each in found:
        assert each.alike == ("halving-doubling@all",)
        assert Ranks.SLOW not in each.seconds
        assert {AUTO, TWIN} <= each.seconds.keys()
        assert {len(rounds) for rounds in each.seconds.values()} == {regret.FEWEST}
        assert each.ratio == 1.0
    assert ("compile", "halving-doubling@all") not in asked
