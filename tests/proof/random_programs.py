"""Random programs: what the proof calls the same is bit-equal on replicas with different rows.

`python tests/proof/random_programs.py FIRST COUNT` tries so many seeds, the suite a few. A program
that the proof lets pass although replicas go different ways to an exchange would hang here.
"""

import collections
import random
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import sparse
from jax.sharding import PartitionSpec as P

import jaxcoll as jc
from jaxcoll._gradients.proof.proof import prove

SIZE = 4  # of every value, a vector


@jax.custom_jvp
def with_jvp(x):
    return jnp.sin(x)


with_jvp.defjvp(lambda primals, tangents: (jnp.sin(*primals), tangents[0] * jnp.cos(*primals)))


@jax.custom_vjp
def with_vjp(x):
    return jnp.tanh(x)


with_vjp.defvjp(lambda x: (jnp.tanh(x), x), lambda x, ct: (ct * (1 - 0.1 * x * x),))


def fitted(t):
    """A vector of numbers that stay small, however often it is added to itself."""
    return t / (1 + jnp.abs(t).max()) * jnp.ones(SIZE)


def by_host(x):
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.pure_callback(np.cos, shape, x, vmap_method="sequential")


def raised(x):
    return jax.pure_callback(fail, jax.ShapeDtypeStruct(x.shape, x.dtype))


def fail():
    raise ValueError("too large")


def keyed(x):
    key = jax.random.fold_in(jax.random.key(0), lax.bitcast_convert_type(x[0], jnp.uint32))
    return jax.random.normal(key, SIZE)


def place(x):
    return (jnp.abs(x[0]) * 3).astype(int) % SIZE


def solved(x, y):
    matrix = 2 + jnp.abs(x)
    solve = lambda _, b: b / matrix
    return lax.custom_linear_solve(lambda v: matrix * v, y, solve, solve)


FUNCTIONS = {  # of two values
    "add": lambda x, y: x + y,
    "multiply": lambda x, y: x * y,
    "sine": lambda x, y: jnp.sin(x),
    "constant": lambda x, y: jnp.arange(4.0) / 4,
    "choose": lambda x, y: jnp.where(x > y, x, y),
    "sort": lambda x, y: jnp.sort(x),
    "sum so far": lambda x, y: jnp.cumsum(x),
    "largest": lambda x, y: x[jnp.argmax(y)],
    "mean": lambda x, y: x.mean(),
    "product": lambda x, y: jnp.outer(x, y) @ x,
    "slice": lambda x, y: lax.dynamic_slice(jnp.concatenate([x, x]), (place(y),), (SIZE,)),
    "scatter": lambda x, y: x.at[place(y)].add(y[0]),
    "narrow": lambda x, y: x.astype(jnp.bfloat16).astype(jnp.float32),
    "barrier": lambda x, y: lax.optimization_barrier((x, y))[0],
    "custom_jvp": lambda x, y: with_jvp(x),
    "custom_vjp": lambda x, y: with_vjp(y),
    "custom_linear_solve": solved,
    "reducer": lambda x, y: lax.reduce(x, jnp.float32(0), lambda a, b: a * b - b, (0,)),
    "transform": lambda x, y: jnp.fft.fft(x).real,
    "random": lambda x, y: keyed(x),
    "host": lambda x, y: by_host(x),
    "sparse": lambda x, y: sparse.BCOO.fromdense(jnp.eye(SIZE), nse=SIZE) @ x,
    "or an error": lambda x, y: lax.cond(x.sum() > 1e9, lambda: raised(x), lambda: y),
}


def permuted(x, axis, n):
    return lax.ppermute(x, axis, [(i, (i + 1) % n) for i in range(n)])


