"""Processes of a launch: what they print arrives, all of them end, and nobody else does."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import forks
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxcoll._job.launch import subprocesses
from jaxcoll._job.launch.subprocesses import killed_on_exit, signal_name
from jaxcoll._job.launch.supervisor import _Reader

STREAMS = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE}


@pytest.mark.parametrize("end", ["exit 0", "exit 3", "kill -9 $$", "exec sleep 600"])
def test_grandchildren_end_with_the_block(end):
    with killed_on_exit() as running:
        process = running.start(["sh", "-c", f"sleep 600 & echo $!; {end}"], {}, **STREAMS)
        child = int(process.stdout.readline())
        if "sleep" not in end:
            process.wait()
        assert Path(f"/proc/{child}").exists()
    assert forks.gone([child])
    process.stdout.close()


def test_process_outside_group_ends_too():
    leaves = "import os, time; os.setsid(); print(flush=True); time.sleep(600)"
    with killed_on_exit() as running:
        process = running.start([sys.executable, "-c", leaves], {}, **STREAMS)
        process.stdout.readline()
    assert process.returncode == -signal.SIGKILL
    process.stdout.close()


# In a PID namespace of its own, where it may choose the next process's number.
STRANGER = """
import os, runpy, signal, subprocess, sys, time
killed_on_exit = runpy.run_path(sys.argv[3])["killed_on_exit"]  # without JAX

def stranger_with(number):
    for _ in range(100):  # a thread that begins meanwhile takes the number, and gives it back
        with open("/proc/sys/kernel/ns_last_pid", "w") as file:
            file.write(str(number - 1))
        stranger = subprocess.Popen(["sleep", "600"], start_new_session=True)
        if stranger.pid == number:
            return stranger
        stranger.kill()
        stranger.wait()
    sys.exit("the number is not to be had")

def job():
    with killed_on_exit() as running:
        worker = running.start(["sh", "-c", sys.argv[1]], {})
        worker.wait()
        yield stranger_with(worker.pid)
        running.signal(signal.SIGTERM)

if sys.argv[2] == "ends":
    (stranger,) = job()
else:
    reader, writer = os.pipe()
    launcher = os.fork()
    if not launcher:
        os.write(writer, b"%d" % next(jobs := job()).pid)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(launcher, 0)
    number = int(os.read(reader, 100))
time.sleep(0.3)
if sys.argv[2] == "ends":
    assert stranger.poll() is None, "a stranger was killed"
else:
    assert open(f"/proc/{number}/stat").read().split()[2] == "S", "a stranger was killed"
print("it lives")
"""
UNSHARE = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]


@pytest.mark.parametrize("end", ["exit 0", "kill -9 $$"])
@pytest.mark.parametrize("how", ["ends", "is killed"])
def test_reused_number_is_left_alone(end, how):
    tried = "echo 100 > /proc/sys/kernel/ns_last_pid"
    try:
        can = not subprocess.run([*UNSHARE, "sh", "-c", tried], capture_output=True).returncode
    except FileNotFoundError:
        can = False
    if not can:
        pytest.skip("no PID namespace can be made here")
    done = subprocess.run(
        [*UNSHARE, sys.executable, "-W", "ignore", "-c", STRANGER, end, how, subprocesses.__file__],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.stdout == "it lives\n", done.stderr


def shown(*chunks, pause=0.0):
    """What a reader shows of chunks that are written into its pipe."""
    found, (reader, writer) = [], os.pipe()
    thread = _Reader(os.fdopen(reader, "rb"), found.append)
    for chunk in chunks:
        os.write(writer, chunk.encode())
        time.sleep(pause)
    os.close(writer)
    thread.join(20)
    return found


@settings(max_examples=50)
@given(st.lists(st.text("ab é\n\r", max_size=5), max_size=8), st.booleans())
def test_output_is_cut_between_lines(chunks, slowly):
    text, lines = "".join(chunks), shown(*chunks, pause=0.0005 * slowly)
    text += "" if not text or text.endswith(("\n", "\r")) else "\n"
    assert "".join(lines) == text
    assert lines == text.splitlines(keepends=True) or "\r\n" in text
    assert all(line.endswith(("\n", "\r")) for line in lines)


def test_gloos_lines_are_dropped():
    ends = " peer ranks. Expected number of connected peer ranks is : 5\n"
    connected = [f"{before} is connected to 5" for before in ("[Gloo] Rank 0", "", "4")]
    assert shown(*(f"{x}{ends}" for x in (*connected, "", "5", "mine: 5"))) == [f"mine: 5{ends}"]
    two = f"{connected[0]}{ends[:-2]}{connected[0]}{ends}"  # two threads print at once
    for rest in ("5\n", "\n"):
        assert shown("5\n", two, rest, rest) == ["5\n", rest], "of two lines, one end is left"
    assert shown(two, "mine\n", "5\n") == ["mine\n", "5\n"]


def test_signals_have_names():
    names = [signal_name(number) for number in range(1, 65)]
    assert len(set(names)) == 64
    assert signal_name(9) == "SIGKILL"
