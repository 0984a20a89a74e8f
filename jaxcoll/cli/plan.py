"""`jaxcoll plan`: predict the traffic and time of reducing a pytree, on any cluster."""

from __future__ import annotations

import argparse
import shutil
import sys

from jaxcoll._plan.world import World
from jaxcoll._report.show_plan import plan_in
from jaxcoll._report.shown_plan import MOST_ROWS
from jaxcoll._step.mesh.clusters import topology_named, topology_world
from jaxcoll.cli import flags

EPILOG = """\
Nothing is compiled, and nothing runs: the plan is made from shapes, and its time is predicted by
the cost model (docs/clusters.md).
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    parser.epilog = EPILOG
    flags.add_tree(parser, default="resnet50")
    add = parser.add_argument
    text = "algorithm, optionally with a pack size, as in ring@4MiB (default: auto)"
    add("--algorithm", default="auto", metavar="NAME", help=text)
    add = parser.add_mutually_exclusive_group().add_argument
    add("--topology", metavar="NAME", help="a cluster, such as h100:2x8 or v5e:4x4")
    text = f"devices of one CPU process (default: {flags.SIMULATED})"
    add("--devices", type=flags.minimum(1), metavar="N", help=text)
    text = "CPU processes on this machine, over Gloo"
    add("--processes", type=flags.minimum(1), metavar="N", help=text)
    add = parser.add_argument
    add("--all-rows", action="store_true", help="show all rows of a long table, not the first ones")
    add("--json", metavar="FILE", help="also write JSON to FILE; - prints JSON only")


def run(args: argparse.Namespace) -> int:
    """Print the plan and return the exit status."""
    options = flags.parse_options(args.algorithm)
    if args.topology:
        topology = topology_named(args.topology)
        # "inner/outer" needs two axes of the cluster; a single algorithm takes all replicas as one.
        axes = (options.algorithm or "").count("/") + 1
        world = topology_world(topology, topology.sizes(axes))
    else:
        n = args.processes or args.devices or flags.SIMULATED
        world = World("cpu", (n,), processes=args.processes or 1)
    tree = flags.read_tree(args.tree, args.dtype)
    plan = plan_in(tree, world, options, args.reduce_op)
    flags.write_json(args.json, plan.to_dict())
    if args.json != "-":
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        print(plan.text(None if args.all_rows else MOST_ROWS, width))
    return 0
