"""Who works together: agreed over keys and values alone, by threads in the place of processes."""

import threading
import time

import pytest

import jaxcoll as jc
from jaxcoll._host import answers, beats
from jaxcoll._host import crew as crews
from jaxcoll._host.beats import Doing
from jaxcoll._host.compiled_steps import mismatch
from jaxcoll._host.crew import Crew
from jaxcoll._host.decision import CoordinatorLostError, RegroupError, rank_of
from jaxcoll._host.local_keys import LocalKeys


@pytest.fixture(autouse=True)
def _hurried(monkeypatch):
    monkeypatch.setattr(crews, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(answers, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(beats, "LOST_SECONDS", 0.4)


def crew_of(n, most=None, startup=5.0):
    keys = LocalKeys(processes=n)
    return [Crew(keys.of(r), "run", patience=5.0, startup=startup, most=most) for r in range(n)]


def at_once(*calls):
    found = [None] * len(calls)

    def go(i):
        try:
            found[i] = calls[i]()
        except Exception as error:
            found[i] = error

    threads = [threading.Thread(target=go, args=(i,)) for i in range(len(calls))]
    for t in threads:
        t.start()
    for t in threads:
        t.join(20)
    return found


def ended(crew):
    for one in crew:
        one.close()


def test_survivors_agree_on_members_and_on_the_last_step_that_all_have():
    crew = crew_of(4)
    first = at_once(*(lambda c=c: c.enter(0) for c in crew))
    assert [d.ranks for d in first] == [(0, 1, 2, 3)] * 4
    crew[1].close()
    crew[0].ask("somebody died")
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and not crew[3].woken.is_set():
        time.sleep(0.01)
    with pytest.raises(RegroupError):
        crew[3].check()
    held = {0: (6, 7), 2: (5, 6), 3: (6, 7)}
    second = at_once(*(lambda r=r: crew[r].decide(held[r][-1], held[r]) for r in held))
    assert len(set(second)) == 1
    assert (second[0].ranks, second[0].step, second[0].given) == ((0, 2, 3), 6, False)
    assert tuple(map(rank_of, second[0].lost)) == (1,)
    assert second[0].why == "somebody died"
    ended(crew)


def test_who_is_late_is_left_behind_and_learns_it_and_an_order_serves_once():
    crew = crew_of(3)
    at_once(*(lambda c=c: c.enter(0) for c in crew))
    crew[0].ask("step 3 did not finish", late=True)
    second = at_once(*(lambda c=c: c.decide(3, (2, 3)) for c in crew[:2]))
    assert second[0].ranks == (0, 1)
    late = crew[2].decide(3, (2, 3))
    assert crew[2].name not in late.members
    assert not Crew.is_current(crew_at(crew[0], 0))
    # Nobody is lost, and yet the same two cannot use their connections again.
    third = at_once(*(lambda c=c: c.decide(4, (3, 4)) for c in crew[:2]))
    assert third[0].ranks == (1, 0)
    fourth = at_once(*(lambda c=c: c.decide(4, (3, 4)) for c in crew[:2]))
    assert fourth[0].members == ()
    ended(crew)


def crew_at(crew, number):
    other = object.__new__(Crew)
    other.__dict__.update(crew.__dict__)
    other.decision = crew._read(number)
    return other


def test_a_spare_and_one_started_again_are_taken_in_and_given_the_state():
    crew = crew_of(3, most=2)
    found = {}
    spare = threading.Thread(target=lambda: found.update(spare=crew[2].enter(0)))
    spare.start()
    first = at_once(*(lambda c=c: c.enter(0) for c in crew[:2]))
    assert first[0].ranks == (0, 1)
    crew[1].close()
    second = crew[0].decide(9, (8, 9))
    spare.join(10)
    assert found["spare"] == second
    assert (second.ranks, second.given, rank_of(second.source)) == ((0, 2), True, 0)
    crew[2].close()
    third = crew[0].decide(11, (10, 11))
    assert third.ranks == (0,)
    again = Crew(crew[0].store.of(1), "run", patience=5.0, startup=5.0, most=2)
    joins = threading.Thread(target=lambda: found.update(again=again.enter(0)))
    joins.start()
    while not crew[0].joins_at(step := int(time.monotonic() * 1000)):
        time.sleep(0.01)
    assert step
    fourth = crew[0].decide(20, (19, 20))
    joins.join(10)
    assert found["again"] == fourth
    assert (fourth.ranks, fourth.step, fourth.given) == ((1, 0), 20, True)
    assert fourth.why == "a worker joined"
    at_once(*(lambda c=c: c.gather("finished", "") for c in (crew[0], again)))
    crew[0].finish()
    late = Crew(crew[0].store.of(2), "run", patience=5.0, startup=5.0, most=2)
    assert late.enter(0) is None
    ended([*crew, again, late])


def test_nobody_is_waited_for_who_has_ended_without_finishing():
    keys = LocalKeys(processes=2)
    first = [Crew(keys.of(r), "run", patience=5.0, startup=5.0, most=None) for r in range(2)]
    at_once(*(lambda c=c: c.enter(0) for c in first))
    ended(first)
    again = Crew(keys.of(1), "run", patience=5.0, startup=5.0, most=None)
    with pytest.raises(
        jc.PeerLostError, match=r"\(workers 0, 1\), and nobody is left to take worker 1"
    ):
        again.enter(0)
    ended([again])


def test_a_spare_that_says_nothing_is_not_taken_in_until_it_does(monkeypatch):
    monkeypatch.setattr(beats, "is_followed", lambda name: True)
    crew = crew_of(3, most=2)
    spare = threading.Thread(target=lambda: crew[2].enter(0), daemon=True)
    spare.start()
    at_once(*(lambda c=c: c.enter(0) for c in crew[:2]))
    while not crew[0]._waiting():
        time.sleep(0.01)
    says, crew[2]._store_beat = crew[2]._store_beat, lambda count: None
    crew[1].close()
    assert crew[0].decide(9, (8, 9)).ranks == (0,)
    crew[2]._store_beat = says
    assert crew[0].joins_at(10)
    time.sleep(0.2)
    assert crew[0].decide(10, (9, 10)).ranks == (0, 2)
    spare.join(10)
    ended(crew)


def test_a_barrier_that_a_worker_does_not_reach_ends_the_generation():
    crew = crew_of(2)
    at_once(*(lambda c=c: c.enter(0) for c in crew))
    crew[1].close()
    with pytest.raises(RegroupError):
        crew[0].gather("compiled", "")
    ended(crew)


def test_one_that_ended_after_a_barrier_is_no_loss_for_it(monkeypatch):
    here, gone = crew_of(2)
    at_once(*(lambda c=c: c.enter(0) for c in (here, gone)))
    look, looks = here._all, []

    def read(folder):
        found = look(folder)
        if not looks:  # it comes and ends between two looks
            looks.append(gone.store.set(gone._key(0, f"finished/{gone.name}"), ""))
            gone.close()
        return found

    monkeypatch.setattr(here, "_all", read)
    assert len(here.gather("finished", "")) == 2
    ended((here, gone))


def test_who_repeats_a_program_and_who_brings_a_new_one_find_each_other():
    crew = crew_of(3)
    at_once(*(lambda c=c: c.enter(0) for c in crew))
    crew[0].doing = Doing(0, 6, False, "known")  # and waits for the others in its collective
    crew[2].doing = Doing(0, 6, True)  # is still compiling
    crew[1].doing = Doing(0, 6, True, "new")
    with pytest.raises(RegroupError):
        crew[1].gather("program/6", "new", same=True)
    found = at_once(*(lambda c=c: c.decide(6, (5, 6)) for c in crew[:2]))
    assert found[0] == found[1]
    assert (found[0].members, tuple(map(rank_of, found[0].differ))) == ((), (0, 1))
    sides = at_once(*(lambda c=c: c.sides([f"of {rank_of(c.name)}"]) for c in crew[:2]))
    assert sides == [{0: ["of 0"], 1: ["of 1"]}] * 2
    late = crew[2].decide(6, (5, 6))
    assert late == found[0]
    said = str(mismatch(late, crew[2], ()))
    assert said.startswith("Workers bring different programs to step 6, and none goes on.")
    ended(crew)


def test_all_say_the_same_or_end_the_generation():
    crew = crew_of(2)
    at_once(*(lambda c=c: c.enter(0) for c in crew))
    same = at_once(*(lambda c=c: c.gather("program/0", "a", same=True) for c in crew))
    assert [set(said.values()) for said in same] == [{"a"}] * 2
    said = at_once(*(lambda c=c: c.gather("program/1", c.name, same=True) for c in crew))
    assert [type(error) for error in said] == [RegroupError] * 2
    ended(crew)


@pytest.mark.parametrize(
    ("one", "other", "contradicts"),
    [
        (Doing(0, 6, True, "a"), Doing(0, 6, True, "b"), True),
        (Doing(0, 6, True, "a"), Doing(0, 6, True), False),
        (Doing(0, 6, True), Doing(0, 6, False, "a"), True),
        (Doing(0, 6, False, "a"), Doing(0, 6, False, "b"), True),
        (Doing(0, 6, False, "a"), Doing(0, 7, False, "b"), False),
        (Doing(0, 6, False, "a"), Doing(1, 6, False, "b"), False),
    ],
)
def test_only_what_is_said_of_one_step_of_one_generation_is_compared(one, other, contradicts):
    assert one.contradicts(other) is other.contradicts(one) is contradicts


def test_who_did_not_begin_is_named():
    crew = crew_of(1, startup=0.2)
    crew[0].store.processes = 3
    with pytest.raises(
        jc.DeadlineExceededError, match=r"Workers 1, 2 of 3 did not begin to train within 0.2 s"
    ) as e:
        crew[0].meet()
    assert e.value.ranks == (1, 2)
    ended(crew)


def test_without_a_coordinator_nothing_is_agreed():
    crew = crew_of(2)
    at_once(*(lambda c=c: c.enter(0) for c in crew))
    crew[0].lose_coordinator()
    with pytest.raises(CoordinatorLostError):
        crew[0].gather("compiled", "")
    with pytest.raises(CoordinatorLostError):
        crew[0].decide(0, (0,))
    ended(crew)


def test_a_coordinator_that_does_not_answer_is_lost_and_one_that_answers_late_is_not(monkeypatch):
    monkeypatch.setattr(answers, "ANSWER_SECONDS", 0.4)
    late, goes_on = crew_of(2)
    at_once(*(lambda c=c: c.enter(0) for c in (late, goes_on)))
    stopped = threading.Event()
    for crew, seconds in ((goes_on, 0.1), (late, 20)):
        wait = lambda key, value, seconds=seconds: stopped.wait(seconds)
        monkeypatch.setattr(crew.store, "agree", wait, raising=False)
    goes_on.ask("")
    with pytest.raises(CoordinatorLostError):
        late.ask("")
    stopped.set()
    ended((late, goes_on))
