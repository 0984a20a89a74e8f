"""Programs as people write them, for eight devices: what compare_hlo.py compiles and compares.

Each entry of `PROGRAMS` makes a function and its arguments, as shapes with shardings, for a line of
eight devices.
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
PROGRAMS: dict[str, Callable[[np.ndarray], tuple[Callable, tuple]]] = {}


def mapped(shapes, in_specs, out_specs, axes="d", **options):
    """Register a function of `shard_map` over a line, or over a grid of 2 by 4 for two axes."""

    def register(function):
        def make(line):
            grid = line.reshape((2, 4) if len(axes) > 1 else 8)
            mesh = Mesh(grid, tuple(axes))
            program = jax.shard_map(
                function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options
            )
            return program, _arguments(mesh, shapes, in_specs)

        PROGRAMS[function.__name__] = make
        return function

    return register


def sharded(shapes, specs, axes="d", out=None):
    """Register a function of `jit` whose arguments are sharded."""

    def register(function):
        def make(line):
            grid = line.reshape((2, 4) if len(axes) > 1 else 8)
            mesh = Mesh(grid, tuple(axes))
            shardings = None if out is None else jax.tree.map(lambda s: NamedSharding(mesh, s), out)
            options = {} if out is None else {"out_shardings": shardings}
            return functools.partial(function, mesh), _arguments(mesh, shapes, specs), options

        PROGRAMS[function.__name__] = make
        return function

    return register


def _arguments(mesh, shapes, specs):
    return tuple(
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for (shape, dtype), spec in zip(shapes, specs, strict=True)
    )


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


@sharded(LAYERS, (P(), P("d")), out=P())
def data_parallel_unrolled(mesh, w, x):
    return gradient_step(mlp, w, x)


@sharded(LAYERS, (P(), P("d")), out=P())
def data_parallel_scanned(mesh, w, x):
    return gradient_step(scanned_mlp, w, x)


@sharded(LAYERS, (P(None, "d"), P("d")), out=P(None, "d"))
def fsdp_unrolled(mesh, w, x):
    return gradient_step(mlp, w, x)


@sharded(LAYERS, (P(None, "d"), P("d")), out=P(None, "d"))
def fsdp_scanned(mesh, w, x):
    return gradient_step(scanned_mlp, w, x)


@sharded(LAYERS, (P(None, "a", "b"), P("a", "b")), axes="ab", out=P(None, "a", "b"))
def fsdp_and_tensor_parallel(mesh, w, x):
    return gradient_step(mlp, w, x)


@sharded(LAYERS, (P(None, "a", "b"), P("a", "b")), axes="ab", out=P(None, "a", "b"))
def fsdp_and_tensor_parallel_scanned(mesh, w, x):
    return gradient_step(scanned_mlp, w, x)


@sharded(
    [((256, 1024), BF16), ((1024, 256), BF16), ((512, 256), BF16)],
    (P(None, "d"), P("d"), P()),
    out=P(),
)
def tensor_parallel(mesh, up, down, x):
    return jnp.tanh(x @ up) @ down


@sharded(
    [((256, 1024), BF16), ((1024, 256), BF16), ((1024, 256), BF16)],
    (P(None, "d"), P("d"), P("d")),
    out=P("d"),
)
def sequence_parallel(mesh, up, down, x):
    return jnp.tanh(x @ up) @ down


@sharded(
    [((4096, 1024), BF16), ((1024, 4096), BF16), ((8192, 1024), BF16)],
    (P("d"), P(None, "d"), P("d")),
    out=P(None, "d"),
)
def windowed_products(mesh, w, up, x):
    return (x @ up) @ w


@mapped([((8 * 512, 512), BF16), ((512, 512), BF16)], (P("d"), P("d")), P("d"))
def sharded_optimizer(x, w):
    whole = lax.all_gather(w, "d", tiled=True)
    g = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w).astype(F32)))(whole)
    return w - lax.psum_scatter(g, "d", tiled=True)


@mapped([((8 * 4096, 512), F32), ((8 * 1000, 7), F32)], (P("d"), P("d")), (P("d"), P("d")))
def scatters(x, y):
    return lax.psum_scatter(x, "d", tiled=True), lax.psum_scatter(y, "d", tiled=True)


@mapped(
    [((8 * 8 * 64, 128), BF16), ((8, 128, 512), BF16), ((8, 512, 128), BF16)], (P("d"),) * 3, P("d")
)
def experts(tokens, up, down):
    routed = lax.all_to_all(tokens.reshape(8, 64, 128), "d", 0, 0, tiled=True)
    done = jnp.tanh(routed.reshape(-1, 128) @ up[0]) @ down[0]
    return lax.all_to_all(done.reshape(8, 64, 128), "d", 0, 0, tiled=True).reshape(-1, 128)


@mapped([((8, 128, 512), BF16), ((8 * 8 * 64, 128), BF16)], (P("d"), P("d")), P("d"))
def expert_gradients(up, tokens):
    def loss(up):
        routed = lax.all_to_all(tokens.reshape(8, 64, 128), "d", 0, 0, tiled=True)
        return jnp.sum(lax.all_to_all(jnp.tanh(routed @ up[0]), "d", 0, 0, tiled=True).astype(F32))

    return jax.grad(loss)(up)


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


@mapped(ROWS, (P("d"),) * 3, P("d"))
def ring_attention_unrolled(q, k, v):
    state = zeros(q)
    for turn in range(8):
        state = attend(q, k, v, state)
        if turn < 7:
            k, v = lax.ppermute((k, v), "d", AROUND)
    return state[0] / state[1]


@mapped(ROWS, (P("d"),) * 3, P("d"))
def ring_attention_scanned(q, k, v):
    def turn(carry, _):
        k, v, state = carry
        arriving = lax.ppermute((k, v), "d", AROUND)
        return (*arriving, attend(q, k, v, state)), None

    (_, _, state), _ = lax.scan(turn, (k, v, zeros(q)), None, length=8)
    return state[0] / state[1]


@mapped(ROWS, (P("d"),) * 3, P("d"))
def ring_attention_gradients(q, k, v):
    def loss(q, k, v):
        def turn(carry, _):
            k, v, state = carry
            return (*lax.ppermute((k, v), "d", AROUND), attend(q, k, v, state)), None

        (_, _, state), _ = lax.scan(turn, (k, v, zeros(q)), None, length=8)
        return jnp.sum(state[0] / state[1])

    return jax.grad(loss)(q, k, v)


STAGES = [((8, 256, 256), BF16), ((6, 64, 256), BF16)]


@mapped(STAGES, (P("d"), P()), P(), check_vma=False)
def pipeline_scanned(w, batches):
    def tick(x, batch):
        x = jnp.tanh(jnp.where(lax.axis_index("d") == 0, batch, x) @ w[0])
        return lax.ppermute(x, "d", AROUND[:-1]), x

    _, out = lax.scan(tick, jnp.zeros_like(batches[0]), batches)
    return lax.psum(out, "d")


@mapped(STAGES, (P("d"), P()), P(), check_vma=False)
def pipeline_unrolled(w, batches):
    x, out = jnp.zeros_like(batches[0]), []
    for batch in batches:
        x = jnp.tanh(jnp.where(lax.axis_index("d") == 0, batch, x) @ w[0])
        out.append(x)
        x = lax.ppermute(x, "d", AROUND[:-1])
    return lax.psum(jnp.stack(out), "d")


@mapped([((8, 64, 256), F32), ((256, 256), F32)], (P("d"), P()), P(), check_vma=False)
def accumulated(x, w):
    def micro(total, x):
        return total + jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w), None

    total, _ = lax.scan(micro, jnp.zeros_like(w), jnp.broadcast_to(x, (4, *x.shape)))
    return lax.psum(total, "d")


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


@mapped([((8, 64), F32)], (P("d"),), P("d"), check_vma=False)
def branches(x):
    return lax.switch(
        jnp.int32(lax.psum(jnp.sum(x), "d")) % 3,
        [
            lambda x: lax.psum(x, "d"),
            lambda x: lax.psum(x * 2.0, "d") + lax.psum(jnp.sin(x), "d"),
            lambda x: x,
        ],
        x,
    )


@mapped([((8 * 512, 256), F32)], (P(("a", "b")),), P(), axes="ab", check_vma=False)
def hierarchical(x):
    part = lax.psum(lax.psum_scatter(x, "b", tiled=True), "a")
    return lax.all_gather(part, "b", tiled=True)


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


@mapped(
    [((8 * 64, 256), F32), ((256, 256), F32), ((256,), F32)],
    (P("d"), P(), P()),
    (P(), P()),
    check_vma=False,
)
def jaxcoll_packs(x, w, b):
    g = jax.grad(lambda p: jnp.mean(jnp.tanh(x @ p[0] + p[1][None])))((w, b))
    return jc.all_reduce("mean", g, "d", options=jc.CommunicationOptions(bytes_per_pack=1 << 17))


def build(name: str, line: np.ndarray) -> tuple[Any, tuple]:
    """Return the jitted program and its arguments."""
    function, arguments, *options = PROGRAMS[name](line)
    return jax.jit(function, **(options[0] if options else {})), arguments
