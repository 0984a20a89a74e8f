"""Programs as people write them, for eight devices: what compare_hlo.py compiles and compares.

Each entry of `PROGRAMS` makes a jitted function and its arguments, as shapes with shardings, for a
line of eight devices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxcoll as jc

P = PartitionSpec
F32, BF16 = jnp.float32, jnp.bfloat16
AROUND = [(i, (i + 1) % 8) for i in range(8)]
PROGRAMS: dict[str, Callable[[np.ndarray], tuple[Any, tuple]]] = {}


def mapped(shapes, in_specs, out_specs, axes="d", **options):
    """Register a function of `shard_map` over a line, or over a grid of 2 by 4 for two axes."""

    def over(function):
        def program(mesh):
            how = {"in_specs": in_specs, "out_specs": out_specs, **options}
            return jax.jit(jax.shard_map(function, mesh=mesh, **how))

        return register(function.__name__, program, shapes, in_specs, axes) or function

    return over


def sharded(name, function, shapes, specs, out, axes="d"):
    """Register a function of `jit` whose arguments are sharded."""

    def program(mesh):
        return jax.jit(function, out_shardings=NamedSharding(mesh, out))

    register(name, program, shapes, specs, axes)


def register(name, program, shapes, specs, axes):
    def build(line):
        mesh = Mesh(line.reshape((2, 4) if len(axes) > 1 else 8), tuple(axes))
        return program(mesh), tuple(
            jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
            for (shape, dtype), spec in zip(shapes, specs, strict=True)
        )

    PROGRAMS[name] = build


def mlp(w, x):
    for k in range(w.shape[0]):
        x = jnp.tanh(x @ w[k])
    return jnp.mean(jnp.square(x.astype(F32)))


def scanned_mlp(w, x):
    x, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)
    return jnp.mean(jnp.square(x.astype(F32)))


def gradient_step(loss, w, x):
    return w - (0.1 * jax.grad(loss)(w, x)).astype(w.dtype)


LAYERS = [((4, 512, 512), BF16), ((512, 512), BF16)]
for way, loss in (("unrolled", mlp), ("scanned", scanned_mlp)):
    for name, w, x, axes in (
        ("data_parallel", P(), P("d"), "d"),
        ("fsdp", P(None, "d"), P("d"), "d"),
        ("fsdp_and_tensor_parallel", P(None, "a", "b"), P("a", "b"), "ab"),
    ):
        step = functools.partial(gradient_step, loss)
        sharded(f"{name}_{way}", step, LAYERS, (w, x), w, axes)
for name, shapes, specs, out in (
    ("tensor_parallel", (256, 1024, 512), (P(None, "d"), P("d"), P()), P()),
    ("sequence_parallel", (256, 1024, 1024), (P(None, "d"), P("d"), P("d")), P("d")),
    ("windowed_products", (1024, 4096, 8192), (P(None, "d"), P("d"), P("d")), P(None, "d")),
):
    n, hidden, rows = shapes
    sizes = [((n, hidden), BF16), ((hidden, n), BF16), ((rows, n), BF16)]
    sharded(name, lambda up, down, x: jnp.tanh(x @ up) @ down, sizes, specs, out)


@mapped([((8 * 512, 512), BF16), ((512, 512), BF16)], (P("d"), P("d")), P("d"))
def sharded_optimizer(x, w):
    whole = lax.all_gather(w, "d", tiled=True)
    g = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w).astype(F32)))(whole)
    return w - lax.psum_scatter(g, "d", tiled=True)


@mapped(
    [((8 * 8 * 64, 128), BF16), ((8, 128, 512), BF16), ((8, 512, 128), BF16)], (P("d"),) * 3, P("d")
)
def experts(tokens, up, down):
    routed = lax.all_to_all(tokens.reshape(8, 64, 128), "d", 0, 0, tiled=True)
    done = jnp.tanh(routed.reshape(-1, 128) @ up[0]) @ down[0]
    return lax.all_to_all(done.reshape(8, 64, 128), "d", 0, 0, tiled=True).reshape(-1, 128)


@mapped([((8 * 64, 128), F32), ((8 * 64, 128), F32), ((64,), jnp.int32)], (P("d"),) * 3, P("d"))
def ragged_experts(tokens, out, sizes):
    offsets = jnp.arange(8, dtype=jnp.int32) * 8
    return lax.ragged_all_to_all(tokens, out, offsets, sizes, offsets, sizes, axis_name="d")


def attend(q, k, v, state):
    weights, total = state
    scores = jnp.exp((q @ k.T).astype(F32) / 16)
    return weights + scores @ v.astype(F32), total + scores.sum(1, keepdims=True)


def zeros(q):
    return lax.pcast((jnp.zeros(q.shape, F32), jnp.zeros((q.shape[0], 1), F32)), "d", to="varying")


ROWS = [((8 * 128, 256), BF16)] * 3


def attend_in_turns(q, k, v):
    def turn(carry, _):
        k, v, state = carry
        return (*lax.ppermute((k, v), "d", AROUND), attend(q, k, v, state)), None

    (_, _, state), _ = lax.scan(turn, (k, v, zeros(q)), None, length=8)
    return state[0] / state[1]


mapped(ROWS, (P("d"),) * 3, P("d"))(attend_in_turns)


@mapped(ROWS, (P("d"),) * 3, P("d"))
def ring_attention_gradients(q, k, v):
    return jax.grad(lambda q: jnp.sum(attend_in_turns(q, k, v)))(q)


@mapped([((8, 256), F32)], (P("d"),), P("d"), check_vma=False)
def counted_loops(x):
    def turn(x):
        return jnp.tanh(lax.psum(x, "d"))

    x = lax.fori_loop(0, 5, lambda _, x: turn(x), x)
    _, x = lax.while_loop(lambda s: s[0] < 9, lambda s: (s[0] + 2, turn(s[1])), (1, x))
    _, x = lax.while_loop(lambda s: s[0] > 0, lambda s: (s[0] - 1, turn(s[1])), (7, x))
    _, x = lax.while_loop(lambda s: s[0] <= 6, lambda s: (s[0] + 3, turn(s[1])), (0, x))
    _, x = lax.while_loop(lambda s: s[0] != 8, lambda s: (s[0] + 4, turn(s[1])), (-4, x))
    _, x = lax.while_loop(lambda s: 12 >= s[0], lambda s: (s[0] + 4, turn(s[1])), (0, x))
    _, x = lax.while_loop(lambda s: s[1][0, 0] < 2.0, lambda s: (s[0] + 1, turn(s[1])), (0, x))
    return x


@mapped([((8, 256), F32)], (P("d"),), P("d"), check_vma=False)
def nested_loops(x):
    def outer(x, _):
        x, _ = lax.scan(lambda x, _: (lax.psum(jnp.sin(x), "d"), None), x, None, length=3)
        return lax.ppermute(x, "d", AROUND), None

    return lax.scan(outer, x, None, length=4)[0]


@mapped(
    [((8, 256), x) for x in (jnp.float16, jnp.int8, jnp.float8_e4m3fn, jnp.int4)],
    (P("d"),) * 4,
    (P(), P(), P(), P()),
    check_vma=False,
)  # fmt: skip
def narrow(half, byte, eighth, nibble):
    gathered = [lax.all_gather(x, "d", tiled=True) for x in (eighth, nibble)]
    return (lax.psum(half, "d"), lax.pmax(byte, "d"), *gathered)


@mapped([((8 * 64, 128), F32)], (P("d"),), P("d"), check_vma=False)
def broadcast(x):
    return lax.pbroadcast(x, "d", 3)


@mapped([((8, 256, 256), F32), ((4, 256, 256), F32)], (P("d"), P()), P("d"), check_vma=False)
def metadata_with_line_breaks(x, w):
    with set_xla_metadata(kernel_metadata='{\n  "stages": [\n    {"name": "a = b"}\n  ]\n}'):
        y = jnp.tanh(x[0] @ w[0])
    return lax.psum(y, "d")[None] + x


@mapped([((8 * 64, 256), F32), ((6, 256, 256), F32)], (P("d"), P(None, "d")), P(None, "d"))
def jaxcoll_scan_layers(x, w):
    def loss(w):
        out, _ = jc.scan_layers(lambda x, w: (jnp.tanh(x @ w), None), x, w, "d")
        return jnp.mean(out)

    return jax.grad(loss)(w)


# Those of the golden texts, which golden/make.py compiles for other machines, too.
@mapped([((64, 16), F32)], (P("d"),), P("d"))
def kinds(x):
    gathered = lax.all_gather(x, "d", tiled=True)
    scattered = lax.psum_scatter(gathered * 2.0, "d", tiled=True)
    exchanged = lax.all_to_all(scattered, "d", 0, 0, tiled=True)
    return lax.ppermute(exchanged, "d", AROUND)


@mapped([((8, 256), F32)], (P("d"),), P())
def loop(x):
    def turn(x, _):
        return lax.pcast(jnp.tanh(lax.psum(x, "d")), "d", to="varying"), None

    return lax.psum(lax.scan(turn, x, None, length=5)[0], "d")


@mapped([((8, 64), F32)], (P("d"),), P())
def branches(x):
    some = lax.psum(jnp.sum(x), "d") > 0
    return lax.cond(
        some,
        lambda x: lax.psum(x, "d"),
        lambda x: lax.psum(x * 2.0, "d") + lax.psum(jnp.sin(x), "d"),
        x,
    )


@mapped([((8, 32), F32)], (P(("a", "b")),), (P("b"), P("a"), P()), axes="ab")
def mesh(x):
    return lax.psum(x, "a"), lax.psum(x * 2.0, "b"), lax.psum(x * 3.0, ("a", "b"))


@mapped([((8, 100), F32), ((8, 3, 5), F32), ((8, 7), jnp.int32)], (P("d"),) * 3, P())
def variadic(x, y, z):
    return lax.psum((x, y, z), "d")


@mapped([((8 * 4096, 512), F32), ((2048, 2048), F32)], (P("d"), P()), (P("d"), P()))
def overlapped(x, w):
    x = lax.psum_scatter(x, "d", tiled=True)
    w = jnp.tanh(w @ w)
    return lax.ppermute(x, "d", AROUND), jnp.tanh(w @ w)


@mapped([((8 * 2048, 2048), F32), ((2048, 2048), F32)], (P("d"), P()), P())
def layers(x, w):
    sums = []
    for _ in range(2):
        x = jnp.tanh(x @ w)
        sums.append(lax.psum(x, "d"))
    return sums


@mapped([((8, 200), F32)] * 3 + [((8, 7), F32)], (P("d"),) * 4, P())
def packs(*tree):
    options = jc.CommunicationOptions(bytes_per_pack=1024)
    return jc.all_reduce("sum", tree, "d", options=options)
