"""A training loop in plain JAX over several processes, of which one comes late to each step."""

import argparse
import os
import time

import jax

if "SLURM_JOB_ID" in os.environ:
    jax.distributed.initialize()
else:
    import jaxcoll

    jaxcoll.initialize()

import jax.numpy as jnp
import numpy as np

parser = argparse.ArgumentParser()
parser.add_argument("--late", type=int, default=-1, help="the rank")
parser.add_argument("--ms", type=float, default=0)
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--form", choices=["native", "permutes", "callback"], default="native")
parser.add_argument("--absent", type=int, default=-1, help="a rank that goes on for long")
args = parser.parse_args()
rank, is_late = jax.process_index(), jax.process_index() == args.late
mesh = jax.make_mesh((jax.device_count(),), ("data",), (jax.sharding.AxisType.Auto,))
ring = [(k, (k + 1) % mesh.size) for k in range(mesh.size)]


def wait():
    time.sleep(args.ms / 1e3 * is_late)


def total(x):
    if args.form == "native":
        return jax.lax.psum(x, "data")
    if args.form == "callback":
        x = jax.lax.psum(x, "data")
        x = jax.pure_callback(lambda x: (wait(), np.asarray(x))[1], x, x)
        return jax.lax.psum(x, "data")
    for _ in range(mesh.size - 1):
        x = x + jax.lax.ppermute(x, "data", ring)
    return x


@jax.jit
@jax.shard_map(mesh=mesh, in_specs=(jax.P(), jax.P("data")), out_specs=jax.P(), check_vma=False)
def step(w, x):
    gradient = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
    return w - 0.1 * total(gradient)


rows = jax.NamedSharding(mesh, jax.P("data"))
x = jax.make_array_from_callback((16 * mesh.size, 64), rows, lambda at: np.ones((16, 64), "f"))
w = np.ones((64, 64), "f")
for _ in range(args.steps):
    if args.form != "callback":
        wait()
    w = jax.block_until_ready(step(w, x))
if rank == args.absent:
    time.sleep(25)
print("ended", rank)
