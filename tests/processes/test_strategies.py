"""`MultiWorkerMirroredStrategy` over real processes."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from processes import ranks
from processes.uneven_rows import rows_of

from benchmarks.teams import free_port

pytestmark = pytest.mark.processes
FOLDER = Path(__file__).parent


WORKERS, DEVICES = 2, 2
ON_CPUS = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(DEVICES)}


@pytest.fixture(scope="module")
def workers():
    """What two workers found in one world, by the module that says what."""
    command = [sys.executable, FOLDER / "world.py", "held_parts", "uneven_rows", "absent"]
    return ranks.results(command, WORKERS, timeout=240, env=ON_CPUS)


def parts(name):
    """The value of each replica, or of each worker for what is plain, by its kind."""
    n = WORKERS * DEVICES
    dense = [[1.0 * (i + 1), 2.0 * (i + 1)] for i in range(n)]
    rows = [[[1.0 + i] * 2 * (k < 1 + i % 3) or [0.0] * 2 for k in range(4)] for i in range(n)]
    found = {
        "per replica, all": dense,
        "per replica, here": dense,
        "mirrored, all": [[3.0, 6.0]] * n,
        "mirrored, here": [dense[i // DEVICES] for i in range(n)],
        "array": dense[:WORKERS],
        "array on a device": dense[:WORKERS],
        "number": [1.0 + k for k in range(WORKERS)],
        "rows, all": rows,
        "rows, here": rows,
        "rows": rows[:WORKERS],
    }
    return [np.array(part, "f") for part in found[name]]


def expected(entry, name, op):
    """What numpy makes of all parts; text: the error that says why there is nothing."""
    plain, sparse = name in {"array", "array on a device", "number", "rows"}, "rows" in name
    if name == "elsewhere":
        return "got a value over|is a PerReplica over"
    if "gather" in entry:
        if sparse:
            return "NotImplementedError: `gather` expects dense arrays"
        if plain:
            return "got the plain value|is a scalar"
        return np.concatenate(parts(name))
    if entry == "along an axis" and (sparse or name == "number"):
        return "expects dense arrays|is a scalar|whose SUM over"
    # An argument that all replicas share must be the same on all.
    if entry == "run" and (plain or name == "mirrored, here"):
        return "ProgramMismatchError" if name == "rows" else "ReplicaDivergenceError: .* args"
    axis = (0, 1) if entry == "along an axis" else 0
    return (np.sum if op == "sum" else np.mean)(parts(name), axis)


def test_results_are_of_all_replicas(workers):
    """Every entry, every kind of value. `no group` is for the value's own devices."""
    found = [results["held_parts"] for results in workers]
    assert len(found[0]) > 100
    wrong = []
    for case in found[0]:
        entry, name, op = case.split(" | ")
        if entry == "no group" and not name.endswith("all"):
            continue
        want = expected(entry, name, op)
        for worker, got in enumerate(results[case] for results in found):
            if isinstance(want, str):
                held = isinstance(got, str) and re.search(want, got)
            else:
                held = not isinstance(got, str) and np.allclose(got, want, rtol=1e-6)
            if not held:
                wrong.append(f"worker {worker}, {case}: {got}; expected {want}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.tensorflow("H23", "H25", "L37", "L58", "L59", "L61")
def test_workers_get_their_parts():
    workers, devices = WORKERS, DEVICES
    n = workers * devices
    ports = " ".join(str(free_port()) for _ in range(workers))
    command = [sys.executable, FOLDER / "strategy.py"]
    results = ranks.results(command, workers, timeout=240, env={**ON_CPUS, "PORTS": ports})

    uneven = [np.arange(1.0 + i // devices + i % devices) for i in range(n)]
    rows = [np.arange(1.0 + worker) for worker in range(workers)]
    for worker, found in enumerate(results):
        own = range(worker * devices, (worker + 1) * devices)
        assert found["ids"] == list(own), "replicas are counted worker by worker"
        assert found["uneven mean"] == pytest.approx(np.mean(np.concatenate(uneven)))
        assert found["host rows"] == pytest.approx(np.mean(np.concatenate(rows)))
        assert found["uneven gather"] == np.concatenate(uneven).tolist()
        assert f"shape (2, 3) on replica {devices}, (2, 2) on replica 0" in found["refused gather"]
        assert "Use `MultiWorkerMirroredStrategy` instead" in found["refused strategy"]
        assert all("whose devices are cpu:" in words for words in found["refused elsewhere"])
        assert "between the devices of one process; cpu:" in found["refused reduction to all"]
        assert found["local strategy"] == devices
        assert found["broadcast"] == [{"w": [0, 0], "on": True}] * devices, "the first worker's"
        total = n * (n - 1) / 2
        assert found["updated"] == [i + total for i in own]
        assert found["check"] == ["['lying']", "['plain']", "['rows'].tree"]
        assert found["who"] == results[0]["who"]
        assert {name[-10:] for name in found["who"][-1]} == {" process 1"}
        assert found["updated here"] == [[1 + total] * 2] * devices
        assert found["8 bits"] == [
            1.0 + k for k in range(workers) for _ in range(devices * (k + 1))
        ]
        assert "a part is a typed PRNG key. Pass its" in found["refused keys"]
    bits = {b for found in results for b in found["bits"]}
    assert len(bits) == 1, "all replicas have the same parameters"


@pytest.mark.tensorflow("L62")
def test_calls_end_at_their_deadline(workers):
    found, other = (results["absent"] for results in workers)
    for call in ("reduce_to", "reduce", "along an axis", "gather", "run"):
        assert re.search("did not finish within 0.5 s", found[call]), call
        for each in (found, other):
            assert each[f"{call}, afterwards"] == [1.5, 1.5], "the process stays usable"


def test_uneven_rows_reduce_like_numpy(workers):
    """Through functions, datasets and shares; every reduction and every gather."""
    found, *others = (results["uneven_rows"] for results in workers)
    wrong = []
    for case, got in found.items():
        if any(results[case] != got for results in others):
            wrong.append(f"{case}: {[results[case] for results in (found, *others)]}")
        if "|" not in case:
            continue
        kind, seed, call = case.split(" | ")
        op, _, axis = call.partition(" ")
        parts = [rows_of(i, int(seed)) for i in range(WORKERS * DEVICES)]
        if kind == "share":
            parts = [rows_of(i // DEVICES, int(seed)) for i in range(WORKERS * DEVICES)]
        rows = np.concatenate(parts)
        uneven = len({len(part) for part in parts}) > 1
        if axis in ("0", "(0, 1)", "-2") and len(rows):
            axes = {"0": 0, "(0, 1)": (0, 1)}.get(axis)
            want = rows if op == "gather" else getattr(np, op)(rows, axes)
            right = not isinstance(got, str) and np.allclose(got, want, rtol=1e-5)
        else:
            right = isinstance(got, str) or not uneven
        if not right:
            wrong.append(f"{case}: {got}; the rows are {rows.tolist()}")
    assert not wrong, "\n".join(wrong)
    for case in ("other trees", "other axes", "other gathers"):
        assert found[case].startswith("ProgramMismatchError"), case
    assert found["other shapes"] == [1.0] * DEVICES * sum(1 + i % 2 for i in range(WORKERS))
    assert "`Mirrored` expects equal copies" in found["other copies"]
    assert found["afterwards"] == WORKERS
