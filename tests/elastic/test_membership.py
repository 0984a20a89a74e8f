"""Who works together: agreed over keys and values alone, by threads in the place of processes."""

import dataclasses
import json
import threading
import time

import pytest
from at_once import at_once, wait_for

import jaxcoll as jc
from jaxcoll._compat.coordination import StoreUnreachableError
from jaxcoll._job import key_value, timing
from jaxcoll._job.key_value import LocalKeys
from jaxcoll._job.threads import Task
from jaxcoll._runtime import peers, watchdog
from jaxcoll._runtime.call import Call
from jaxcoll._runtime.executable import Program
from jaxcoll._runtime.fingerprint import pack_lines
from jaxcoll._runtime.peers import parse_rank
from jaxcoll._runtime.watchdog import Watchdog
from jaxcoll._train.elastic import membership as memberships
from jaxcoll._train.elastic.generation import RegroupError
from jaxcoll._train.elastic.member_group import find_ejected
from jaxcoll._train.elastic.membership import KEPT_STEPS, Membership
from jaxcoll._train.elastic.writers import choose_writers, write_once
from jaxcoll.errors import ProgramMismatchError

MADE = []
"""The members of a test's runs, which end with it."""


@pytest.fixture(autouse=True)
def _hurried(monkeypatch):
    for module in (memberships, key_value, watchdog):
        monkeypatch.setattr(module, "HEARTBEAT_SECONDS", 0.05)
    yield
    while MADE:
        end(MADE.pop())


def end(one):
    one.close()
    one._watchdog.end()


def worker(keys, most=None, startup=5.0):
    MADE.append(Membership(Watchdog(keys), "run", patience=5.0, startup=startup, most=most))
    return MADE[-1]


def members_of_a_run(n, most=None, startup=5.0):
    keys = LocalKeys(processes=n)
    return [worker(dataclasses.replace(keys, process=r), most, startup) for r in range(n)]


def keys_of(membership):
    return membership._keys.keys


def in_thread(call):
    """A thread that makes a call, and where its result will be."""
    found = []
    thread = threading.Thread(target=lambda: found.append(call()), daemon=True)
    thread.start()
    return thread, found


def with_a_spare_taken_in():
    """Three, of whom two work and the second is lost; and what the first and the spare agree on."""
    membership = members_of_a_run(3, most=2)
    spare, found = in_thread(lambda: membership[2].enter(0))
    first = each(membership[:2], lambda c: c.enter(0))
    assert first[0].ranks == (0, 1)
    wait_for(membership[0]._waiting)
    membership[1].close()
    second = membership[0].regroup(9, (8, 9))
    spare.join(10)
    assert found == [second]
    return membership, second


def each(members, call):
    """What `call` gives for each, all at once."""
    return at_once(*(lambda one=one: call(one) for one in members))


def working(n):
    """So many members of a run that work together."""
    members = members_of_a_run(n)
    each(members, lambda one: one.enter(0))
    return members


def test_end_is_the_last_record():
    (one,) = members_of_a_run(1)
    store, writing = one._keys, threading.Event()
    write, set_now = one._peers.write_record, store.set

    def set_slowly(key, value):  # a heartbeat is on its way when the worker leaves
        writing.set()
        time.sleep(0.05)
        set_now(key, value)

    store.set = set_slowly
    assert writing.wait(5)
    one.close()
    records = keys_of(one).all("jaxcoll/watch/state")
    assert (json.loads(records["0"])["runs"], records["0"]) == ([], write())
    one._watchdog.end()
    assert json.loads(keys_of(one).try_get("jaxcoll/watch/state/0"))["ended"]


def test_survivors_agree_on_the_rest():
    membership = members_of_a_run(4)
    first = each(membership, lambda c: c.enter(0))
    assert [d.ranks for d in first] == [(0, 1, 2, 3)] * 4
    membership[1].close()
    membership[0].request_regroup("somebody died")
    assert membership[3].woken.wait(5)
    with pytest.raises(RegroupError):
        membership[3].check()
    held = {0: (6, 7), 2: (5, 6), 3: (6, 7)}
    second = at_once(*(lambda r=r: membership[r].regroup(held[r][-1], held[r]) for r in held))
    assert len(set(second)) == 1
    assert (second[0].ranks, second[0].step, second[0].sends_state) == ((0, 2, 3), 6, False)
    assert tuple(map(parse_rank, second[0].lost)) == (1,)
    assert second[0].why == "somebody died"


def test_newcomers_are_given_the_state():
    membership, second = with_a_spare_taken_in()
    assert (second.ranks, second.sends_state, parse_rank(second.source)) == ((0, 2), True, 0)
    membership[2].close()
    third = membership[0].regroup(11, (10, 11))
    assert third.ranks == (0,)
    again = worker(dataclasses.replace(keys_of(membership[0]), process=1), most=2)
    joins, found = in_thread(lambda: again.enter(0))
    wait_for(lambda: membership[0].joins_at(int(time.monotonic() * 1000)))
    fourth = membership[0].regroup(20, (19, 20))
    joins.join(10)
    assert found == [fourth]
    assert (fourth.ranks, fourth.step, fourth.sends_state) == ((0, 1), 20, True)
    assert fourth.why == "a worker joined"
    each((membership[0], again), lambda c: c.gather("finished", ""))
    membership[0].finish()
    late = worker(dataclasses.replace(keys_of(membership[0]), process=2), most=2)
    assert late.enter(0) is None


