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
        return {rank for rank, _, what in self.faults if what not in ("full disk", "hold")}

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
WAITS = (LATE, "Process 1 of 2 did not arrive", "Collective 1 of ", "/pack0 has (the value)")


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
    Fault("exit without a word", 3, ((1, 20, "exit"),)),
    Fault("an exception in the batch function", 3, ((1, 20, "raise"),), others={1: "KeyError"}, within=2.0),
    Fault("SIGSTOP", 3, ((1, 20, "SIGSTOP"),), words=(LATE,)),
    Fault("SIGSTOP, continued later", 3, ((1, 20, "SIGSTOP"),), words=(LATE,),
          acts=((9.0, "SIGCONT", 1),), others={1: LOST}),
    Fault("SIGSTOP, continued when all is over", 3, ((1, 20, "SIGSTOP"),), words=(LATE,),
          acts=((9.0, "SIGKILL", "C"), (10.0, "SIGCONT", 1)), others={1: LOST},
          spec={"last": 40, "settings": {"checkpoint": "last.npz", "every": 10}}),
    Fault("SIGSTOP of one and SIGKILL of another", 4, ((1, 20, "SIGSTOP"), (2, 20, "SIGKILL"))),
    *(
        Fault(f"an interpreter is held for 7 s {when}", 3, ((1, at, "hold"),), culprits=(), spec={"settings": PATIENT})
        for when, at in {"while compiling": "while compiling", "between steps": 20}.items()
    ),
    Fault("an interpreter is held for 7 s, and SIGKILL of another", 4, ((1, 20, "hold"), (2, 20, "SIGKILL")),
          within=8.0, spec={"settings": PATIENT}),
    Fault("too few are left", 3, ((1, 20, "SIGKILL"),), LOST, ("`min_workers` is 3",),
          spec={"settings": {"min_workers": 3, "checkpoint": "last.npz"}}),
    Fault("a spare steps in", 3, ((1, 20, "SIGKILL"),), spec={"settings": {"max_workers": 2}}),
    Fault("started again and taken in", 3, ((1, 20, "SIGKILL"),), acts=((1.0, "again", 1),),
          others={1: "trained"}, spec={"pause": 0.6, "until": 3, "steps": 100}),
    *(
        Fault(f"started again with another {odd}", 3, ((1, 20, "SIGKILL"),), job="odd", acts=((1.0, "again", 1),),
              others={1: MISMATCH}, culprits=(1, 1), within=6.0, spec={"again with": odd, "pause": 0.2, "steps": 400})
        for odd in ("state", "function")
    ),
    Fault("one worker differs in its XLA_FLAGS", 3, (), MISMATCH, ("process 0: XLA_FLAGS -", "process 1: XLA_FLAGS --xla_cpu_max_isa=AVX"),
          culprits=(), spec=FLAGS),
    Fault("one of three drifts apart", 3, (), words=("the state of worker 1 is not that of the others",), job="odd",
          culprits=(1,), others={1: DIVERGED}, within=3.0,
          spec={"odd": "drift", "last": 40, "settings": {"checkpoint": "last.npz", "every": 10}}),
    Fault("one drifts apart and another dies", 4, ((2, 20, "SIGKILL"),), job="odd", culprits=(1, 2),
          others={1: DIVERGED}, within=3.0, spec={"odd": "drift"}),
    *(
        Fault(f"one worker differs in its {odd}", 3, (), MISMATCH, words, job="odd", culprits=(),
              within=9.5 if odd == "slow rows" else 2.0, spec={"odd": odd})  # whose compilation takes 8 s
        for odd, words in {  # beside process 1 stands whoever came first of the others
            "function": ("process 1: program `<lambda>`",),
            "rows": ("process 1: argument args[1][0]: float32[12,16]", ": argument args[1][0]: float32[24,16]"),
            "slow rows": ("bring different programs to step 20",),
            "steps": ("process 1: no program: its training ends here", ": program `step`"),
        }.items()
    ),
    Fault("SIGKILL between two runs", 3, ((1, "between runs", "SIGKILL"),), culprits=(), spec={"first": (20,)}),
    Fault("SIGKILL in the first of two runs, started again and taken in by the second", 3, ((1, 12, "SIGKILL"),),
          acts=((1.0, "again", 1),), others={1: "trained"},
          spec={"first": (20,), "pause": 0.3, "until": 3, "steps": 100}),
    Fault("all are replaced one after another", 2, ((0, 12, "SIGKILL"), (1, 40, "SIGKILL")),
          acts=((0.0, "alone", "C"), (1.0, "again", 0), (16.0, "again", 1)), others={0: "trained", 1: "trained"},
          spec={"pause": 0.6, "until": 2, "steps": 100}),
    Fault("SIGSTOP of one for longer than JAX's heartbeats, continued", 3, ((1, 20, "SIGSTOP"),), words=(LATE,),
          acts=((15.0, "SIGCONT", 1),), others={1: LOST}, spec={"heartbeat": 4}),
    Fault("SIGSTOP of all for longer than JAX's heartbeats, continued", 3, culprits=(), within=60.0,
          acts=(*((1.0, "SIGSTOP", who) for who in (0, 1, 2, "C")), *((16.0, "SIGCONT", who) for who in ("C", 0, 1, 2))),
          spec={"heartbeat": 4, "pause": 0.1, "until": 4}),
    # The coordinator, and checkpoints.
    Fault("a checkpoint takes longer than a step may", 3, culprits=(),
          spec={"slow": 4.0, "pause": 0.1, "until": 4, "last": 40, "settings": {"checkpoint": "last.npz", "every": 10}}),
    Fault("death of the coordinator", 3, (), LOST, ("The coordinator died",), culprits=(),
          acts=((1.0, "SIGKILL", "C"),), spec={"pause": 0.05, "steps": 4000, **FILE}),
    Fault("SIGSTOP of the coordinator", 3, (), LOST, ("The coordinator died",), culprits=(),
          within=TIMEOUT + 1, acts=((1.0, "SIGSTOP", "C"),), spec={"pause": 0.05, "steps": 4000, **FILE}),
    Fault("SIGSTOP of the coordinator, continued", 3, culprits=(),
          acts=((1.0, "SIGSTOP", "C"), (3.0, "SIGCONT", "C")), spec={"pause": 0.1}),
    Fault("full disk at a checkpoint", 2, ((0, 20, "full disk"),), others={0: "OSError"},
          culprits=(), spec={"last": 40, "settings": {"checkpoint": "last.npz", "every": 10}}),
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
    Fault("SIGKILL while others are waited for", 3, ((1, "in the meeting", "SIGKILL"),), LOST,
          ("process 1 (", "ended before all 3 had arrived"), within=3.0, spec={"arrival": 8, "comes late": 2}),
    Fault("SIGKILL while connecting", 3, ((1, "while connecting", "SIGKILL"),), LOST,
          ("Process 1 ended during the start",), spec={"arrival": 20}),
    Fault("death of the coordinator while connecting", 3, ((1, "while connecting", "sleep"),), LOST,
          ("The coordinator died, or was cut off, during the start",), culprits=(),
          acts=((0.5, "SIGKILL", "C"),), spec={"arrival": 20}),
    Fault("SIGKILL before there are devices", 3, ((1, "after the meeting", "SIGKILL"),), "RuntimeError",
          ("Process 1 ended during the start",), job="calls", culprits=(), within=2.0, spec={"arrival": 20}),
    Fault("SIGKILL while devices are exchanged", 3, ((1, "while exchanging", "SIGKILL"),), "RuntimeError",
          ("Process 1 ended during the start",), job="calls", culprits=(), within=2.0, spec={"arrival": 20}),
    Fault("SIGSTOP while devices are exchanged", 3, ((1, "while exchanging", "SIGSTOP"),), "RuntimeError",
          ("did not tell each other of their devices within 6 s",), job="calls", culprits=(), within=8.0,
          spec={"arrival": 6}),
    *(
        Fault(f"SIGKILL {when}", 2, ((1, when, "SIGKILL"),), LOST, ("Process 1 ended during the start",), within=2.0)
        for when in ("after the meeting", "before training")
    ),
    Fault("SIGKILL before training, when there are devices", 3, ((1, "before training", "SIGKILL"),), culprits=(),
          spec={"devices first": True}),
    Fault("the coordinator's port is taken", 3, (), DEADLINE, ("process 0 of 3 did not arrive",),
          culprits=(0,), others={0: "OSError"}, spec={"arrival": 4, "taken": True}),
    # Calls of `jc.data_parallel` steps, of `strategy.run` and of cross-device ops.
    _calls("a step: asleep", DEADLINE, (1, 6, "sleep"), words=WAITS),
    _calls("a step: SIGSTOP", DEADLINE, (1, 6, "SIGSTOP"), words=WAITS),
    _calls("a step: SIGKILL", LOST, (1, 6, "SIGKILL"), words=("process 1 has died",)),
    _calls("a step without a deadline: SIGKILL", LOST, (1, 6, "SIGKILL"), words=("process 1 has died",),
           spec={"timeout": 0}, processes=4),
    _calls("a step without a deadline: SIGKILL, two devices each", LOST, (1, 6, "SIGKILL"),
           words=("process 1 has died",), spec={"timeout": 0, "devices": 2}, processes=3, within=2.0),
    _calls("a step: SIGKILL before the first", LOST, (1, "before the first call", "SIGKILL"),
           words=("process 1 has died", "did not come to agree"), within=2.0),
    _calls("a step: an interpreter is held for 7 s before the first", "trained",
           (1, "before the first call", "hold"), spec={"timeout": 0}),
    _calls("a step: one process differs in its XLA_FLAGS", MISMATCH, spec=FLAGS, words=("process 1: XLA_FLAGS --xla_cpu_max_isa=AVX",)),
    _calls("a step: asleep while the coordinator is stopped", DEADLINE, (1, 6, "sleep"), culprits=(),
           words=(LATE, "Who did not arrive is not known"), acts=((0.0, "SIGSTOP", "C"),), within=2.0),
    _calls("`strategy.run`: asleep", DEADLINE, (1, 6, "sleep"), words=WAITS, spec={"of": "run"}),
    _calls("a cross-device op: asleep", DEADLINE, (1, 6, "sleep"), words=(*WAITS[:-1], "/pack0 has [0]"), spec={"of": "op"}),
]  # fmt: skip
