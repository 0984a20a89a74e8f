"""What each process of a Gloo world runs; prints one line that the tests read."""

import sys
import time
from pathlib import Path

import jaxcoll as jc

jc.initialize()

import hashlib  # noqa: E402
import importlib  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import tempfile  # noqa: E402
import warnings  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from jaxcoll._compat.coordination import store  # noqa: E402


def train():
    """Three steps of data-parallel SGD; every process feeds its own rows."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((16, 5)).astype("f"), rng.standard_normal((16,)).astype("f")
    rank, n = jax.process_index(), jax.process_count()
    share = slice(rank * 16 // n, (rank + 1) * 16 // n)
    options = jc.CommunicationOptions(timeout_seconds=60)

    def loss(w, x, y):
        return jnp.mean((x @ w - y) ** 2)

    @jc.data_parallel(batch_argnums=(1, 2), options=options)
    def step(w, x, y):
        value, grad = jc.value_and_grad(loss, "data")(w, x, y)
        return w - 0.1 * grad, value

    w = np.zeros(5, "f")
    plans = jc.inspect(step, w, x[share], y[share]).plans
    for _ in range(3):
        w, _ = step(w, x[share], y[share])
    w = np.asarray(w.addressable_data(0))
    reference = np.zeros(5, "f")
    for _ in range(3):
        reference = reference - 0.1 * np.asarray(jax.grad(loss)(reference, x, y))
    np.testing.assert_allclose(w, reference, rtol=1e-5)
    sharded = _sharded(loss, x, y, share)
    np.testing.assert_allclose(sharded.pop("w"), reference, rtol=1e-5)
    return {
        **sharded,
        "bits": hashlib.sha256(w.tobytes()).hexdigest(),
        "world": str(plans[0].world),
        "reason": plans[0].reasons[0],
        "packs": len(plans[0].packs),
    }


def in_shards():
    """Parameters that no process has all of on its devices; the file that one of them saves."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((16, 5)).astype("f")
    rank, n = jax.process_index(), jax.process_count()
    share = x[rank * 16 // n : (rank + 1) * 16 // n]
    whole = {"w": rng.standard_normal((5, 40)).astype("f"), "b": np.zeros(40, "f")}
    shards = jc.shard(whole, "data")
    made = jc.shard(lambda: {"w": jax.random.uniform(jax.random.key(0), (5, 40))}, "data")

    def loss(params, x):
        return jnp.mean(jnp.tanh(x @ params["w"] + params["b"]) ** 2)

    @jc.data_parallel
    def step(shards, x):
        f = lambda shards, x: loss(jc.all_gather(shards, "data"), x)
        value, grads = jc.value_and_grad(f, "data")(shards, x)
        return jax.tree.map(lambda p, g: p - 0.5 * g, shards, grads), value

    want = whole
    for _ in range(3):
        shards, _ = step(shards, share)
        grads = jax.grad(loss)(want, x)
        want = jax.tree.map(lambda p, g: p - 0.5 * np.asarray(g), want, grads)
    (part,) = shards.parts
    try:
        jc.save_checkpoint("never.npz", shards)
        refused = ""
    except ValueError as error:
        refused = str(error)
    found, made = jc.unshard(shards), jc.unshard(made)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, want)
    np.testing.assert_array_equal(made["w"], jax.random.uniform(jax.random.key(0), (5, 40)))
    with tempfile.TemporaryDirectory() as folder:
        jc.save_checkpoint(f"{folder}/last.npz", found)
        again, _ = jc.restore_checkpoint(f"{folder}/last.npz", shards)
    back = jc.unshard(again)
    jax.tree.map(np.testing.assert_array_equal, back, found)
    return {
        "refused": refused,
        "rows": [s.data.shape[0] for s in part.addressable_shards],
        "of": part.shape[0],
        "restored": again.parts[0].sharding == part.sharding,
        "bits": hashlib.sha256(found["w"].tobytes()).hexdigest(),
    }


