"""A rank of no library at all, run as `python fake_rank.py FOLDER`; what it does is in its names."""

import os
import signal
import sys
import time

sys.path.append(sys.argv[1])
from ranks.rank import Rank, serve


class FakeRank(Rank):
    clock = 0.0

    def world(self):
        if "FAIL" in os.environ:
            raise OSError("no such world\nwith details")
        return {"devices": 2, "processes": 2, "device": "cpu", "library": "fake 1"}

    def prepare(self, leaves, reduce_op):
        print("noise on standard output")

    def compile(self, name):
        return None if "theirs" in name else 0.5

    def describe(self, name):
        return {"error": 0.25 * int(os.environ["RANK"])}

    def barrier(self):
        pass

    def call(self, name):
        with open(os.environ["JOURNAL"], "a") as journal:
            print(name, file=journal)
        if "stuck" in name or ("killed" in name and os.environ["RANK"] == "0"):
            time.sleep(60)
        if "killed" in name:
            os.kill(os.getpid(), signal.SIGKILL)
        if "raises" in name:
            raise ValueError("it went wrong")
        if "exits" in name:
            print("these were its last words", file=sys.stderr, flush=True)
            os._exit(3)
        FakeRank.clock += 0.05 if "slow" in name else 0.002


assert "jax" not in sys.modules
time.perf_counter = lambda: FakeRank.clock
serve(FakeRank)
