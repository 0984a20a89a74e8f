"""scan_layers: values and gradients are those of one device, and nothing travels in vain."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import close, grid, mapped, mesh_of, per_replica, plans_of, split
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxcoll as jc

LAYERS, WIDTH, N = 4, 16, 8
RNG = np.random.default_rng(0)


def normal(*shape):
    return (RNG.standard_normal(shape) / 4).astype("f")


STACK = {
    "w": normal(LAYERS, WIDTH, WIDTH),
    "v": normal(LAYERS, N, WIDTH),
    "b": normal(LAYERS, WIDTH),
}
SPECS = {"w": P(None, "data"), "v": P(None, "data"), "b": P()}
SHARDED = {"w": True, "v": True, "b": False}
X, MASK = normal(2 * N, WIDTH), normal(WIDTH)
ROWS = P("data")


def layer_of(mask, h, p):
    """It reads a mask, which has a gradient, from around it."""
    h = jnp.tanh(h @ p["w"] + p["b"][None]) * mask[None] + h @ p["v"].T @ p["v"]
    return h, jnp.sum(h**2)


def loss_of(scan, stack, x, mask):
    """The mean over this share's rows, of the last carry and of what the layers return."""
    h, ys = scan(functools.partial(layer_of, mask), x, stack)
    return jnp.mean(h**2) + jnp.sum(ys) / len(x)


def scan_of(**how):
    how = {"sharded": SHARDED, **how}
    return lambda layer, x, stack: jc.scan_layers(layer, x, stack, "data", **how)


@functools.cache
def one_device():
    plain = functools.partial(loss_of, lax.scan)
    return jax.jit(jax.value_and_grad(plain, argnums=(0, 1, 2)))(STACK, X, MASK)


def in_rows(stack):
    """Each replica's rows of leaves that are cut, as a runner takes them."""
    cut = lambda x: np.moveaxis(x.reshape(LAYERS, N, -1, *x.shape[2:]), 1, 0)
    return jax.tree.map(cut, stack)


def whole(rows):
    """The inverse; of "b" the first replica's, which are all of it."""
    joined = lambda x: np.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])
    return {k: x[0] if k == "b" else joined(x) for k, x in rows.items()}


DOTS = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
PACKED = jc.CommunicationOptions(algorithm="halving_doubling", bytes_per_pack=1 << 20)
SCHEDULES = [
    {"ahead": 1},
    {"remat": False, "reduce_op": "sum"},
    {"ahead": 2, "remat": DOTS, "unroll": 3},
    {"ahead": 0, "reduce_op": "sum", "unroll": 2},
    {"options": PACKED, "ahead": 0},
    {"options": jc.CommunicationOptions(reproducible=True), "ahead": 0},
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("runner", "schedules"),
    [("checked", SCHEDULES[1:]), ("unchecked", SCHEDULES[1:2]), ("pmap", SCHEDULES[:1])],
    ids=["checked", "unchecked", "pmap"],
)
def test_plain_grad_reduces_rows(runner, schedules):
    """By the stack, by the carry's first value, and by what the layer reads from around it."""

    def replica(cut, x):
        stack, mask, gradients = {**cut, "b": STACK["b"]}, MASK, []
        if runner == "checked":  # so that types do not sum the mask's gradient
            mask = lax.pcast(mask, "data", to="varying")
        for how in schedules:
            loss = functools.partial(loss_of, scan_of(**how))
            value, (of_stack, of_x, of_mask) = jax.value_and_grad(loss, (0, 1, 2))(stack, x, mask)
            if how.get("reduce_op") == "sum":
                of_stack = jax.tree.map(lambda g: g / N, of_stack)
            mean = jax.tree.map(lambda v: lax.pmean(v, "data"), (value, of_mask))
            gradients.append((mean, of_stack, of_x / N))
        one_layer = functools.partial(loss_of, scan_of(unroll=2))
        return gradients, jax.grad(one_layer)(jax.tree.map(lambda a: a[:1], stack), x, MASK)

    cut = {name: STACK[name] for name in ("w", "v")}
    gradients, of_one = per_replica(runner, replica, N, in_rows(cut), split(N, X))
    value, (of_stack, of_x, of_mask) = one_device()
    for mean, got, got_x in gradients:
        close(jax.tree.map(lambda v: v[0], mean), (value, of_mask), rtol=2e-5)
        close(whole(got), of_stack, rtol=2e-5)
        close(got_x.reshape(X.shape), of_x, rtol=2e-5)
    alone = jax.grad(functools.partial(loss_of, lax.scan))
    first = jax.tree.map(lambda a: a[:1], STACK)
    close(whole(of_one), jax.jit(alone)(first, X, MASK), rtol=2e-5)