def _sharded(loss, x, y, share):
    """The same steps by an optimizer in shards, whose state is saved and restored on the way."""

    class Descent:  # with a state like the parameters: the sum of its gradients
        init = staticmethod(lambda params: jax.tree.map(jnp.zeros_like, params))

        @staticmethod
        def update(grads, state, params=None):
            state = jax.tree.map(jnp.add, state, grads)
            return jax.tree.map(lambda g: -0.1 * g, grads), state

    optimizer = jc.sharded_optimizer(Descent, "data")

    @jc.data_parallel(batch_argnums=(2, 3))
    def step(w, state, x, y):
        _, grads = jc.value_and_grad(loss, "data", scatter=True)(w, x, y)
        updates, state = optimizer.update(grads, state, w)
        return w + updates, state

    w = np.zeros(5, "f")
    state = optimizer.init(w)
    requested = step.lower(w, state, x[share], y[share]).as_text()
    for _ in range(3):
        w, state = step(w, state, x[share], y[share])
        w = np.asarray(w.addressable_data(0))
        state = optimizer.shard(optimizer.unshard(state), w)
    np.testing.assert_allclose(-0.1 * optimizer.unshard(state), w, rtol=1e-5)
    return {
        "w": w,
        "scatters": requested.count('"stablehlo.reduce_scatter"'),
        "rows": [part.addressable_data(0).shape for part in state.parts],
    }


def outside():
    """Every process calls what only the others have devices for, as JAX allows."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[2:]), ("data",))
    p = jax.sharding.PartitionSpec
    w, x = (
        jax.make_array_from_callback(
            (4,), jax.NamedSharding(mesh, spec), lambda at: np.arange(4, dtype="f")[at], dtype="f"
        )
        for spec in (p(), p("data"))
    )
    step = jc.data_parallel(
        lambda w, x: w + jc.all_reduce("sum", x.sum(), "data"), mesh=mesh, batch_argnums=1
    )
    for _ in range(2):
        out = step(w, x)
    jax.block_until_ready(out)
    try:
        checked = jc.check_replicas(w).divergent()
    except ValueError as error:
        checked = str(error)
    strategy = jc.MultiWorkerMirroredStrategy()
    return {
        "checked": checked,
        "parts": [shard.data.tolist() for shard in out.addressable_shards],
        "after": float(strategy.reduce("sum", 1.0, axis=None)),
    }


def failing():
    """A callback fails on process 0, in whose program the other waits for it."""

    def call_back(x):
        if jax.process_index() == 0:
            raise OSError("no such host")
        return x

    def step(x):
        x = jax.pure_callback(call_back, jax.ShapeDtypeStruct((), "f"), x.sum())
        return jc.all_reduce("sum", x, "data")

    failing = jc.data_parallel(step, options=jc.CommunicationOptions(timeout_seconds=3))
    keys = store()
    try:
        failing(np.ones(2, "f"))
    except jc.errors.DeadlineExceededError as error:
        keys.set("failing/reported", "")
        return {"error": str(error), "ranks": error.ranks}
    except jax.errors.JaxRuntimeError as error:
        keys.get("failing/reported", 60)
        return {"error": str(error)}


def forked():
    """A child of a process that has made calls saves what it has, and waits for nobody."""
    jc.MultiWorkerMirroredStrategy().reduce("sum", 1.0, axis=None)
    with tempfile.TemporaryDirectory() as folder:
        with warnings.catch_warnings(action="ignore"):
            child = os.fork()
        if not child:
            start = time.monotonic()
            jc.save_checkpoint(f"{folder}/last.npz", {"w": np.arange(3)})
            os._exit(time.monotonic() - start > 5)
        status = os.waitpid(child, 0)[1]
        return {
            "status": status,
            "w": jc.restore_checkpoint(f"{folder}/last.npz", {"w": np.arange(3)})[0]["w"].tolist(),
        }


def coded():
    """What travels in each wire format, and of bfloat16 by itself; the bits; the error."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    p, n = jax.sharding.PartitionSpec("data"), len(jax.devices())
    whole = np.random.default_rng(0).standard_normal((n, 3000)).astype("f")

    def stacked(dtype):
        return jax.make_array_from_callback(
            whole.shape, jax.NamedSharding(mesh, p), lambda at: jnp.asarray(whole[at], dtype)
        )

    found = {}
    for name, dtype, compression in (
        ("default", jnp.bfloat16, None),
        ("int4", jnp.float32, "int4"),
    ):
        options = jc.CommunicationOptions(compression=compression)

        def f(x, options=options):
            return jc.all_reduce("sum", x[0], "data", options=options)

        step = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=p, out_specs=jax.P()))
        compiled = step.lower(stacked(dtype)).compile()
        report = jc.inspect(compiled)
        total = np.asarray(compiled(stacked(dtype)).addressable_data(0), "f")
        want = np.asarray(jnp.asarray(whole, dtype), "f8").sum(0)
        found[name] = {
            "wire": sorted({(c.kind, *c.dtypes) for c in report.collectives}),
            "bytes": report.wire_bytes,
            "bits": _hash(total),
            "error": float(np.linalg.norm(total - want) / np.linalg.norm(want)),
        }
    return found


