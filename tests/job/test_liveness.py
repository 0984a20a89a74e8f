"""News of the coordinator of who has ended is heard, and told apart from silence."""

import forks

from jaxcoll._job import liveness


def test_split_lines_are_joined(coordinator):
    assert liveness.list_ended() == {}
    coordinator.sendall(b'{"go": true}\n{"ended": 2}\n{"ended": 1')
    assert liveness.list_ended() == {2: {}}
    coordinator.sendall(b'0, "done": {"0-1": 7}}\n')
    assert liveness.list_ended() == {2: {}, 10: {"0-1": 7}}
    coordinator.sendall(b'{"ended\n{"ended": 0}\n{"ended"')
    coordinator.close()
    assert liveness.list_ended() == liveness.list_ended() == {0: {}, 2: {}, 10: {"0-1": 7}}


def test_forked_child_drops_connection(tmp_path):
    done = forks.with_jaxcoll().run(FORKS, cwd=tmp_path)
    assert done.stdout.split() == ["child", "closed", "parent", "open"]


FORKS = """
import os, socket
from jaxcoll._job import liveness

there, here = socket.socketpair()
connection = liveness.CoordinatorConnection(here.detach())
liveness.use_connection(connection)
child = os.fork()
if child:
    os.waitpid(child, 0)
try:
    os.fstat(connection.fd)
    found = "open"
except OSError:
    found = "closed"
print("parent" if child else "child", found, flush=True)
os._exit(0)
"""


def test_restarted_process_hears_nothing():
    assert liveness.list_ended() == {}
    assert liveness.coordinator_connection() is None