ODD = normal(LAYERS, 70, WIDTH) / 4


def tied(h, p):
    w = p["large"]["u"]
    return jnp.tanh(h @ w.T @ w + p["norm"][None])


def tied_loss(scan, stack, x):
    return jnp.mean(scan(tied, x, stack)[0] ** 2)


@pytest.mark.parametrize("how", ["checked", "step"])
def test_shards_of_layers_train(how):
    """Padded packs of leaves whose rows do not divide; a plain leaf beside them is whole."""
    shards = jc.shard({"u": ODD}, "data", stacked=True)
    stack = {"large": shards, "norm": STACK["b"]}
    loss = functools.partial(tied_loss, scan_of(sharded=None))
    plain = lambda layer, x, stack: lax.scan(lambda h, p: (layer(h, p), None), x, stack)
    alone = jax.jit(jax.value_and_grad(functools.partial(tied_loss, plain)))
    value, want = alone({"large": {"u": ODD}, "norm": STACK["b"]}, X)
    if how == "step":
        step = jc.data_parallel(jc.value_and_grad(loss, "data"))
        got_value, got = step(stack, X)
        close(got_value, value)
        gather, scatter, rest = plans_of(step, stack, X)
        assert [p.collective for p in (gather, scatter)] == ["all_gather", "reduce_scatter"]
        assert [leaf.path for leaf in rest.leaves] == [".value", ".grads['norm']"]
        _, *rows = shards.parts[0].shape
        assert rows[0] > N, "those of all replicas"
        assert [leaf.shape for p in (gather, scatter) for leaf in p.leaves] == [tuple(rows)] * 2
    else:
        specs = {"large": shards.replace([P(None, "data")]), "norm": P()}
        got = mapped(jax.grad(loss), (specs, ROWS), specs, N)(stack, X)
    close(got["norm"], want["norm"], rtol=2e-5)
    close(jc.unshard(got["large"]), want["large"], rtol=2e-5)
    assert not np.asarray(got["large"].parts[0]).reshape(LAYERS, -1)[:, ODD[0].size :].any()


HYBRID = grid(2, 4)
WORDS = {"w": "data", "v": "data", "b": False}


def test_hybrid_sharding_is_right():
    """Types alone, without Shards; with them: test_shards_in_a_loss.py."""
    both = ("node", "data")
    scan = lambda layer, x, stack: jc.scan_layers(layer, x, stack, both, sharded=WORDS)
    grad = jax.grad(functools.partial(loss_of, scan))
    got = mapped(grad, (SPECS, P(both), P()), SPECS, HYBRID)(STACK, X, MASK)
    close(got, one_device()[1][0], rtol=2e-5)


CONSTANTS = {  # a layer, the first carry of an array, and the array in a carry
    "results": (lambda x, w: (x @ w, {"rows": 3, "flag": True, "none": None, "row": np.arange(3)}), lambda x: x, lambda c: c),
    "a scale that is reset": (lambda c, w: ((jnp.tanh(c[0] @ w) * c[1], 1.0), None), lambda x: (x, 2.0), lambda c: c[0]),
    "a flag and None": (lambda c, w: ((jnp.where(c[1], c[0] @ w, c[0]), True, None), 1.0), lambda x: (x, False, None), lambda c: c[0]),
    "no carry": (lambda c, w: ((), w[0] ** 2), lambda x: (), lambda c: jnp.zeros(1)),
}  # fmt: skip


