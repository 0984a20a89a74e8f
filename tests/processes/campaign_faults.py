"""The rows of the campaign: what is done to processes, and what must become of the others."""

import dataclasses

TIMEOUT = 3.0
"""Seconds for a call or a step, unless a row says otherwise."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """A row.

    Attributes:
      name: in the table.
      processes: how many there are.
      faults: (rank, when, what) for each that is hit.
      want: what becomes of the others: "trained", or the name of an error.
      words: what the error's message, or the reason of a change, must hold.
      job: which of campaign_jobs.py.
      within: seconds, from the fault or from the deadline that finds it, to when all others know.
      others: rank: what becomes of it, where that is not `want`.
      culprits: who is to be named; None: all who are hit.
      spec: what the job is told beside.
      acts: (seconds after the fault or, without one, after training began, signal or "again",
        rank or "C", the coordinator).
    """

    name: str
    processes: int
    faults: tuple = ()
    want: str = "trained"
    words: tuple = ()
    job: str = "elastic"
    within: float = 1.0
    others: dict = dataclasses.field(default_factory=dict)
    culprits: tuple | None = None
    spec: dict = dataclasses.field(default_factory=dict)
    acts: tuple = ()

    @property
    def hit(self):
        """Ranks that are not to live on as the others do."""
        return {rank for rank, _, what in self.faults if what != "hold"}

    @property
    def named(self):
        """Ranks that errors and changes are to name."""
        return sorted(self.hit if self.culprits is None else self.culprits)

    @property
    def wants(self):
        """What is to become of each process of which something is known."""
        whole = {r: self.want for r in range(self.processes) if r not in self.hit}
        return whole | self.others

    @property
    def stuck(self):
        """Ranks that do not end by themselves."""
        continued = {who for _, what, who in self.acts if what == "SIGCONT"}
        return {r for r, _, what in self.faults if what in ("sleep", "SIGSTOP")} - continued


DEADLINE, LOST, MISMATCH = "DeadlineExceededError", "PeerLostError", "ProgramMismatchError"
DIVERGED = "ReplicaDivergenceError"
LATE = f"did not finish within {TIMEOUT:g} s"
FLAGS = {"flags": {1: "--xla_cpu_max_isa=AVX"}}
PATIENT = {"timeout_seconds": 20.0, "startup_timeout_seconds": 30.0}
FILE = {"settings": {"checkpoint": "last.npz"}}
# Where the one that came waits: the collective, and the pack that it carries.
WAITS = (LATE, "Process 1 of 2 did not arrive", "The first of ", "/pack0 has (the value)")


def _calls(name, want, *faults, processes=2, **more):
    return Fault(name, processes, faults, want, job="calls", **more)


FAULTS = [
    # Training by `jc.Elastic`.
    Fault("SIGKILL of one of four", 4, ((1, 20, "SIGKILL"),)),
    Fault("SIGKILL of process 0", 3, ((0, 20, "SIGKILL"),)),
    Fault("SIGKILL of two at once, where steps have no deadline", 4, ((0, 20, "SIGKILL"), (2, 20, "SIGKILL")),
          spec={"leaves": 5, "devices": 2, "settings": {"timeout_seconds": None}}),
    Fault("SIGKILL of one, and of another when the rest has regrouped", 4, ((0, 20, "SIGKILL"), (2, "20 of 3", "SIGKILL"))),
    Fault("SIGKILL in the first step", 3, ((1, 0, "SIGKILL"),)),
    Fault("SIGKILL in the last step", 3, ((1, 39, "SIGKILL"),)),
    Fault("SIGKILL while compiling", 3, ((2, "while compiling", "SIGKILL"),)),
    Fault("SIGSTOP", 3, ((1, 20, "SIGSTOP"),), words=(LATE,)),
    Fault("SIGSTOP, continued later", 3, ((1, 20, "SIGSTOP"),), words=(LATE,),
          acts=((9.0, "SIGCONT", 1),), others={1: LOST}),
    Fault("an interpreter is held for 7 s between steps", 3, ((1, 20, "hold"),), culprits=(), spec={"settings": PATIENT}),
    Fault("a spare steps in", 3, ((1, 20, "SIGKILL"),), spec={"settings": {"max_workers": 2}}),
    Fault("started again and taken in", 3, ((1, 20, "SIGKILL"),), acts=((1.0, "again", 1),),
          others={1: "trained"}, spec={"pause": 0.6, "until": 3, "steps": 100}),
    Fault("started again with another function", 3, ((1, 20, "SIGKILL"),), job="odd", acts=((1.0, "again", 1),),
          others={1: MISMATCH}, culprits=(1, 1), within=6.0, spec={"again with": "function", "pause": 0.2, "steps": 400}),
    Fault("one drifts apart and another dies", 4, ((2, 20, "SIGKILL"),), job="odd", culprits=(1, 2),
          others={1: DIVERGED}, within=3.0, spec={"odd": "drift"}),
    # Beside process 1 stands whoever came first of the others.
    Fault("one worker differs in its rows", 3, (), MISMATCH, job="odd", culprits=(), within=2.0, spec={"odd": "rows"},
          words=("process 1: argument args[1][0]: float32[12,16]", ": argument args[1][0]: float32[24,16]")),
    # The coordinator, and checkpoints.
    Fault("a checkpoint takes longer than a step may", 3, culprits=(),
          spec={"slow": 4.0, "pause": 0.1, "until": 4, "last": 40, "settings": {"checkpoint": "last.npz", "every": 10}}),
    Fault("death of the coordinator", 3, (), LOST, ("The coordinator died",), culprits=(),
          acts=((1.0, "SIGKILL", "C"),), spec={"pause": 0.05, "steps": 4000, **FILE}),
    Fault("SIGSTOP of the coordinator", 3, (), LOST, ("The coordinator died",), culprits=(),
          within=TIMEOUT + 1, acts=((1.0, "SIGSTOP", "C"),), spec={"pause": 0.05, "steps": 4000, **FILE}),
    Fault("SIGSTOP of the coordinator, continued", 3, culprits=(),
          acts=((1.0, "SIGSTOP", "C"), (3.0, "SIGCONT", "C")), spec={"pause": 0.1}),
    Fault("SIGKILL of the one that writes a checkpoint", 3, ((0, "while writing 20", "SIGKILL"),),
          spec={"good": 10, "settings": {"checkpoint": "last.npz", "every": 10}}),
    Fault("SIGKILL where only one has a checkpoint", 3, ((2, 20, "SIGKILL"),),
          spec={"last": 40, "without a file": (0, 2), "settings": {"checkpoint": "last.npz", "every": 10}}),
    Fault("SIGKILL of the one that writes the last checkpoint", 3, ((0, "while writing 40", "SIGKILL"),),
          spec={"last": 40, "settings": {"checkpoint": "last.npz", "every": 10}}),
    Fault("SIGSTOP of the one that writes a checkpoint, continued later", 3, ((0, "while writing 20", "SIGSTOP"),),
          words=(LATE,), acts=((6.0, "SIGCONT", 0),), others={0: LOST},
          spec={"last": 40, "settings": {"checkpoint": "last.npz", "every": 10}}),
    # Starting up.
    Fault("SIGKILL before the meeting", 2, ((1, "before the meeting", "SIGKILL"),), DEADLINE,
          ("process 1 of 2 did not arrive within",), spec={"arrival": 4}),
    Fault("SIGKILL while connecting", 3, ((1, "while connecting", "SIGKILL"),), LOST,
          ("Process 1 ended during startup",), spec={"arrival": 20}),
    Fault("SIGKILL while devices are exchanged", 3, ((1, "while exchanging", "SIGKILL"),), "RuntimeError",
          ("Process 1 ended during startup",), job="calls", culprits=(), within=2.0, spec={"arrival": 20}),
    Fault("SIGKILL before training", 2, ((1, "before training", "SIGKILL"),), LOST, ("Process 1 ended during startup",), within=2.0),
    # Calls of `jc.data_parallel` steps.
    _calls("a step: asleep", DEADLINE, (1, 6, "sleep"), words=WAITS),
    _calls("a step without a deadline: SIGKILL", LOST, (1, 6, "SIGKILL"), words=("process 1 has died",),
           spec={"timeout": 0}, processes=4),
    _calls("a step: SIGKILL before the first", LOST, (1, "before the first call", "SIGKILL"),
           words=("process 1 has died",), within=2.0),  # before the call, or while it is agreed upon
    _calls("a step: one process differs in its XLA_FLAGS", MISMATCH, spec=FLAGS, words=("process 1: XLA_FLAGS --xla_cpu_max_isa=AVX",)),
    _calls("a step: asleep while the coordinator is stopped", DEADLINE, (1, 6, "sleep"), culprits=(),
           words=(LATE, "It is not known who did not arrive"), acts=((0.0, "SIGSTOP", "C"),), within=2.0),
]  # fmt: skip