def test_stateless_newcomer_moves_nobody_back():
    membership, _ = with_a_spare_taken_in()
    membership[0].request_regroup("it failed before the state was given")
    third = at_once(
        lambda: membership[0].regroup(9, (8, 9)), lambda: membership[2].regroup(0, (0,))
    )
    assert len(set(third)) == 1
    assert (third[0].ranks, third[0].step, third[0].sends_state) == ((0, 2), 9, True)


def test_ended_workers_are_not_awaited():
    first = working(2)
    each(first, end)
    again = worker(dataclasses.replace(keys_of(first[0]), process=1))
    words = r"\(workers 0, 1\), so worker 1 has no run to join"
    with pytest.raises(jc.errors.PeerLostError, match=words):
        again.enter(0)


@pytest.mark.slow
def test_newcomer_is_not_its_predecessor(monkeypatch):
    monkeypatch.setattr(watchdog, "HEARTBEAT_SECONDS", 60)  # it comes between two heartbeats
    members = members_of_a_run(2)
    for one in members:
        one._peers.ended = {1: {}}
    each(members, lambda one: one.enter(0))
    assert [one._peers.ended for one in members] == [{}, {}]


def test_silent_spare_is_left_out(monkeypatch):
    monkeypatch.setattr(peers, "coordinator_connection", lambda: "would show ends")
    membership = members_of_a_run(3, most=2)
    spare, _ = in_thread(lambda: membership[2].enter(0))
    each(membership[:2], lambda c: c.enter(0))
    wait_for(membership[0]._waiting)
    says, membership[2]._peers.publish = membership[2]._peers.publish, lambda: None
    time.sleep(2 * timing.HEARTBEAT_SECONDS)
    membership[0]._peers._seen.clear()  # it has not seen the spare's heart beat
    membership[1].close()
    assert membership[0].regroup(9, (8, 9)).ranks == (0,)
    membership[2]._peers.publish = says
    assert membership[0].joins_at(10)
    time.sleep(0.2)
    assert membership[0].regroup(10, (9, 10)).ranks == (0, 2)
    spare.join(10)


def test_end_after_gather_loses_none(monkeypatch):
    here, gone = working(2)
    look, looks = here._keys.all, []

    def read(folder):
        found = look(folder)
        if not looks:  # it comes and ends between two looks
            looks.append(keys_of(gone).set(gone._key(0, f"finished/{gone.name}"), json.dumps("")))
            gone.close()
        return found

    monkeypatch.setattr(here._keys, "all", read)
    assert len(here.gather("finished", "")) == 2


def make_call(one, digest, collective):
    """Let a member call a program that waits for the others; return its result or error."""
    program = Program(collective, f"`{digest}`", pack_lines([digest]), digest)
    task, group = Task(one.group.worker), one.group
    group.begin(task)
    one.group.worker.submit(lambda: group.run(Call(dict, (), (), "a call"), program), task)
    assert task.wait(20)
    try:
        return task.result()
    except ProgramMismatchError as error:
        one.mismatch = str(error)
        return error


def regroup_for_programs(members, finished, held):
    """What members agree on, once each has learned of the programs."""
    each(members, lambda one: one.request_regroup("workers have different programs"))
    return each(members, lambda one: one.regroup(finished, held))


def test_program_is_new_to_all():
    membership, meet = working(3), threading.Barrier(3)
    for _ in range(2):
        each(membership, lambda one: make_call(one, "known", meet.wait))
    # Two expect this program, so they are in its collective when the third brings another.
    calls = dict.fromkeys(membership, "known") | {membership[2]: "new"}
    found = each(membership, lambda one: make_call(one, calls[one], meet.wait))
    meet.abort()
    assert [type(error) for error in found] == [ProgramMismatchError] * 3
    assert {"process 0: known", "process 2: new"} <= {*str(found[2]).splitlines()}
    next_ones = regroup_for_programs(membership, 2, (1, 2))
    assert len(set(next_ones)) == 1
    assert next_ones[0].members == ()
    assert all(next_ones[0].ends_for_its_program(one.name) for one in membership)
    assert next_ones[0].mismatch == str(found[0])


def test_newcomers_other_program_ends_alone():
    membership, second = with_a_spare_taken_in()
    staying, newcomer = membership[0], membership[2]
    assert tuple(map(parse_rank, second.joined)) == (2,)
    digests = {staying: "theirs", newcomer: "other"}
    found = each(digests, lambda one: make_call(one, digests[one], dict))
    assert [type(error) for error in found] == [ProgramMismatchError] * 2
    one, other = regroup_for_programs((staying, newcomer), 9, (8, 9))
    assert one == other
    assert (one.ranks, tuple(map(parse_rank, one.lost))) == ((0,), (2,))
    assert not one.ends_for_its_program(staying.name)
    assert one.ends_for_its_program(newcomer.name)
    assert "process 0: theirs\nprocess 2: other" in one.mismatch
    assert make_call(staying, "theirs", dict) == {}