@pytest.mark.parametrize("remat", [True, False])
@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_pass_through(name, remat):
    layer, first, last = CONSTANTS[name]

    def loss(w, x, scan):
        carry, results = scan(layer, first(x), w)
        return jnp.mean(last(carry) ** 2) + sum(
            jnp.mean(y.astype("f")) for y in jax.tree.leaves(results)
        )

    def step(w, x):
        scan = lambda layer, x, w: jc.scan_layers(layer, x, w, "data", remat=remat)
        return jc.value_and_grad(lambda w: loss(w, x, scan), "data")(w)

    value, grads = jc.data_parallel(step)(jc.shard(STACK["w"], "data", stacked=True), X)
    want = jax.value_and_grad(lambda w: loss(w, X, lax.scan))(STACK["w"])
    close((value, jc.unshard(grads)), want, rtol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("remat", [True, False])
def test_keys_and_integers_pass_through(remat):
    """Dropout by a key in the carry and by keys in the stack; an integer in each."""
    keys = jax.random.split(jax.random.key(1), LAYERS)

    def layer(carry, p):
        h, key, count = carry
        key, one = jax.random.split(key)
        kept = jax.random.bernoulli(one, 0.5, (WIDTH,)) ^ jax.random.bernoulli(p["key"], 0.5)
        h = jnp.tanh(h @ p["w"]) * kept.astype("f")[None] * p["scale"].astype("f")
        return (h, key, count + p["scale"]), (h[:, 0], count)

    def loss(scan, w, x):
        stack = {"w": w, "key": keys, "scale": np.arange(1, LAYERS + 1, dtype=np.int32)}
        carry = x, jax.random.key(0), np.int32(3)
        (h, _, count), (first, counts) = scan(layer, carry, stack)
        return jnp.mean(h**2) + jnp.mean(first**2), (count, counts)

    def replica(w, x):
        scan = scan_of(sharded={"w": True, "key": False, "scale": False}, remat=remat)
        grads, aux = jax.grad(functools.partial(loss, scan), has_aux=True)(w, x)
        return grads, jax.tree.map(lambda c: lax.pmax(c, "data"), aux)

    got = mapped(replica, (SPECS["w"], ROWS), (SPECS["w"], P()), N)(STACK["w"], X)
    plain = functools.partial(loss, lax.scan)
    close(got, jax.jit(jax.grad(plain, has_aux=True))(STACK["w"], X), rtol=2e-5)


@pytest.mark.parametrize("ahead", [0, 2])
def test_traffic_is_gathers_and_scatter(ahead):
    """Less the gathers of the last layers, which the backward pass finds still there.

    A frozen leaf, which has no gradient, is gathered and not scattered.
    """
    layers = 6  # of fewer, loops of one turn are none, and equal gathers become one
    w, v, rows = normal(layers, WIDTH, WIDTH), normal(layers, N, WIDTH), P(None, "data")

    def loss(w, v, x):
        layer = lambda h, p: jnp.tanh(h @ p["w"]) + h @ p["v"].T @ p["v"]
        stack = {"w": w, "v": v}
        return jnp.mean(jc.scan_layers(layer, x, stack, "data", ahead=ahead, sharded=True)[0] ** 2)

    program = mapped(jax.grad(loss), (rows, rows, ROWS), rows, N, check_vma=False)
    report = jc.inspect(program, w, v, X)
    sent = {}  # in bytes, because the CPU's compiler merges what stands outside of loops
    for c in report.collectives:
        sent[c.kind] = sent.get(c.kind, 0) + c.turns * c.nbytes
    moved, whole = w[0].nbytes, w[0].nbytes + v[0].nbytes
    assert sent == {
        "all-gather": (2 * layers - ahead) * whole // N, "reduce-scatter": layers * moved,
    }  # fmt: skip
    gather, scatter = report.plans
    assert (gather.collective, scatter.collective) == ("all_gather", "reduce_scatter")
    assert (gather.wire_bytes, scatter.wire_bytes) == (whole * 7 // 8, moved * 7 // 8)
    turns = 2 * layers - ahead
    assert report.wire_bytes == turns * gather.wire_bytes + layers * scatter.wire_bytes
    assert f"{turns} times, " in gather.reasons[0]
    assert f"{layers * scatter.wire_bytes:,} wire bytes a device in total" in scatter.reasons[0]
    assert report.rows[0].leaves == ("['w']",)
    assert gather.compiler_options("gpu") == {}  # of a plan for CPUs, unless it is asked to overlap


@pytest.mark.parametrize(("remat", "more"), [(True, 2), (False, 0)])
def test_remat_decides_recomputation(remat, more):
    """Layers are computed in one loop, and differentiated in another, but for the last."""
    scan = scan_of(sharded=True, ahead=0, remat=remat)
    loss = lambda w, x: jnp.mean(scan(lambda h, p: (jnp.tanh(h @ p), None), x, w)[0])
    text = mapped(jax.grad(loss), (SPECS["w"], ROWS), SPECS["w"], N).lower(STACK["w"], X).as_text()
    assert text.count("stablehlo.tanh") == 1 + more


def test_cast_comes_before_gather():
    """Master weights in float32; their gradients travel as they were gathered, and end as they are.

    A layer is traced with the types in which its leaves are gathered, integers in their own.
    """
    numbers, seen = np.ones((LAYERS, N), "i4"), set()

    def loss(scan, w, numbers, x):
        def layer(h, p):
            seen.add((p["w"].dtype.name, p["k"].dtype.name, p["k"].shape))
            return h @ p["w"].astype("f") + p["k"].sum().astype("f"), None

        return jnp.mean(scan(layer, x, {"w": w, "k": numbers})[0])

    scans = [scan_of(sharded=True, gather_dtype=dtype) for dtype in (None, "bfloat16")]
    rows = P(None, "data")
    grads = lambda *args: [jax.grad(functools.partial(loss, scan))(*args) for scan in scans]
    program = mapped(grads, (rows, rows, ROWS), rows, N)
    text = program.lower(STACK["w"], numbers, X).as_text()
    for kind, types in (
        ("all_gather", {"bf16", "f32", "i32"}),
        ("reduce_scatter", {"bf16", "f32"}),
    ):
        ends = (chunk.split("-> tensor<")[1] for chunk in text.split(f'stablehlo.{kind}"')[1:])
        assert {end.split(">")[0].split("x")[-1] for end in ends} == types
    assert seen == {(dtype, "int32", (N,)) for dtype in ("float32", "bfloat16")}
    plain, cast = program(STACK["w"], numbers, X)
    want = jax.grad(functools.partial(loss, lax.scan))(STACK["w"], numbers, X)
    assert cast.dtype == np.float32
    close(plain, want, rtol=2e-5)
    close(cast, want, rtol=0.05, atol=2e-3)


def call(layer=None, carry=None, stack=None, *, specs=SPECS, checks=True, outer=None, **how):
    layer = layer or functools.partial(layer_of, MASK)
    how = {"sharded": SHARDED, **how}

    def replica(stack, x):
        x = x if carry is None else carry(x)
        run = lambda stack: jc.scan_layers(layer, x, stack, how.pop("axis", "data"), **how)
        if outer is None:
            return jax.tree.map(lambda y: jnp.sum(y)[None], run(stack)[1])
        return outer(lambda stack: jnp.mean(run(stack)[0] ** 2))(stack)

    stack = STACK if stack is None else stack
    out = ROWS if outer is None else specs
    return jax.eval_shape(mapped(replica, (specs, ROWS), out, N, check_vma=checks), stack, X)


def rows_of(*shape):
    return {"w": np.ones(shape, "f")}


ONE_LEAF = {"specs": {"w": P(None, "data")}, "sharded": True, "stack": rows_of(2, 16, 16)}
GRAD = functools.partial(jc.grad, axis_name="data")
UNEVEN = {"a": np.ones((4, 8), "f"), "w": np.ones((3, 8), "f")}
OBJECTS = lambda f: lambda s: jc.scan_layers(lambda h, p: h, X, {"w": [object()]}, "data")

BAD = [
    (r"over 'data': leaf \['b'\] of `stacked` is the same .* 8 times", {"sharded": None}),
    ("every replica holds every leaf of `stacked` whole",
     {"stack": rows_of(2, 16, 16), "specs": {"w": P()}, "sharded": False}),
    (r"leaf \['v'\] of `stacked` differs between replicas along 'data'",
     {"sharded": {**SHARDED, "v": False}}),
    (r"`jc.grad` over 'data': leaf .*\['v'\] must be the same .* by its type", {"outer": GRAD}),
    (r"types say nothing here .* whether leaf \['b'\]", {"sharded": None, "checks": False}),
    ("average the gradients of different rows", {"checks": False, "outer": GRAD}),
    ("Leave reduce_op at", {"reduce_op": "sum", "outer": GRAD}),
    (r"the value of `stacked` has shape \(8,\), one number a layer",
     {"specs": ROWS, "sharded": True, "stack": np.ones(64, "f")}),
    (r"leaf \['s'\] of `stacked` is a scalar",
     {"stack": {"s": np.float32(1)}, "specs": P(), "sharded": False}),
    (r"leaf \['w'\]\[0\] of `stacked`: expected an array with the layers first, got obj",
     {"outer": OBJECTS}),
    (r"\['w'\] of `stacked` has 3 layers, and leaf \['a'\] has 4",
     {"sharded": True, "stack": UNEVEN, "specs": P(None, "data")}),
    (r"`stacked` has no layers", {**ONE_LEAF, "stack": rows_of(0, 8)}),
    ("`stacked` has no arrays", {"stack": {}, "sharded": None, "specs": P()}),
    ("`sharded` is a tree that does not fit", {"sharded": {"w": True}}),
    ("expects `sharded` to be True, False, an axis", {"sharded": 3}),
    (r"`sharded` names 'node' for leaf \['b'\]", {"sharded": "node"}),
    (r"the value was float32\[2, 16\], and is bfloat16\[2, 16\]",
     {**ONE_LEAF, "layer": lambda h, p: h.astype(jnp.bfloat16)}),
    (r"its structure is PyTreeDef\(\[\*\]\), and was PyTreeDef\(\*\)",
     {**ONE_LEAF, "layer": lambda h, p: [h]}),
    (r"leaf \[1\] of `carry`: expected an array, got object", {"carry": lambda x: (x, object())}),
    ("dot_general", {"layer": lambda h, p: (h @ p["v"], None)}),
    ("`ahead` must be a non-negative integer", {"ahead": -1}),
    ("`unroll` must be at least 1", {"unroll": 0}),
    ("`remat` must be True, False or a policy", {"remat": "dots"}),
    *(("`gather_dtype` must be None or a floating", {"gather_dtype": x}) for x in (int, "wide")),
    ("`all_gather` has one shard for each replica",
     {"options": jc.CommunicationOptions(shards=2)}),
]  # fmt: skip


@pytest.mark.parametrize(("words", "given"), BAD)
def test_wrong_input_is_refused(words, given):
    of_the_layer = "layer" in given
    with pytest.raises(TypeError if of_the_layer else ValueError, match=words) as caught:
        call(**given)
    assert isinstance(caught.value, jc.errors.AlreadyReducedError) == ("is the same" in words)
    if words == "dot_general":  # a layer's own mistake
        note = next(n for n in caught.value.__notes__ if n.startswith("jaxcoll"))
        assert "['v'] float32[8, 16] from 1 rows on each replica" in note
        assert "`sharded` says which leaves are whole" in note


def test_scan_nests_in_transformations():
    layer = lambda h, p: (jnp.tanh(h @ p), None)
    within = {
        "scan": lambda f, w, x: lax.scan(lambda h, _: (f(h, w), None), x, length=2)[0],
        "checkpoint": lambda f, w, x: jax.checkpoint(f)(x, w),
        "vmap": lambda f, w, x: jax.vmap(lambda row: f(row[None], w)[0])(x),
    }

    def grads(f, w, x):
        losses = {k: lambda w, g=g: jnp.mean(g(f, w, x) ** 2) for k, g in within.items()}
        return {k: jax.grad(loss)(w) for k, loss in losses.items()}

    ours = functools.partial(grads, lambda x, w: jc.scan_layers(layer, x, w, "data")[0])
    got = mapped(ours, (SPECS["w"], ROWS), SPECS["w"], N)(STACK["w"], X)
    plain = functools.partial(grads, lambda x, w: lax.scan(layer, x, w)[0])
    close(got, jax.jit(plain)(STACK["w"], X), rtol=2e-5)


def test_misplaced_scans_are_refused():
    both, rows = ("node", "data"), P(None, "data")
    shards = jc.shard({"u": ODD}, "data", stacked=True)

    def reduced_again(stack, x):
        loss = functools.partial(tied_loss, scan_of(sharded=None))
        return jax.tree.map(lambda g: lax.pmean(g, "data"), jc.grad(loss, "data")(stack, x))

    def of_whole(stack, x):  # of which nothing in the layer's shapes need show it
        layer = lambda h, p: h + jnp.sum(p["v"] ** 2)
        return jc.scan_layers(layer, x, stack, "data", sharded=True)[0].mean()

    def along_one(stack, x):
        scan = lambda layer, x, stack: jc.scan_layers(layer, x, stack, both, sharded=WORDS)
        return jc.grad(functools.partial(loss_of, scan), "data")(stack, x, MASK)

    def second(w, x):
        scan = lambda x: jnp.sum(jc.scan_layers(lambda h, p: h @ p, x, w, "data")[0] ** 2)
        return jnp.sum(jax.grad(scan)(x) ** 2)

    def of_others(cut=lambda part: part, axis="data", **how):
        def replica(shards):
            cut_again = shards.replace([cut(shards.parts[0])])
            return jc.scan_layers(lambda h, p: h, jnp.ones(()), cut_again, axis, **how)[0]

        return mapped(replica, (shards.replace([P(None, axis)]),), mesh=mesh_of(N, axis)), shards

    step = lambda f: jc.data_parallel(f).lower
    for words, f, *args in (
        ("these are shards of a sum that is already reduced", step(reduced_again),
         {"large": shards, "norm": STACK["b"]}, X),
        (r"leaf \['v'\] of `stacked` is declared as one replica's rows, but it is the same on every",
         step(of_whole), {"v": STACK["v"]}, X),
        ("Give both the same `axis_name`", mapped(along_one, (SPECS, P(both)), SPECS, HYBRID), STACK, X),
        ("`scan_layers` has first derivatives only",
         mapped(jax.grad(second), (rows, ROWS), rows, N), STACK["w"], X),
        ("holds Shards along 'data', and `sharded` says False", *of_others(sharded=False)),
        ("got Shards of 8 replicas along 'data'", *of_others(axis="other")),
        (r"whose parts have the shape \(2, 128\); expected \(layers, 2, 128\)",
         *of_others(lambda part: part[0])),
    ):  # fmt: skip
        with pytest.raises(NotImplementedError if "first" in words else ValueError, match=words):
            f(*args)
