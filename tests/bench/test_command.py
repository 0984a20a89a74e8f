"""`jaxcoll bench` over worlds that it starts itself."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from processes.ranks import launch

from jaxcoll.bench import all_reduce
from jaxcoll.bench.naming import BASELINE, TWIN
from jaxcoll.bench.targets import from_checkout
from jaxcoll.cli.main import main

OURS = ["auto", "native@all", "ring", "halving-doubling", "shuffle"]


def lines_of(text):
    return [json.loads(line) for line in text.splitlines()]


def test_one_line_a_result_a_table_and_a_picture(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(all_reduce, "COMPILES", 1)
    tree, picture = tmp_path / "mine.json", tmp_path / "out" / "plot.png"
    tree.write_text('[{"shape": [100]}, {"shape": [3], "dtype": "bfloat16"}]')
    done = main(["bench", "--platform", "auto", "--devices", "3", "--tree", str(tree),
                 "--sizes", "1KiB:2KiB", "--algorithms", "auto,ring@all", "--rounds", "3",
                 "--json", "-", "--plot", str(picture), "--reduce-op", "sum"])  # fmt: skip
    out, err = capsys.readouterr()
    assert done == 0
    lines = lines_of(out)
    names = [BASELINE, TWIN, "auto", "ring@all"]
    assert [(x["workload"], x["algorithm"]) for x in lines] == [
        (workload, name) for workload in ("mine", "1KiB", "2KiB") for name in names
    ]
    for x in lines[:4]:
        assert (x["devices"], x["processes"], x["bytes"], x["leaves"]) == (3, 1, 406, 2)
        assert x["algbw"] == pytest.approx(406 / x["seconds"]["median"] / 1e9)
        assert x["busbw"] == pytest.approx(x["algbw"] * 4 / 3)
        assert x["error"] < 1e-2
        assert x["socket_bytes"] is None, "nothing leaves this process"
    assert [x["operands"] for x in lines[:4]] == [2, 2, 2, 8]
    assert picture.read_bytes().startswith(b"\x89PNG")
    for words in ("mine, 0.0 MB in 2 arrays of float32, bfloat16", TWIN, "ring@all", "build s"):
        assert words in err, "the table goes where the lines do not"
    assert max(map(len, err.splitlines())) <= 120
    assert {p.name for p in tmp_path.rglob("*")} == {"mine.json", "out", "plot.png"}


def a_network_of_its_own():
    """What to put before a command, so that nobody else's bytes are counted; [] where it may not."""
    alone = [
        "unshare",
        "--map-root-user",
        "--net",
        "sh",
        "-c",
        'ip link set lo up && exec "$@"',
        "-",
    ]
    try:
        return (
            alone if subprocess.run([*alone, "true"], capture_output=True).returncode == 0 else []
        )
    except FileNotFoundError:
        return []


