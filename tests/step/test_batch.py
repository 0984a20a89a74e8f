"""One rule says what the batch of a call is, and which of its arrays may meet, wherever a batch is split."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import close
from flax import nnx
from jax import lax

import jaxcoll as jc

RNG = np.random.default_rng(0)
N = 16  # rows: two on a replica, one in a microbatch of it
X, Y, W = (RNG.normal(size=shape).astype("f") for shape in ((N, 5), (N, 2), (5, 2)))
P = jax.sharding.PartitionSpec


def loss(w, x, y):
    return jnp.mean((x @ w - y) ** 2)


WANT = jax.value_and_grad(loss)(W, X, Y)


# Functions whose batch could be more than one argument, and a call
class Loss:
    def method(self, w, x, y=None):
        return loss(w, x, y)

    def __call__(self, w, *batch):
        return loss(w, *batch)


optional = lambda w, x, y=None: loss(w, x, y)
UNCLEAR = {  # functions whose batch could be more than one argument, and a call
    "three": (loss, (X, Y), {}),
    "a default": (optional, (X, Y), {}),
    "a default by keyword": (optional, (X,), {"y": Y}),
    "keyword only": (lambda w, x, *, y: loss(w, x, y), (X,), {"y": Y}),
    "the second has a default": (lambda w, batch=None: loss(w, *batch), ((X, Y),), {}),
    "*args": (lambda w, *batch: loss(w, *batch), (X, Y), {}),
    "**kwargs": (lambda w, **batch: loss(w, **batch), (), {"x": X, "y": Y}),
    "a decorator without wraps": (lambda *args, **kwargs: loss(*args, **kwargs), (X,), {"y": Y}),
    "a method": (Loss().method, (X, Y), {}),
    "an object": (Loss(), (X, Y), {}),
    "a partial": (functools.partial(optional), (X,), {"y": Y}),
    "jitted": (jax.jit(optional), (X, Y), {}),
}


def by_data_parallel(fun, **settings):
    return jc.data_parallel(jc.value_and_grad(fun, "data"), **settings)


def by_accumulate(fun, **settings):
    inner = jc.accumulate(fun, "data", 2, **settings)

    def outer(w, *args, **kwargs):
        leaves, tree = jax.tree.flatten((args, kwargs))

        def step(w, rows):  # a replica's rows of all arrays, whatever `inner` is to split
            rows = iter(rows)
            args, kwargs = tree.unflatten([next(rows) if np.ndim(x) else x for x in leaves])
            return inner(w, *args, **kwargs)

        return jc.data_parallel(step)(w, [x for x in leaves if np.ndim(x)])

    return outer


ENTRIES = {"data_parallel": by_data_parallel, "accumulate": by_accumulate}


@pytest.mark.parametrize("entry", ENTRIES)
def test_second_argument_is_the_batch(entry):
    """Unless several could be: then the error has the line to write."""
    for fun, args, kwargs in UNCLEAR.values():
        with pytest.raises(ValueError, match="which arguments of .* are the batch") as error:
            ENTRIES[entry](fun)(W, *args, **kwargs)
        batch = eval(re.search(r"batch_argnums=(.*)\)\n", str(error.value))[1])
        close(ENTRIES[entry](fun, batch_argnums=batch)(W, *args, **kwargs), WANT)
    for fun, args, kwargs in CLEAR.values():
        close(ENTRIES[entry](fun)(W, *args, **kwargs), WANT)


CLEAR = {
    "two": (lambda w, b: loss(w, *b), ((X, Y),), {}),
    "two by keyword": (lambda w, b: loss(w, *b), (), {"b": (X, Y)}),
    "a default that is left out": (lambda w, b, flag=True: loss(w, *b), ((X, Y),), {}),
    "a default that has no rows": (lambda w, b, scale=2.0: loss(w, *b) * scale, ((X, Y), 1.0), {}),
    "a default that is None": (lambda w, b, key=0: loss(w, *b), ((X, Y),), {"key": None}),
    "bound by keyword": (
        functools.partial(lambda w, b, *, train: loss(w, *b) if train else w, train=True), ((X, Y),), {}),
    "the rest is empty": (lambda w, b, *rest, **more: loss(w, *b), ((X, Y),), {}),
    "keyword only": (lambda w, *, batch: loss(w, *batch), (), {"batch": (X, Y)}),
}  # fmt: skip


def test_offered_line_omits_other_rows():
    step = jc.data_parallel(lambda w, x, key=None: jc.pmean(jnp.mean(w * x)))
    with pytest.raises(ValueError, match=r"batch_argnums='x'\)"):
        step(1.0, X, jax.random.PRNGKey(0))


def test_step_test_and_elastic_agree():
    def step(w, x, y=None, *, mesh):
        run = lambda w, x, y: lax.pmean(loss(w, x, y), "data")
        specs = P(), P("data"), P("data")
        return jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=P())(w, x, y)

    words = (
        r"of step\(.*\n    jc.assert_same_as_one_device\(step, \*args, batch_argnums=\('x', 'y'\)\)"
    )
    with pytest.raises(ValueError, match=words):
        jc.assert_same_as_one_device(step, W, X, Y)
    jc.assert_same_as_one_device(step, W, X, Y, batch_argnums=("x", "y"))
    for unclear in (lambda w, *batch: (w, 0.0), lambda w, batch=None: (w, 0.0)):
        with pytest.raises(ValueError, match=r"jc.data_parallel\(step, batch_argnums="):
            jc.Elastic(jc.data_parallel(unclear), W)
        jc.Elastic(jc.data_parallel(unclear, batch_argnums=1), W)
    jc.Elastic(jc.data_parallel(lambda w, batch, train=True: (w, 0.0)), W)


# Steps of a batch of which leaves have other numbers of rows. One device gets the whole batch.
NODES, GRAPHS = 32, 8
GRAPH = {
    "nodes": RNG.normal(size=(NODES, 3)).astype("f"),
    "sizes": np.full(GRAPHS, NODES // GRAPHS, "i4"),
    "globals": RNG.normal(size=(GRAPHS, 3)).astype("f"),
}


def graphs(w, graph):
    n, rows = len(graph["sizes"]), len(graph["nodes"])
    owners = jnp.repeat(jnp.arange(n), graph["sizes"], total_repeat_length=rows)
    messages = jnp.tanh((graph["nodes"] + graph["globals"][owners]) * w)
    sums = jax.ops.segment_sum(messages, owners, len(graph["globals"]))
    return jnp.mean((sums + graph["globals"]) ** 2)


def constant_nodes(w, graph):
    """A constant of as many rows as the nodes of a share, or of all: it is no array of rows."""
    nodes, share = graph["nodes"], len(graph["nodes"]) / NODES
    return (
        jnp.mean((nodes + jnp.ones(nodes.shape)) ** 2 * w) + graph["globals"].sum() * share**-1 / 8
    )


def contrast(w, graph):
    """Four others for each query."""
    each = graph["nodes"].reshape(-1, NODES // GRAPHS, 3)
    logits = jnp.einsum("qd,qnd->qn", graph["globals"] * w, each)
    return -jnp.mean(jax.nn.log_softmax(logits)[:, 0]) + jnp.mean(each * graph["globals"][:, None])


@pytest.mark.parametrize("fun", [graphs, constant_nodes, contrast])
def test_uneven_leaves_are_taken(fun):
    want = jax.value_and_grad(fun)(jnp.float32(1.5), GRAPH)
    close(by_data_parallel(fun)(jnp.float32(1.5), GRAPH), want)


def test_uneven_batch_may_change_modules():
    class Counter(nnx.Module):
        def __init__(self):
            self.calls = nnx.BatchStat(jnp.zeros(()))

    @jc.data_parallel
    def step(module, graph):
        module.calls[...] = module.calls[...] + 1
        return module, jc.pmean(graphs(1.0, graph))

    module, value = step(Counter(), GRAPH)
    assert module.calls[...] == 1
    close(value, graphs(1.0, GRAPH))


one, two = np.ones(8, "f"), np.ones(16, "f")
LOOSE = {  # of the rows x and y, which as whole arrays do not fit
    "added": (lambda x, y: x + y, one, two),
    "columns": (lambda x, y: x + y, one[:, None], two[:, None]),
    "after a product": (lambda x, y: x @ np.ones(3, "f") * y, np.ones((8, 3), "f"), two),
    "rows against columns": (lambda x, y: x + y, one, np.ones((16, 8), "f")),
    "several rows against columns": (lambda x, y: x + y, two, np.ones((32, 2), "f")),
    "squeezed": (lambda x, y: x.squeeze() * y, one[:, None], two),
    "flat": (lambda x, y: x.reshape(-1) * y, one[:, None], two),
    "broadcast_to": (lambda x, y: jnp.broadcast_to(x, y.shape) * y, one, two),
    "where": (lambda x, y: jnp.where(x > 0, y, 0), one, two),
    "in a scan": (lambda x, y: lax.scan(lambda c, _: (c + x, None), y, None, 2)[0], one, two),
    "in a program": (lambda x, y: jax.jit(jnp.add)(x, y), one, two),
    "with reductions": (lambda x, y: jc.psum(x, "data") * y, one, two),
}
WORDS = (
    r" has (8|16) rows and .* has (16|32).*whole arrays do not fit.*with more rows .*equally many"
)


@pytest.mark.parametrize("name", LOOSE)
def test_broadcasting_shares_are_refused(name):
    fun, x, y = LOOSE[name]

    @jax.numpy_rank_promotion("allow")
    def mean(x, y):
        return jc.pmean(jnp.mean(fun(x, y)), "data")

    with pytest.raises(ValueError, match=r"data_parallel`: batch\['.'\]" + WORDS):
        jc.data_parallel(lambda batch: mean(batch["x"], batch["y"])).trace({"x": x, "y": y})
    with pytest.raises(ValueError, match="data_parallel`: [xy]" + WORDS):
        jc.data_parallel(mean, batch_argnums=(0, 1)).trace(x, y)


def test_rows_apart_may_differ():
    """They do not meet, or meet on one device, where broadcasting is what it says."""
    apart = lambda x, y: jc.pmean(jnp.mean(x) + jnp.mean(y))
    step = jc.data_parallel(apart, batch_argnums=(0, 1))
    assert step(one, two) == 2
    assert len(jc.inspect(step, one, two).plans) == 1, "no check is left in the program"
    mesh = jax.make_mesh((1,), ("data",))
    step = jc.data_parallel(lambda b: jc.pmean(jnp.mean(b["x"] + b["y"])), mesh=mesh)
    assert step({"x": one[:1], "y": two}) == 2


@pytest.mark.parametrize("entry", ENTRIES)
def test_half_named_batches_are_refused(entry):
    """With one row in a share the unnamed array would broadcast, for another loss in silence."""
    half, whole = (ENTRIES[entry], ("x", "y")) if entry == "data_parallel" else (by_pieces, (1, 2))
    rows = X[:8], Y[:8]
    want = jax.value_and_grad(loss)(W, *rows)
    close(half(loss, batch_argnums=whole)(W, *rows), want)
    with pytest.raises(ValueError, match="y has . rows, like the whole batch, but is not named"):
        half(loss, batch_argnums=1)(W, *rows)
    # All rows of a queue of negatives, and a state like the parameters, are whole on purpose.
    contrast = lambda w, x, queue: jnp.mean(jnp.tanh(x @ w) @ (queue @ w).T)
    assert half(contrast, batch_argnums=1)(W, X[:8], X[:8])[1].shape == W.shape
    decay = lambda w, x, state: jnp.mean(w * x + 0.9 * state)
    assert half(decay, batch_argnums=1)(one, one, one)[1].shape == one.shape


def by_pieces(fun, **settings):
    """Microbatches of one row: a single replica has all eight."""
    step = jc.accumulate(fun, "data", 8, **settings)
    mesh = jax.make_mesh((1,), ("data",))
    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))


def test_broadcasting_pieces_are_refused():
    def add(w, batch):
        return jnp.mean(w * batch["x"] + batch["y"])

    batch = {"x": two, "y": np.ones(32, "f")}
    with pytest.raises(ValueError, match=r"`jc.accumulate`: batch\['x'\] has 2 rows and .* has 4"):
        jc.data_parallel(jc.accumulate(add, "data", 2))(np.float32(1), batch)
    train = jc.diloco(lambda w, state, batch: (w - add(w, batch), state, w))
    with pytest.raises(ValueError, match=r"`diloco`: batch\['.'\]" + WORDS):
        train(train.init(np.float32(0), ()), {"x": one, "y": two})
    elastic = jc.Elastic(
        jc.data_parallel(lambda w, batch: (w - jc.pmean(add(w, batch)), w)), np.float32(0)
    )
    with pytest.raises(ValueError, match=r"data_parallel`: batch\['.'\]" + WORDS):
        elastic.run([{"x": one, "y": two}], 1)