def test_new_generation_ends_agreements_wait():
    early, other = working(2)
    caller, found = in_thread(lambda: at_once(lambda: make_call(early, "a", dict)))
    wait_for(lambda: early.group.position)
    other.request_regroup("somebody died")
    caller.join(10)
    assert [type(error) for (error,) in found] == [RegroupError]
    wait_for(lambda: not early.group.worker.is_alive())  # its thread waits no more


@pytest.mark.parametrize(
    ("digests", "joined", "end"),
    [
        ({"0": "a", "1": "a", "2": "a"}, ("2",), ()),
        ({"0": "a", "1": "a", "2": "b"}, ("2",), ("2",)),
        ({"0": "b", "1": "a", "2": "a"}, ("0",), ("0",)),
        ({"0": "b", "1": "a", "2": "b"}, ("0", "2"), ("0", "2")),
        ({"0": "a", "2": "b"}, ("0", "2"), ()),  # what 1 does is not known
        ({"0": "a", "1": "b", "2": "b"}, ("2",), ("0", "1", "2")),
        ({"0": "a", "1": "b", "2": "b"}, (), ("0", "1", "2")),
    ],
)
def test_earlier_members_are_right(digests, joined, end):
    programs = {name: (9, digest) for name, digest in digests.items()}
    assert find_ejected(("0", "1", "2"), joined, programs) == end
    apart = {name: (int(name), digest) for name, digest in digests.items()}
    assert find_ejected(("0", "1", "2"), joined, apart) == ()


def writes(membership, having, fails):
    """Outcomes, by worker, where some have a file and some of these cannot write; and who wrote."""
    wrote = []

    def write(one):
        if parse_rank(one.name) in fails:
            raise OSError(28, "No space left on device")
        wrote.append(parse_rank(one.name))

    def last(one):
        every = 10 + parse_rank(one.name) if parse_rank(one.name) in having else 0
        writers, steps = choose_writers(one.generation.members, one.gather("every", every))
        return *write_once(one, writers, lambda: write(one)), steps

    return each(membership, last), wrote


@pytest.mark.parametrize(
    ("having", "fails"),
    [("012", ""), ("012", "0"), ("012", "01"), ("012", "1"), ("012", "012"), ("1", ""), ("12", ""), ("", "")],
)  # fmt: skip
def test_first_able_writer_writes(having, fails):
    having, fails = ([int(rank) for rank in ranks] for ranks in (having, fails))
    found, wrote = writes(working(3), having, fails)
    able = [rank for rank in having if rank not in fails]
    assert wrote == able[:1]
    for rank, (name, failure, steps) in enumerate(found):
        assert ([parse_rank(name)] if name else []) == wrote
        tried = rank in having and not (wrote and rank > wrote[0])
        assert isinstance(failure, OSError) == (tried and rank in fails)
        assert steps == (10 + having[0] if having else 0)


def test_next_writer_follows_dead_one():
    membership = working(3)
    membership[0].close()  # before it had written
    found, wrote = writes(membership[1:], (0, 1, 2), ())
    assert ([type(error) for error in found], wrote) == ([RegroupError] * 2, [])
    each(membership[1:], lambda c: c.regroup(9, (8, 9)))
    found, wrote = writes(membership[1:], (0, 1, 2), ())
    assert ([parse_rank(name) for name, *_ in found], wrote) == ([1, 1], [1])


def test_agreements_on_joins_are_bounded():
    one, other = working(2)
    for step in range(0, 30 * KEPT_STEPS, 10):
        assert not one.joins_at(step)
        assert not other.joins_at(step)
    assert len(keys_of(one).all("run/0/step")) == KEPT_STEPS


def test_late_starters_are_named():
    membership = members_of_a_run(1, startup=0.2)
    membership[0]._keys.processes = 3
    words = "Workers 1, 2 of 3 did not start training within 0.2 s"
    with pytest.raises(jc.errors.DeadlineExceededError, match=words) as e:
        membership[0].meet()
    assert e.value.ranks == (1, 2)


def test_silent_coordinator_is_lost(monkeypatch):
    monkeypatch.setattr(memberships, "COORDINATOR_REPLY_SECONDS", 1.0)
    late, goes_on = working(2)
    stopped = threading.Event()
    for membership, seconds in ((goes_on, 0.1), (late, 20)):
        wait = lambda key, value, seconds=seconds: stopped.wait(seconds) or value
        monkeypatch.setattr(keys_of(membership), "agree", wait)
    goes_on.request_regroup("")
    with pytest.raises(StoreUnreachableError):
        late.request_regroup("")
    stopped.set()
