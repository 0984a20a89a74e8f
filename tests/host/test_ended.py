"""What the coordinator tells of who has ended is heard, and told apart from silence."""

import socket
import subprocess
import sys

import pytest

from jaxcoll._host import beats, ended
from jaxcoll._host.beats import Beats


@pytest.fixture
def coordinator():
    here, there = socket.socketpair()
    line = ended.Line(here.detach())
    ended.follow(line)
    yield there
    ended.follow(None)
    line.close()
    there.close()


def test_lines_are_heard_whole_however_they_arrive(coordinator):
    assert ended.ended() == frozenset()
    coordinator.sendall(b'{"go": true}\n{"ended": 2, "after": 1.5}\n{"ended": 1')
    assert ended.ended() == {2}
    coordinator.sendall(b'0, "after": 2.5}\n')
    assert ended.ended() == {2, 10}
    coordinator.sendall(b'{"ended": 0, "after": 3.0}\n{"ended"')
    coordinator.close()
    assert ended.ended() == ended.ended() == {0, 2, 10}


def test_a_forked_child_does_not_keep_the_connection_of_its_parent():
    done = subprocess.run(
        [sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["child", "closed", "parent", "open"]


FORKS = """
import os, socket
from jaxcoll._host import ended

there, here = socket.socketpair()
line = ended.Line(here.detach())
ended.follow(line)
child = os.fork()
if child:
    os.waitpid(child, 0)
try:
    os.fstat(line.fd)
    found = "open"
except OSError:
    found = "closed"
print("parent" if child else "child", found, flush=True)
os._exit(0)
"""


def test_who_was_not_told_of_anybody_knows_of_nobody():
    assert ended.ended() == frozenset()


def test_a_member_that_has_ended_is_silent_and_its_successor_is_not(coordinator):
    seen = Beats()
    written = {name: beats.beat(1, beats.Doing(0, 1)) for name in ("1.old", "2.x")}
    seen.observe(written)
    assert seen.bury(("1.old", "2.x")) == []
    coordinator.sendall(b'{"ended": 1, "after": 1.5}\n')
    assert seen.bury(("1.old", "2.x")) == ["1.old"]
    seen.observe(written | {"1.new": beats.beat(1, beats.Doing(0, -1))})
    assert [seen.is_silent(name) for name in ("1.old", "1.new", "2.x")] == [True, False, False]
    assert seen.bury(("1.new", "2.x")) == []
    assert set(seen.doing(("1.old", "1.new"))) == {"1.new"}


def test_who_ended_before_is_not_mistaken_for_one_with_its_number(coordinator):
    coordinator.sendall(b'{"ended": 1, "after": 1.5}\n')
    assert Beats().bury(("1.new",)) == []
