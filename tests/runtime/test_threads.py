"""A call that blocks is abandoned, and the thread that makes it takes the next one after it."""

import gc
import subprocess
import sys
import threading
from unittest.mock import Mock

import jax
import pytest

from jaxcoll._job import threads as _threads
from jaxcoll._job.threads import Worker, any_blocked, call_with_timeout


def threads_of(name):
    return [thread for thread in threading.enumerate() if thread.name == name]


def ends(name):
    for thread in threads_of(name):
        thread.join(5)
    return not threads_of(name)


def test_worker_keeps_order_until_closed():
    made = []
    worker = Worker("in order")
    tasks = [worker.submit(lambda i=i: made.append(i) or i) for i in range(5)]
    raises = worker.submit(lambda: 1 / 0)
    worker.close()
    assert all(task.wait(5) for task in (*tasks, raises))
    with pytest.raises(ZeroDivisionError):
        raises.result()
    assert [task.result() for task in tasks] == made == [*range(5)]
    assert ends("in order")
    assert not worker.is_alive()


def test_thread_ends_with_its_worker():
    worker = Worker("nobody's")
    assert threads_of("nobody's")
    task = worker.submit(lambda: 1)
    del worker
    assert task.wait(5)
    assert task.result() == 1
    del task
    gc.collect()
    assert ends("nobody's")


@pytest.mark.parametrize("check", ["debug_nans", "debug_infs"])
def test_checks_follow_the_asking_thread(check):
    worker = Worker("checked")
    with getattr(jax, check)(True):
        checked = worker.submit(lambda: getattr(jax.config, f"jax_{check}"))
    plain = worker.submit(lambda: getattr(jax.config, f"jax_{check}"))
    assert checked.wait(5)
    assert plain.wait(5)
    assert (checked.result(), plain.result()) == (True, False)


def test_abandoned_call_delays_the_next():
    release = threading.Event()
    worker = Worker("blocked")
    first = worker.submit(release.wait)
    assert not first.wait(0.01)
    assert not first.is_done()
    first.abandon(KeyError("news"))
    assert first.is_done()
    assert first.wait(0)
    with pytest.raises(KeyError, match="news"):
        first.result()
    assert any_blocked()
    second = worker.submit(lambda: 2)
    assert not second.wait(0.01)
    release.set()
    assert second.wait(5)
    assert second.result() == 2
    worker.close()
    assert ends("blocked")
    assert not any_blocked()


def test_interrupted_wait_abandons_the_call(monkeypatch):
    release = threading.Event()
    task = Worker("interrupted").submit(release.wait)

    monkeypatch.setattr(task, "_running", Mock(**{"acquire.side_effect": KeyboardInterrupt}))
    with pytest.raises(KeyboardInterrupt):
        task.wait()
    assert any_blocked()
    release.set()


def test_timed_call_has_four_ends():
    assert call_with_timeout(lambda: 3, 5) == 3
    with pytest.raises(ZeroDivisionError):
        call_with_timeout(lambda: 1 / 0, 5)
    release = threading.Event()
    with pytest.raises(TimeoutError, match=r"it did not answer within 0\.05 s"):
        call_with_timeout(release.wait, 0.05)

    die = Mock(side_effect=ConnectionError("it is dead"))
    with pytest.raises(ConnectionError, match="it is dead"):
        call_with_timeout(release.wait, 60, die)
    assert len([thread for thread in _threads._abandoned if thread.is_alive()]) == 2
    release.set()


ENDS = """
import time
from jaxcoll._job.threads import Worker

class Large:
    def __del__(self):
        time.sleep(0.3)
        print("freed", flush=True)

task = Worker("ends").submit({call})
{then}
"""


@pytest.mark.parametrize(
    ("call", "then"),
    [
        ("lambda: time.sleep(0.1) or Large()", "task.abandon(KeyError())"),
        ("lambda large=Large(): None", "task.wait()"),
    ],
)
def test_python_ends_after_freeing(call, then):
    code = ENDS.format(call=call, then=then)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (run.returncode, run.stdout, run.stderr) == (0, "freed\n", "")
