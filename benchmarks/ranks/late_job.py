"""A training loop of several processes, one of them late; it has no code for profiling."""

import argparse
import os
import time

import jax
import numpy as np

import jaxcoll as jc

if "SLURM_JOB_ID" in os.environ:
    jax.distributed.initialize()
else:
    jc.initialize()

parser = argparse.ArgumentParser()
parser.add_argument("--late", type=int, default=-1, help="the late rank")
parser.add_argument("--ms", type=float, default=0, help="its delay in each step")
parser.add_argument("--where", choices=["before", "middle"], default="before", help="of a step")
words = "psum (JAX's), shift (permutes by hand), or a jaxcoll algorithm"
parser.add_argument("--form", default="psum", help=words)
parser.add_argument("--seconds", type=float, default=7.0, help="duration of the loop")
parser.add_argument("--width", type=int, default=64, help="N of w[N, N], float32")
args = parser.parse_args()
rank, is_late = jax.process_index(), jax.process_index() == args.late
mesh = jax.make_mesh((jax.device_count(),), ("data",), (jax.sharding.AxisType.Auto,))
ring = [(k, (k + 1) % mesh.size) for k in range(mesh.size)]


def wait():
    """Sleep if this rank is the late one."""
    time.sleep(args.ms / 1e3 * is_late)


def waited(x):
    """Be late in the middle of a step."""
    wait()
    return np.asarray(x)


def total(tree):
    """Sum over all devices."""
    if args.form == "psum":
        return jax.lax.psum(tree, "data")
    if args.form != "shift":
        options = jc.CommunicationOptions(algorithm=args.form, bytes_per_pack=1 << 30)
        return jc.all_reduce("sum", tree, "data", options=options)
    moved = tree
    for _ in range(mesh.size - 1):
        moved = jax.lax.ppermute(moved, "data", ring)
        tree = jax.tree.map(jax.lax.add, tree, moved)
    return tree


@jax.jit
@jax.shard_map(mesh=mesh, in_specs=(jax.P(), jax.P("data"), jax.P("data")), out_specs=jax.P(),
               check_vma=False)  # fmt: skip
def step(w, x, spent):
    """Take one step of gradient descent, and average the elapsed seconds over the devices."""
    gradient = jax.grad(lambda w: (jax.numpy.tanh(x @ w) ** 2).mean())(w)
    if args.where == "middle":
        gradient = total(gradient)
        gradient = jax.pure_callback(waited, gradient, gradient) / mesh.size
    gradient, spent = total((gradient, spent))
    return w - 0.1 * gradient / mesh.size, spent / mesh.size


rows, whole = (jax.NamedSharding(mesh, jax.P(*axes)) for axes in (["data"], []))
array, local = jax.make_array_from_process_local_data, jax.local_device_count()
x = array(rows, np.ones((16 * local, args.width), "f"))
w = array(whole, np.ones((args.width, args.width), "f"))
began = spent = 0.0
while spent < args.seconds:  # the average over the ranks, so that all take the same number of steps
    if args.where == "before":
        wait()
    mine = np.full((local, 1), began and time.monotonic() - began, "f")
    w, mean = step(w, x, array(rows, mine))
    spent = np.asarray(mean).item()
    began = began or time.monotonic()  # once it is compiled
print("ended", rank)