def first_values():
    """What processes bring to a first run is compared: rows that should differ, state that must not."""
    rank = jax.process_index()
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 3)).astype("f")  # the same on every process
    params = {"b": np.zeros(3, "f"), "w": x[0]}
    other = {"b": params["b"], "w": x[rank], "key": jax.random.key(rank)}

    def mean(p, x):
        return jc.all_reduce("mean", (x * p["w"]).sum(), "data")

    def attempt(call):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                result = call()
            except jc.errors.ReplicaDivergenceError as error:
                return {"error": str(error), "divergent": error.divergent}
        ours = [w for w in caught if w.category is jc.errors.SameRowsWarning]
        assert {w.filename for w in ours} <= {__file__}, "it points at the line of the call"
        found = [str(w.message) for w in ours]
        return {"result": float(result.addressable_data(0)), "warned": found}

    if rank:  # another name for a parameter

        def named(w, x):
            return mean(w, x)
    else:

        def named(p, x):
            return mean(p, x)

    differ = params | {"w": x[rank]}
    step, refused = jc.data_parallel(mean), jc.data_parallel(mean)
    strategy = jc.MultiWorkerMirroredStrategy()
    return {
        "same rows": attempt(lambda: step(params, x)),
        "again": attempt(lambda: step(params, x)),
        "own rows": attempt(lambda: jc.data_parallel(mean)(params, x + rank)),
        "other names": attempt(lambda: jc.data_parallel(named)(params, x + rank)),
        "ones": attempt(lambda: jc.data_parallel(mean)(params, np.ones_like(x))),
        "anew": attempt(lambda: jc.data_parallel(mean)(differ, x + rank)),
        **{f"refused {k}": attempt(lambda: refused(differ, x + rank)) for k in range(2)},
        "mended": attempt(lambda: refused(params, x + rank)),
        **{
            f"anew on {k}": attempt(
                lambda k=k: (jc.data_parallel(mean) if rank == k else step)(params, x + rank)
            )
            for k in range(2)
        },
        "other state": attempt(lambda: jc.data_parallel(mean)(other, x + rank)),
        "after": attempt(lambda: step(params, x + rank)),
        "strategy": attempt(
            lambda: strategy.run(
                lambda v: jc.get_replica_context().all_reduce("sum", v), (x[rank],)
            )
        ),
    }


