"""`MultiWorkerMirroredStrategy` over real processes."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxcoll.bench.launch import free_port, launch

pytestmark = pytest.mark.processes
SCRIPT = Path(__file__).with_name("strategy.py")


@pytest.mark.parametrize(("workers", "devices", "by"), [(2, 2, "TF_CONFIG"), (3, 1, "launch")])
def test_every_worker_makes_the_same_calls_and_gets_its_part_of_the_results(workers, devices, by):
    n = workers * devices
    env = {"JAX_NUM_CPU_DEVICES": str(devices), "JAX_PLATFORMS": "cpu"}
    if by == "TF_CONFIG":
        env["PORTS"] = " ".join(str(free_port()) for _ in range(workers))
    ended = launch([sys.executable, str(SCRIPT)], workers, timeout=180, env=env)
    results = []
    for each in ended:
        line = next(x for x in each.log.splitlines() if x.startswith("RESULT "))
        results.append(json.loads(line.removeprefix("RESULT ")))

    uneven = [np.arange(1.0 + i // devices + i % devices) for i in range(n)]
    rows = [np.arange(1.0 + worker) for worker in range(workers)]
    for worker, found in enumerate(results):
        own = range(worker * devices, (worker + 1) * devices)
        assert found["ids"] == list(own), "replicas are counted worker by worker"
        assert found["sum"] == {"x": [n * (n + 1) / 2] * 3, "n": n * (n + 1) // 2}
        assert found["mean of a mirrored"] == 2
        assert found["host sum"] == workers * (workers + 1) / 2, "a plain value is its worker's"
        assert found["host mean"] == {"loss": (workers - 1) / 2}
        assert found["rows sum"] == sum(3 * i + 3 for i in range(n))
        assert found["uneven mean"] == pytest.approx(np.mean(np.concatenate(uneven)))
        assert found["host rows"] == pytest.approx(np.mean(np.concatenate(rows)))
        assert found["gather"] == [[i, 10 * i] for i in range(n)]
        assert found["uneven gather"] == np.concatenate(uneven).tolist()
        assert f"replica {devices} has shape (2, 3), replica 0 (2, 2)" in found["refused gather"]
        assert "copies between the devices of one process" in found["refused destination"]
        assert "`gather` copies between the devices of one process" in found["refused device"]
        assert "`MultiWorkerMirroredStrategy` spans them" in found["refused strategy"]
        assert found["local strategy"] == devices
        assert found["broadcast"] == [{"w": [0, 0], "on": True}] * devices, "the first worker's"
        total = n * (n - 1) / 2
        assert found["reduced to"] == [total] * devices
        assert found["updated"] == [i + total for i in own]
        assert found["check"] == ["['lying']", "['plain']", "['rows'].tree"]
        assert found["who"] == results[0]["who"]
        assert {name[-10:] for name in found["who"][-1]} == {" process 1"}
        assert found["whole group"] == found["by worker"] == total
    bits = {b for found in results for b in found["bits"]}
    assert len(bits) == 1, "all replicas have the same parameters"
