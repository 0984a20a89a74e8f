"""What it costs to compile an exchange and its update, beside one `pmean` per leaf.

    python -m benchmarks.compile_cost [ROUNDS [TREE:PROCESSES ...]]

The gradients of a TREE of `jaxcoll bench`, or one array of so many KiB, are averaged over PROCESSES
(resnet50:2 200x1KiB:2 1024:8), and each parameter takes a step of gradient descent. The first of
these processes compiles in ROUNDS (5), the baseline twice, while the others sleep. Prints ratios of
its CPU seconds, which other work on the machine disturbs least, of wall time, and of CPU seconds
with tracing and lowering.
"""

import functools
import sys
import time

import jax
import numpy as np

import jaxcoll as jc
from jaxcoll.cli.bench import interleave, ratio
from jaxcoll.cli.flags import read_tree


def compiled_in(reduce, params, grads, mesh):
    """CPU seconds of compiling, wall seconds of it, and CPU seconds from the beginning."""

    def step(params, grads):
        mean = reduce([g[0] for g in grads])
        return [p - 0.1 * g for p, g in zip(params, mean, strict=True)]

    jax.clear_caches()
    whole, rows = jax.P(), jax.P("data")
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(whole, rows), out_specs=whole)
    began = time.process_time()
    lowered = jax.jit(mapped).lower(params, grads)
    cpu, wall = time.process_time(), time.perf_counter()
    lowered.compile()
    ended = time.process_time()
    return ended - cpu, time.perf_counter() - wall, ended - began


def measure(tree, rounds):
    """Measure on the first process, and return its row of the table."""
    if jax.process_index():
        return None
    shapes = {"": jax.ShapeDtypeStruct((int(tree) << 8,), "f")} if tree.isdigit() else None
    params = list((shapes or read_tree(tree, "float32")).values())
    n = jax.device_count()
    grads = [jax.ShapeDtypeStruct((n, *x.shape), x.dtype) for x in params]
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))

    def leaf_by_leaf(grads):
        return [jax.lax.pmean(g, "data") for g in grads]

    ours = functools.partial(jc.pmean, axis_name="data")
    ways = {"hand": leaf_by_leaf, "again": leaf_by_leaf, "ours": ours}
    turns = {w: functools.partial(compiled_in, f, params, grads, mesh) for w, f in ways.items()}
    for turn in turns.values():
        turn()
    found = list(interleave(turns, rounds))
    figures = {w: list(zip(*(each[w] for each in found), strict=True)) for w in ways}
    ratios = [
        str(ratio(figures[way][k], figures["hand"][k]))
        for way, k in (("ours", 0), ("again", 0), ("ours", 1), ("ours", 2))
    ]
    hand, ours = (f"{np.median(figures[way][0]):.2f}" for way in ("hand", "ours"))
    return f"| {' | '.join([f'{tree} over {n}', hand, ours, *ratios])} |"


if __name__ == "__main__":
    from benchmarks import compile_cost  # which the other processes can import, too

    rounds, *cases = sys.argv[1:] or ["5"]
    print("| | CPU s by hand | ours | ÷ | again | wall ÷ | with tracing ÷ |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for case in cases or ("resnet50:2", "200x1KiB:2", "1024:8"):
        tree, processes = case.split(":")
        work = functools.partial(compile_cost.measure, tree, int(rounds))
        print(jc.launch(work, int(processes))[0], flush=True)