def in_groups(x, axis, n):
    groups = [[*range(n // 2)], [*range(n // 2, n)]]
    return lax.pmean(x, axis, axis_index_groups=groups if n > 2 else None)


RING = jc.CommunicationOptions(implementation="ring")
EXCHANGES = {  # of a value over an axis, or several, of size n
    "psum": lambda x, axis, n: lax.psum(x, axis),
    "count": lambda x, axis, n: lax.psum(jnp.ones(SIZE), axis) * x,
    "pmean": lambda x, axis, n: lax.pmean(x, axis),
    "pmax": lambda x, axis, n: lax.pmax(lax.stop_gradient(x), axis),
    "all_gather": lambda x, axis, n: lax.all_gather(x, axis)[-1],
    "axis_index": lambda x, axis, n: x + lax.axis_index(axis),
    "psum_scatter": lambda x, axis, n: lax.psum_scatter(jnp.tile(x, n), axis, tiled=True),
    "all_to_all": lambda x, axis, n: lax.all_to_all(
        jnp.tile(x, n), axis, 0, 0, tiled=True)[:SIZE],
    "ppermute": permuted,
    "groups": in_groups,
    "jc.pmean": lambda x, axis, n: jc.pmean(x, axis),
    "jc.psum of a pack": lambda x, axis, n: jc.psum([x, jnp.ones(2), 2 * x], axis)[2],
    "jc by a ring": lambda x, axis, n: jc.all_reduce("mean", x, axis, options=RING),
    "jc.broadcast": lambda x, axis, n: jc.broadcast(x, axis),
    "jc in halves": lambda x, axis, n: jc.all_gather(
        jc.reduce_scatter("mean", {"x": x}, axis), axis)["x"],
    "jc.global_norm": lambda x, axis, n: jc.global_norm(x, axis),
    "jc.grad": lambda x, axis, n: jc.grad(lambda w: jnp.sum(jnp.sin(w)), axis)(x),
    "jc.mean_loss": lambda x, axis, n: jax.grad(
        jc.mean_loss(lambda w: jnp.sum(jnp.sin(w)), axis))(x),
}  # fmt: skip


def by_ref(x, y, f, g):
    ref = jax.new_ref(y)

    def turn(i, _):
        ref[...] = fitted(ref[...] + f(x))

    lax.fori_loop(0, 2, turn, None)
    return ref[...]


def over_rows(x, y, f, g):
    """An axis of its own, whose sums are no replicas'."""
    row = lambda t: lax.psum(f(t), "rows") + lax.axis_index("rows")
    return jax.vmap(row, axis_name="rows")(jnp.stack([x, y]))[0]


def until(x, y, f, g):
    more = lambda c: (c[0] < 2) & (c[1].sum() < x.sum() + 1)
    return lax.while_loop(more, lambda c: (c[0] + 1, f(c[1])), (0, y))[1]


NESTED = {  # of two values and two functions of one value
    "cond": lambda x, y, f, g: lax.cond(x.sum() > 0, f, g, y),
    "switch": lambda x, y, f, g: lax.switch(place(x) % 3, [f, g, lambda y: y], y),
    "scan": lambda x, y, f, g: lax.scan(lambda c, e: (f(c * e), None), y, x)[0],
    "scan of a pair": lambda x, y, f, g: lax.scan(
        lambda c, _: ((c[1], f(c[0])), c[1]), (y, x), None, length=3)[1].sum(0),
    "fori": lambda x, y, f, g: lax.fori_loop(0, 3, lambda i, c: f(c), y),
    "while": until,
    "jit": lambda x, y, f, g: jax.jit(f)(y),
    "remat": lambda x, y, f, g: jax.checkpoint(f)(y),
    "grad": lambda x, y, f, g: jax.grad(lambda t: jnp.sum(f(t) * x))(y),
    "grad of a rule": lambda x, y, f, g: jax.grad(lambda t: jnp.sum(with_vjp(f(t)) * x))(y),
    "grad of remat": lambda x, y, f, g: jax.grad(lambda t: jnp.sum(jax.checkpoint(f)(t) * x))(y),
    "jvp": lambda x, y, f, g: jax.jvp(f, (y,), (x,))[1],
    "vmap": lambda x, y, f, g: jax.vmap(f)(jnp.stack([x, y]))[1],
    "vmap over rows": over_rows,
    "root": lambda x, y, f, g: lax.custom_root(
        lambda v: v - f(y), y, lambda h, v: v - h(v), lambda h, v: v / h(jnp.ones(SIZE))),
    "reference": by_ref,
}  # fmt: skip
KINDS = {**FUNCTIONS, **EXCHANGES, **NESTED}
UNDERIVED = {"custom_vjp", "host", "or an error"}
"""These have no derivative in forward mode, or none at all."""


def random_function(rng, axes, depth=0, local=False):
    """A function of some values that returns all that it has made of them, the result last."""
    # Most bodies exchange nothing: a collective under a condition that varies would be refused.
    local = depth > 0 and (local or rng.random() < 0.75)
    functions = [kind for kind in FUNCTIONS if depth == 0 or kind not in UNDERIVED]
    nested = NESTED if rng.random() < 1 - depth / 2 else ()
    kinds = [*functions, *([] if local else EXCHANGES), *nested]
    steps = []
    for _ in range(rng.randint(2, 4) if depth else rng.randint(4, 9)):
        kind, axis = rng.choice(kinds), rng.choice([*axes, axes])
        bodies = [random_function(rng, axes, depth + 1, local) for _ in range(2 * (kind in NESTED))]
        steps.append((kind, rng.random(), rng.random(), axis, bodies))

    def function(values):
        values = [*values]
        for kind, first, second, axis, bodies in steps:
            x, y = (values[int(at * len(values))] for at in (first, second))
            if kind in EXCHANGES:
                made = EXCHANGES[kind](x, axis, lax.axis_size(axis))
            else:
                fs = [lambda c, f=f, x=x, y=y: fitted(f([c, x, y])[-1]) for f in bodies]
                made = KINDS[kind](x, y, *fs)
            values.append(fitted(made))
        return values

    return function


def tried(seed):
    """How often something was true of the values of one program."""
    rng = random.Random(seed)
    shape = (2, 4) if seed % 3 == 0 else (8,)
    axes = ("node", "data")[-len(shape) :]
    mesh = jax.make_mesh(shape, axes, axis_types=(jax.sharding.AxisType.Auto,) * len(shape))
    function = random_function(rng, axes)

    def replica(w, x):
        values = function([w, x[0], lax.pmean(x[0], axes)])
        return [v[None] for v in values]

    specs = {"in_specs": (P(), P(axes)), "out_specs": P(axes), "check_vma": False}
    step = jax.jit(jax.shard_map(replica, mesh=mesh, **specs))
    rows = np.random.default_rng(seed).standard_normal((8, SIZE)).astype("f")
    arguments = np.linspace(-1, 1, SIZE).astype("f"), rows
    try:
        with jax.numpy_dtype_promotion("standard"):  # JAX's own code needs it, and tests are strict
            traced = step.trace(*arguments)
            lowered = traced.lower()
    except Exception as error:  # JAX's own, as of `pmax`, which has no derivative
        return collections.Counter({f"{type(error).__name__} of JAX": 1})
    (eqn,) = (e for e in traced.jaxpr.jaxpr.eqns if e.primitive.name == "shard_map")
    inputs = [frozenset(jax.tree.leaves(tuple(spec))) for spec in eqn.params["in_specs"]]
    try:
        proven = prove(eqn.params["jaxpr"], inputs, dict(zip(axes, shape, strict=True)))
    except ValueError:
        return collections.Counter(refused=1)
    tally, values = collections.Counter(ran=1), lowered.compile()(*arguments)
    for k, (value, varying) in enumerate(zip(values, proven.varying, strict=True)):
        bits = np.asarray(value).view(np.uint32).reshape(*shape, SIZE)
        for i, axis in enumerate(axes):
            equal = bool((bits == bits.take([0], i)).all())
            said = "varies" if axis in varying else "same"
            tally[said if equal == (said == "same") else f"{said}, and is not"] += 1
            if not equal and said == "same":
                print(f"seed {seed}: value {k} is not the same along {axis!r}")
    return tally


def main(first, count):
    tally = collections.Counter()
    for seed in range(first, first + count):
        tally += tried(seed)
    print(f"JAX {jax.__version__}, seeds {first} to {first + count - 1}: {dict(tally)}")
    return bool(tally["same, and is not"])


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_disable_most_optimizations", True)
    sys.exit(main(*map(int, sys.argv[1:3])))