@pytest.mark.processes
def test_the_compiled_program_and_the_kernel_count_the_same_bytes(tmp_path):
    processes, file = 3, tmp_path / "lines.json"
    command = [*a_network_of_its_own(), sys.executable, "-m", "jaxcoll", "bench",
               "--processes", str(processes), "--sizes", "6MiB", "--rounds", "6",
               "--json", str(file), "--algorithms", ",".join(OURS)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    lines = lines_of(file.read_text())
    assert [x["algorithm"] for x in lines] == [BASELINE, TWIN, *OURS]
    for x in lines:
        assert (x["processes"], x["devices"]) == (processes, processes)
        assert x["cpu_seconds"] > 0
        assert x["error"] < 1e-6
        if Path("/proc/net/dev").exists():
            assert x["socket_bytes"] == pytest.approx(x["wire_bytes"], rel=0.01), x["algorithm"]


@pytest.fixture
def interruptible():
    """What is started hears an interrupt, also where a shell began the tests in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.processes
@pytest.mark.usefixtures("interruptible")
def test_a_killed_rank_and_an_interrupt_leave_nothing_behind(tmp_path):
    command = [sys.executable, "-m", "jaxcoll", "bench", "--processes", "2", "--tree", "200x1KiB",
               "--rounds", "100000", "--json", str(tmp_path / "lines.json")]  # fmt: skip

    def ended(end):
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as started:
            try:
                # Before the ranks, the coordinator and the watch are started.
                ranks = children(started.pid, 4)[2:]
                time.sleep(4)  # into the meeting, or a compilation, or a round
                assert started.poll() is None
                if end == "kill":
                    os.kill(ranks[1], signal.SIGKILL)
                else:
                    started.send_signal(signal.SIGINT)
                _, errors = started.communicate(timeout=60)
            finally:
                started.kill()
        for rank in ranks:
            with pytest.raises(ProcessLookupError):
                os.kill(rank, 0)
        return started.returncode, errors

    with ThreadPoolExecutor() as both:
        killed, interrupted = both.map(ended, ("kill", "interrupt"))
    words = r"jaxcoll bench: jax: process 1 of 2 was killed by SIGKILL.*\n"
    assert killed[0] == 2
    assert re.fullmatch(words, killed[1])
    assert interrupted == (130, "jaxcoll bench: interrupted; nothing was written.\n")
    assert list(tmp_path.iterdir()) == []


def children(parent, count):
    """Process ids of a process's children, once there are `count`, in the order of their start."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        listed = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(parent)], capture_output=True, text=True
        )
        if len(found := [int(x) for x in listed.stdout.split()]) >= count:
            return sorted(found)
        time.sleep(0.05)
    raise AssertionError(f"{parent} has no {count} children")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--tree", "vgg"], "no tree 'vgg': choose resnet50"),
        (["--algorithms", "magic"], "no algorithm 'magic': choose per-leaf, auto"),
        (["--platform", "auto", "--sizes", "1KiB", "--algorithms", "ring/ring"], "needs a tuple of 2 axes"),
        (["--sizes", "2KiB:1KiB"], "--sizes: expected SIZE"),
        (["--processes", "1"], "--processes must be at least 2; got 1"),
        (["--processes", "2", "--platform", "gpu"], "--processes starts processes of CPU devices"),
        (["--processes", "2", "--devices", "0"], "--devices must be at least 1; got 0"),
        (["--devices", "0"], "--devices must be at least 1; got 0"),
        (["--rounds", "0"], "--rounds must be at least 1; got 0"),
        (["--against", "torch"], "--against needs --processes N"),
        (["--against", "horovod"], "--against: no library 'horovod'; choose torch, tensorflow"),
        (["--processes", "2", "--devices", "2", "--against", "torch"], "leave --devices out"),
        (["--json", "/proc/no/such.json"], "--json: cannot write /proc/no/such.json"),
        (["--json", "/"], "--json: cannot write / (it is a folder)"),
        (["--rate", "fast"], "expected a rate such as 200mbit or 1gbit, or 'none'; got 'fast'"),
        (["--rate", "1gbit", "--hosts", "1"], "expected 2 to 64 hosts; got 1"),
        (["--rate", "1gbit", "--per-host", "0"], "--per-host must be at least 1; got 0"),
        (["--rate", "1gbit", "--processes", "2"], "leave --processes, --platform and --against out"),
        (["--hosts", "2"], "--hosts and --per-host need --rate"),
        (["--overlap", "0"], "--overlap must be at least 1 program; got 0"),
        (["--overlap", "2", "--sizes", "1KiB"], "leave --sizes out"),
        (["--overlap", "2", "--plot", "a.png"], "leave --plot out"),
        (["--regret", "--tree", "one-big"], "--regret chooses its own trees and worlds: leave --tree"),
        (["--regret", "--rate", "1gbit"], "--regret chooses its own trees and worlds: leave --rate"),
        (["--regret", "--cases", "0"], "--cases must be at least 1; got 0"),
        (["--plot", "plot.pdf"], "--plot: expected a name that ends in .png; got plot.pdf"),
    ],
)  # fmt: skip
def test_bad_flags_are_one_line_and_status_2(flags, words, capsys):
    assert main(["bench", *flags]) == 2
    shown, printed = capsys.readouterr()
    assert shown == ""
    assert printed.startswith("jaxcoll bench: ")
    assert words in printed
    assert len(printed.splitlines()) == 1


def test_where_there_can_be_no_network_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr("jaxcoll.bench.lab.shutil.which", lambda tool: None)
    assert main(["bench", "--rate", "1gbit"]) == 2
    needed = "a network with a rate needs `ip`, `tc`, `nsenter`, `unshare` (iproute2, util-linux)"
    assert capsys.readouterr().err.startswith(f"jaxcoll bench: {needed}")


def test_cases_whose_regret_is_written_are_not_measured_again(tmp_path, capsys):
    regret = from_checkout("--regret: it is", "regret")
    seconds = {regret.AUTO: (1.5, 1.5), regret.TWIN: (1.5, 1.5), "native@all": (1.0, 1.0)}
    cases = regret.cases(3, seed=7)
    known = [json.dumps(regret.Regret(case, seconds).to_dict()) for case in cases]
    file = tmp_path / "regret.jsonl"
    file.write_text("".join(f"{line}\n" for line in known))
    assert main(["bench", "--regret", "--cases", "2", "--seed", "7", "--json", str(file)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "2 cases: the automatic choice takes 1.500 times as long as the best by hand" in shown
    assert file.read_text().splitlines() == known


def test_the_others_take_one_dtype_only(tmp_path, capsys):
    tree = tmp_path / "mixed.json"
    tree.write_text('[{"shape": [1]}, {"shape": [1], "dtype": "int32"}]')
    assert main(["bench", "--processes", "2", "--against", "torch", "--tree", str(tree)]) == 2
    assert "the others take trees of one dtype only" in capsys.readouterr().err


@pytest.mark.processes
def test_inside_a_job_that_somebody_launched_one_process_prints(tmp_path):
    file = tmp_path / "lines.json"
    command = [sys.executable, "-m", "jaxcoll", "bench", "--sizes", "4KiB", "--rounds", "2",
               "--algorithms", "ring/halving-doubling", "--json", str(file)]  # fmt: skip
    first, second = launch(command, 2, timeout=120, env={"JAX_NUM_CPU_DEVICES": "2"})
    assert "2 processes × 2 cpu devices" in first
    assert [x for x in second.splitlines() if "[Gloo]" not in x] == []
    lines = lines_of(file.read_text())
    assert [x["algorithm"] for x in lines] == [BASELINE, TWIN, "ring/halving-doubling"]
    assert {(x["devices"], x["processes"], x["socket_bytes"]) for x in lines} == {(4, 2, None)}
    assert max(x["error"] for x in lines) < 1e-6
