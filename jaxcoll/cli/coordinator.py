"""`jaxcoll coordinator`: run a job's coordinator where it outlives every process of the job."""

from __future__ import annotations

import argparse

from jaxcoll._job.coordinator import listen_at
from jaxcoll._job.launch.subprocesses import COORDINATOR
from jaxcoll._job.specs import Member
from jaxcoll.cli.flags import minimum

EPILOG = f"""\
Without it process 0 starts the coordinator, and a scheduler may end it with process 0's container
or host. Set {COORDINATOR}=HOST:PORT in all processes; their launcher numbers them. The command ends
after the last process, with status 1 if the job could not begin.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    parser.epilog = EPILOG
    parser.add_argument("address", metavar="HOST:PORT", help="where the processes meet")
    text = "processes of the job"
    parser.add_argument("-n", "--processes", type=minimum(1), required=True, help=text)


def run(args: argparse.Namespace) -> int:
    """Run the coordinator to its end and return its exit status."""
    member = Member(args.address, args.processes, 0, source="the command line")
    member.check()
    coordinator = listen_at(args.address, member)
    print(f"{COORDINATOR}={args.address} serves {args.processes} processes", flush=True)
    coordinator.replies.readline()  # the first process has arrived
    coordinator.release()
    coordinator.await_end()
    return int(coordinator.process.returncode != 0)
