"""Processes out of step, late, stopped and dead: each ends in an error that names what is wrong."""

import json
import re
import sys
from pathlib import Path

import pytest
from processes.ranks import launch

pytestmark = pytest.mark.processes
SCRIPT = Path(__file__).with_name("faults.py")


def faulty(what, processes, ends=None):
    """Return, for each part, the faults that each process reported."""
    logs = launch([sys.executable, SCRIPT, *what.split()], processes, timeout=200, ends=ends)
    said = [[json.loads(x[6:]) for x in t.splitlines() if x.startswith("FAULT ")] for t in logs]
    return {
        part: [{x["fault"]: x for x in reversed(one) if x["part"] == part} for one in said]
        for part in what.split()
    }


@pytest.fixture(scope="module")
def pair():
    """One world of two processes for all faults after which both go on; the last is out of step."""
    return faulty("late other_meaning out_of_step", 2)


@pytest.fixture(scope="module")
def four():
    """Likewise of four, of which two end."""
    return faulty("departs losses", 4, ends=(0, 1))


def test_unsteady_processes_go_on(pair):
    both = pair["out_of_step"]
    differences = {
        "shape": r"process 0: argument args[0]: float32[2,5]\nprocess 1: argument args[0]: float32[2,6]",
        "dtype": r"args[0]: float32[2,4]\nprocess 1: argument args[0]: int32[2,4]",
        "tree": r"process 0: argument args[0]['a']: float32[2,4]\nprocess 1: argument args[0]['b']",
        "order in a tree": r"args[0]['a']: float32[2,2]\nprocess 1: argument args[0]['a']: float32[2,3]",
        "op": r"process 0: program `total`\nprocess 1: program `average`",
        "options": r"options CommunicationOptions()\nprocess 1: options CommunicationOptions(algorithm='ring')",
        "swapped first": r"process 0: program `total`\nprocess 1: program `double`",
        "swapped second": r"process 0: program `double`\nprocess 1: program `total`",
        "cross-device op": r"(<ReduceOp.SUM: 'SUM'>",
    }
    for result in both:
        for fault, difference in differences.items():
            assert result[fault]["error"] == "ProgramMismatchError", result[fault]
            message = result[fault]["message"]
            assert "nothing was run" in message
            assert difference.replace(r"\n", "\n") in message, message
        for fault in ("none", "afterwards"):
            assert result[fault].get("sum") == 2, result[fault]
        recompiled = result["one recompiles"]
        assert recompiled["error"] == "ProgramMismatchError"
        difference = "0: argument args[0]: float32[2,4]\nprocess 1: argument args[0]: float32[2,11]"
        assert difference in recompiled["message"]


def test_lookalike_calls_are_refused(pair):
    both = pair["other_meaning"]
    for result in both:
        names = [name for name in result if not name.startswith("after ")]
        assert len(names) == 16
        for name in names:
            assert result[name].get("error") == "ProgramMismatchError", (name, result[name])
            assert "nothing was run" in result[name]["message"]
            assert "(no difference)" not in result[name]["message"]
            assert result[f"after {name}"].get("sum") == 2, result[f"after {name}"]
        assert re.search(
            r"process 0: line \d+ of the program: .* = stablehlo.sine .*\n"
            r"process 1: line \d+ of the program: .* = stablehlo.exponential ",
            result["code"]["message"],
        )


def test_departure_from_order_is_stopped(four):
    for rank, result in enumerate(four["departs"]):
        call = 1004 if rank % 2 else 14
        assert result["departs"]["sum"] == 2  # the first of the calls
        assert result["afterwards"]["error"] == "ProgramMismatchError"
        assert (
            f"run different programs as call {call}; process {rank % 2} is already running its "
            "own. The first difference:"
        ) in result["afterwards"]["message"]
        assert "program `total`" in result["afterwards"]["message"]
        assert "program `double`" in result["afterwards"]["message"]


@pytest.mark.tensorflow("F25", "F26", "F28", "G4", "G29")
def test_late_process_collective_are_named(pair):
    first, second = pair["late"]
    assert second["late"]["sum"] == first["afterwards"]["sum"] == 2
    late = first["late"]
    # It is told while the late one still waits for that: it comes only then.
    assert (late["error"], late["ranks"]) == ("DeadlineExceededError", [1])
    assert re.search(r"not been in any call for \d+\.\d s, since call 1", late["message"])
    for words in (
        "Call 1 of `total` did not finish within 1.5 s. Process 1 of 2 did not arrive",
        "in `total` of float32[2,4] is ",
        "/pack0 has (the value)",
    ):
        assert words in late["message"], late["message"]


@pytest.mark.tensorflow("K23")
def test_survivors_name_dead_go_on(four):
    result = four["losses"]
    for rank in (0, 1, 3):
        for fault in ("killed", "again"):
            assert result[rank][fault]["error"] == "PeerLostError", result[rank][fault]
            assert result[rank][fault]["ranks"] == [2]
            assert (
                "process 2 has died, or was cut off: its connection"
                in result[rank][fault]["message"]
            )
        assert result[rank]["three"]["sum"] == 3
    for rank in (0, 1):
        assert result[rank]["stopped"]["error"] == "DeadlineExceededError", result[rank]["stopped"]
        assert result[rank]["stopped"]["ranks"] == [3]
        assert result[rank]["two"]["sum"] == 2


def test_finished_process_may_end(four):
    first, second, *_ = four["losses"]
    assert first["done"]["sum"] == second["done"]["sum"] == 2
    assert first["done"]["seconds"] > second["done"]["seconds"] + 1.4  # more than two beats
    after = first["ended"]
    assert (after["error"], after["ranks"]) == ("PeerLostError", [1])
    assert after["message"].startswith(
        "Call 4 among 2 processes was not started: process 1 has ended"
    )