def algorithms():
    """Every algorithm over one axis and over two, three processes with two devices each."""
    p = jax.sharding.PartitionSpec
    flat = ["native", "ring", "halving_doubling", "shuffle"]
    cases = [(("data",), {"algorithm": name}) for name in flat]
    cases += [(("data",), {"algorithm": "pscpu", "shards": 2})]
    cases += [(("data",), {"algorithm": "rechd", "shards": 3})]
    names = ["nccl/xring", "nccl/rechd", "nccl/pscpu", "pscpu/pscpu", "rechd/nccl"]
    cases += [(("node", "data"), {"algorithm": name}) for name in names]
    values = np.random.default_rng(0).standard_normal((6, 1009)).astype("f")
    exact, size = values.astype(np.float64).sum(0), np.abs(values.astype(np.float64)).sum(0)
    results = {}
    for axes, options in cases:
        devices = np.array(jax.devices()).reshape((6,) if len(axes) == 1 else (3, 2))
        mesh = jax.sharding.Mesh(devices, axes)
        sharding = jax.NamedSharding(mesh, p(axes))
        x = jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])
        options = jc.CommunicationOptions(**options)

        def f(v, options=options, axes=axes):
            return jc.all_reduce("sum", v[0], axes, options=options)

        step = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=p(axes), out_specs=p()))
        got = [np.asarray(s.data) for s in step(x).addressable_shards]
        error = max(float(np.max(np.abs(g - exact) / size)) for g in got)
        plan = jc.plan(values[0], mesh=mesh, axis_name=axes, options=options)
        results[repr(options)] = {
            "error": error,
            "bits": [hashlib.sha256(g.tobytes()).hexdigest() for g in got],
            "planned": plan.algorithm,
        }
    return results


