"""Folders of Unix sockets: short paths, and nothing that killed processes leave for good."""

import os
import subprocess
import sys
import tempfile

import pytest

from jaxcoll._cluster.socket_folder import make_socket_folder

OWNER = """
import sys
from jaxcoll._cluster.socket_folder import make_socket_folder
print(make_socket_folder("keys"), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def home(monkeypatch):
    path = tempfile.mkdtemp(dir="/tmp")
    monkeypatch.setenv("TMPDIR", path)
    monkeypatch.setattr(tempfile, "tempdir", path)
    return path


@pytest.mark.slow
def test_the_folder_of_a_killed_process_is_removed_by_the_next_and_that_of_a_live_one_stays(home):
    owners = [
        subprocess.Popen(
            [sys.executable, "-c", OWNER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ,
        )
        for _ in range(2)
    ]
    killed, live = (owner.stdout.readline().strip() for owner in owners)
    other = os.path.join(home, "jaxcoll-of-somebody")
    os.mkdir(other)
    own = make_socket_folder("keys")
    try:
        assert all(map(os.path.isdir, (killed, live, own)))
        owners[0].kill()
        owners[0].wait()
        again = make_socket_folder("keys")
        assert [os.path.isdir(f) for f in (killed, live, own, again, other)] == [False] + [True] * 4
    finally:
        for owner in owners:
            owner.kill()
            owner.communicate()
