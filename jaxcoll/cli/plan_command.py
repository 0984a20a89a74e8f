"""`jaxcoll plan`: what a tree would send, and how long that would take, on any cluster."""

from __future__ import annotations

import argparse
import functools
import json
from pathlib import Path

from jaxcoll._files import write_result
from jaxcoll._mesh.clusters import topology_named, topology_world
from jaxcoll._mesh.plan import plan_in
from jaxcoll._plan.options import ReduceOp
from jaxcoll._plan.plan import MOST_ROWS, Plan
from jaxcoll._plan.world import World
from jaxcoll._prices.predict import predict
from jaxcoll._prices.rates import rates_of
from jaxcoll.bench.naming import options_of
from jaxcoll.bench.simulation import ALGORITHMS, Simulation, simulate
from jaxcoll.bench.workloads import Workload, tree_of
from jaxcoll.cli import flags
from jaxcoll.cli.streams import patience, terminal_width

EPILOG = """\
Nothing is compiled, and nothing runs: a plan is made from shapes, and its time is predicted from
a table of rates (docs/cost_model.md). --simulate takes the tree as one array. The exit status is 0,
or 2 with one line on standard error.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    parser.epilog = EPILOG
    add = flags.add_tree(parser).add_argument
    add("--algorithm", default="auto", metavar="NAME", help="and packs, as in ring@4MiB")
    where = parser.add_argument_group("where").add_mutually_exclusive_group()
    add = where.add_argument
    add("--topology", metavar="NAME", help="a cluster, such as h100:2x8 or v5e:4x4")
    flags.add_devices(where, "of one CPU process (default: {simulated})")
    add("--processes", type=int, metavar="N", help="CPU processes on this machine, over Gloo")
    add = parser.add_argument_group("results").add_argument
    words = "predict it for 2 to 16,384 replicas of these devices (default: h100:2x8)"
    add("--simulate", action="store_true", help=words)
    add("--algorithms", metavar="LIST", help=f"for --simulate (default: {ALGORITHMS})")
    add("--all-rows", action="store_true", help="show all rows of a long table, not the first")
    add("--json", metavar="FILE", help="write it to FILE as JSON; - for here")
    add("--plot", type=Path, metavar="FILE.png", help="draw what --simulate predicts")


def run(args: argparse.Namespace) -> int:
    """Plan or simulate, and show; the exit status."""
    workload = _checked(args)
    with patience("simulating" if args.simulate else "planning"):
        found = _simulation(args, workload) if args.simulate else _plan(args, workload)
    text = json.dumps(found.to_dict(), indent=2)
    if isinstance(found, Simulation) and args.plot:
        from jaxcoll.bench.chart import draw_simulation

        write_result("--plot", args.plot, functools.partial(draw_simulation, found))
    flags.write_lines(args.json, text + "\n")
    if args.json != "-":
        rows = None if args.all_rows else MOST_ROWS
        print(found.text(rows, terminal_width()) if isinstance(found, Plan) else found)
    return 0


def _checked(args: argparse.Namespace) -> Workload:
    """The tree; everything that can be refused is refused before the work."""
    flags.check_least(args, 1, "devices", "processes")
    if not args.simulate and (args.plot or args.algorithms):
        flag = "--plot draws" if args.plot else "--algorithms is for"
        raise ValueError(f"{flag} what --simulate predicts; add --simulate.")
    if args.simulate and args.all_rows:
        raise ValueError("--all-rows is for a plan's table; leave it out.")
    if args.simulate and args.algorithm != "auto":
        raise ValueError("--simulate takes --algorithms, a list, in the place of --algorithm.")
    flags.check_results(args.json, args.plot)
    if args.plot:
        flags.check_installed("cli", "matplotlib", flag="--plot")
    return tree_of(args.tree, args.dtype)


def _plan(args: argparse.Namespace, workload: Workload) -> Plan:
    options = options_of(args.algorithm)
    # "inner/outer" needs the two axes of the cluster; one algorithm takes all replicas as one.
    two = (options.algorithm or "").count("/") + 1
    if args.topology:
        topology = topology_named(args.topology)
        world = topology_world(topology, topology.sizes(two))
    else:
        n = args.processes or args.devices or 8
        world = World("cpu", (n,), processes=args.processes or 1)
    op = ReduceOp.of(args.reduce_op)
    return predict(plan_in(workload.tree, world, options, op), rates_of(world))


def _simulation(args: argparse.Namespace, workload: Workload) -> Simulation:
    if args.devices is not None:
        raise ValueError(
            "--simulate: devices of one process share one machine, however many there are; name "
            "a cluster as in --topology h100:2x8, or --processes for CPU processes, one a host."
        )
    topology = None if args.processes else topology_named(args.topology or "h100:2x8")
    names = [name.strip() for name in (args.algorithms or ALGORITHMS).split(",") if name.strip()]
    if not names:
        raise ValueError("--algorithms names none.")
    return simulate(workload.name, workload.nbytes, topology, list(dict.fromkeys(names)))