def reproducible():
    """Hashes of all replicas' sums of products, for some ways to pack, order and carry them."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    p, n = jax.sharding.PartitionSpec, len(jax.devices())
    rng = np.random.default_rng(0)
    dtypes = (
        "float32",
        "bfloat16",
    )  # float16 is as wide; tests/collectives/test_reproducible.py has it
    names = [f"{name} {dtype}" for dtype in dtypes for name in ("long", "short")]
    host = {
        k: [rng.standard_normal((n, 1009 if "long" in k else 5)) for _ in range(2)] for k in names
    }
    host = {k: [x.astype(jnp.dtype(k.split()[1])) for x in host[k]] for k in names}
    sharding = jax.NamedSharding(mesh, p("data"))
    tree = jax.tree.map(
        lambda x: jax.make_array_from_callback(x.shape, sharding, lambda index: x[index]), host
    )
    ways = {
        "packed, last first": (names[1::-1], {"bytes_per_pack": 1 << 20, "reproducible": True}),
        "shuffled": (names, {"algorithm": "shuffle", "reproducible": True}),
        "cut": (names[1::-1], {"algorithm": "rechd", "shards": 2, "reproducible": True}),
        "native": (names[:2], {"algorithm": "native"}),
    }
    found = {}
    for way, (chosen, options) in ways.items():
        options = jc.CommunicationOptions(**options)

        def f(t, options=options):
            products = [x[0] * y[0] for x, y in t]
            return jc.all_reduce("sum", products, "data", options=options)

        step = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=p("data"), out_specs=p()))
        sums = step([tree[k] for k in chosen])
        found[way] = {k: _hash(x.addressable_data(0)) for k, x in zip(chosen, sums, strict=True)}
    found["reference"] = {}
    for k, (x, y) in host.items():
        terms = list(x * y)
        while len(terms) > 1:
            terms = [a + b for a, b in zip(terms[::2], terms[1::2], strict=True)]
        found["reference"][k] = _hash(terms[0])
    return found


def numbers():
    """A bfloat16 run with a number in its state, and the same from a file in its middle."""

    @jc.data_parallel
    def step(state, x):
        mean = jc.pmean(x.mean().astype(state["w"].dtype))
        return {"w": state["w"] - state["rate"] * mean, "rate": state["rate"] * 0.5}

    first = {"w": jnp.ones(4, jnp.bfloat16), "rate": 0.3}
    rows = np.full(2, 1.0 + jax.process_index(), "f")
    middle = step(first, rows)
    with tempfile.TemporaryDirectory() as folder:
        jc.save_checkpoint(f"{folder}/state.npz", middle)
        restored, _ = jc.restore_checkpoint(f"{folder}/state.npz", first)
    ends = [step(state, rows) for state in (middle, restored)]
    return [
        {k: [x.dtype.name, x.weak_type, np.asarray(x, "f").tolist()] for k, x in end.items()}
        for end in ends
    ]


def local():
    """Steps of local updates beside their simulation, from a checkpoint now and then."""
    import optax
    from diloco_simulation import PARAMS, local_step, rows, simulated

    rank, inner = jax.process_index(), optax.sgd(1e-2, momentum=0.9)
    outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
    train = jc.diloco(local_step(inner), every=4, outer=outer)
    # Whatever a data-parallel step returned is on all processes, and so may a batch be.
    params = jc.data_parallel(lambda p, x: p)(PARAMS, np.zeros((1, 1), "f"))
    first = state = train.init(params, inner.init(PARAMS))
    losses = []
    for t in range(1, 21):
        batch = rows(t, 2)[4 * rank : 4 * rank + 4]
        if t == 7:
            over = jax.NamedSharding(train.mesh, jax.sharding.PartitionSpec("data"))
            batch = jax.make_array_from_process_local_data(over, batch)
        state, loss = train(state, batch)
        losses.append(float(loss[0]))
        if t % 8 == 7:
            with tempfile.TemporaryDirectory() as folder:
                jc.save_checkpoint(f"{folder}/state.npz", state)
                state, _ = jc.restore_checkpoint(f"{folder}/state.npz", first)
    shared, own, values = simulated(inner, 2, 20, every=4, outer=outer)
    mine = jax.tree.map(lambda x: x[rank : rank + 1], own)
    differences = jax.tree.map(
        lambda a, b: float(np.abs(np.asarray(a) - np.asarray(b)).max()),
        (state.shared, state.replicas[0], losses),
        (shared, mine, values[:, rank].tolist()),
    )
    other, differ = jc.diloco(local_step(inner), every=1), PARAMS | {"w": np.float32(rank)}
    spec = jax.sharding.PartitionSpec
    over = {
        k: jax.NamedSharding(train.mesh, s) for k, s in (("same", spec()), ("rows", spec("data")))
    }
    put = jax.make_array_from_process_local_data
    away = [d for d in jax.devices() if d.process_index != rank]
    absent = jc.diloco(local_step(inner), mesh=jax.sharding.Mesh(away, ("data",)))
    calls = {
        "differ": lambda: other(other.init(differ, inner.init(differ)), rows(0, 1)),
        "batch": lambda: train(first, put(over["same"], rows(0, 1))),
        "params": lambda: other.init({"w": put(over["rows"], np.ones((1, 2), "f"))}, ()),
        "absent": lambda: absent.init(PARAMS, ()),
    }
    errors = {}
    for name, call in calls.items():
        try:
            call()
        except (ValueError, jc.errors.ReplicaDivergenceError) as found:
            errors[name] = str(found)
    return {
        "errors": errors,
        "difference": max(jax.tree.leaves(differences)),
        "bits": _hash(np.concatenate([np.ravel(x) for x in jax.tree.leaves(state.shared)])),
    }


def _hash(array):
    return hashlib.sha256(np.asarray(array).tobytes()).hexdigest()


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1]))
    others = {name: importlib.import_module(name) for name in sys.argv[1:] if name not in globals()}
    found = {name: module.found for name, module in others.items()}
    print("RESULT " + json.dumps({name: {**globals(), **found}[name]() for name in sys.argv[1:]}))
