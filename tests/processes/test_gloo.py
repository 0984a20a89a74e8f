"""Several real processes over Gloo: the same laws where something leaves the process."""

import itertools
import os
import tempfile
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcoll as jc
from jaxcoll._compat.coordination import store

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("types_may_mix")]
RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((16, 5)).astype("f"), RNG.standard_normal(16).astype("f")


def share():
    """This process's rows of 16."""
    rank, n = jax.process_index(), jax.process_count()
    return slice(rank * 16 // n, (rank + 1) * 16 // n)


def here(x):
    return np.asarray(x.addressable_data(0))


def bits(x):
    return np.asarray(x).tobytes()


def mesh_of(*shape, axes=("data",)):
    return jax.sharding.Mesh(np.array(jax.devices()).reshape(shape or -1), axes)


def over(mesh, rows, dtype=None):
    """An array of which each device of a mesh has a row."""
    sharding = jax.NamedSharding(mesh, jax.P(mesh.axis_names))
    get = lambda at: jnp.asarray(rows[at], dtype)
    return jax.make_array_from_callback(rows.shape, sharding, get)


def summed(mesh, of=lambda x: x[0], **options):
    """The program that adds up what a function makes of each replica's rows."""
    options, axes = jc.CommunicationOptions(**options), mesh.axis_names
    add = lambda x: jc.all_reduce("sum", of(x), axes, options=options)
    return jax.jit(jax.shard_map(add, mesh=mesh, in_specs=jax.P(axes), out_specs=jax.P()))


def raised(call, *kinds):
    with pytest.raises(kinds) as caught:
        call()
    return str(caught.value)


def loss(w, x, y):
    return jnp.mean((x @ w - y) ** 2)


def descended():
    """Three steps on one device."""
    w = np.zeros(5, "f")
    for _ in range(3):
        w = w - 0.1 * np.asarray(jax.grad(loss)(w, X, Y))
    return w


class Descent:
    """An optimizer whose state is like the parameters: the sum of its gradients."""

    init = staticmethod(lambda params: jax.tree.map(jnp.zeros_like, params))

    @staticmethod
    def update(grads, state, params=None):
        return jax.tree.map(lambda g: -0.1 * g, grads), jax.tree.map(jnp.add, state, grads)


def test_training_equals_one_device(launch):
    def whole():
        @jc.data_parallel(batch_argnums=(1, 2), options=jc.CommunicationOptions(timeout_seconds=60))
        def step(w, x, y):
            value, grad = jc.value_and_grad(loss, "data")(w, x, y)
            return w - 0.1 * grad, value

        w = np.zeros(5, "f")
        (plan,) = jc.inspect(step, w, X[share()], Y[share()]).plans
        assert str(plan.world) == "2 × cpu, 2 processes"
        assert "leaves over 4 MiB alone" in plan.reasons[0]
        assert len(plan.packs) == 1
        for _ in range(3):
            w, _ = step(w, X[share()], Y[share()])
        np.testing.assert_allclose(here(w), descended(), rtol=1e-5)
        return bits(here(w))

    def by_shards():
        """By an optimizer in shards, whose state is gathered and cut again on the way."""
        optimizer = jc.sharded_optimizer(Descent, "data")

        @jc.data_parallel(batch_argnums=(2, 3))
        def step(w, state, x, y):
            _, grads = jc.value_and_grad(loss, "data", scatter=True)(w, x, y)
            updates, state = optimizer.update(grads, state, w)
            return w + updates, state

        w = np.zeros(5, "f")
        state = optimizer.init(w)
        asked = step.lower(w, state, X[share()], Y[share()]).as_text()
        assert '"stablehlo.reduce_scatter"' not in asked, "the compiler's own is reported wrong"
        for _ in range(3):
            w, state = step(w, state, X[share()], Y[share()])
            w = here(w)
            state = optimizer.shard(optimizer.unshard(state), w)
        np.testing.assert_allclose(w, descended(), rtol=1e-5)
        np.testing.assert_allclose(-0.1 * optimizer.unshard(state), w, rtol=1e-5)
        assert [part.addressable_data(0).shape for part in state.parts] == [(1, 128)]
        return bits(w)

    for first, second in zip(*launch(lambda: (whole(), by_shards()), 2), strict=True):
        assert first == second


def test_shards_train_over_processes(launch):
    """No process has all parameters; one of them saves them."""

    def run():
        whole = {"w": RNG.standard_normal((5, 40)).astype("f"), "b": np.zeros(40, "f")}
        shards = jc.shard(whole, "data")
        mean = lambda params, x: jnp.mean(jnp.tanh(x @ params["w"] + params["b"]) ** 2)

        @jc.data_parallel
        def step(shards, x):
            f = lambda shards, x: mean(jc.all_gather(shards, "data"), x)
            value, grads = jc.value_and_grad(f, "data")(shards, x)
            return jax.tree.map(lambda p, g: p - 0.5 * g, shards, grads), value

        for _ in range(3):
            shards, _ = step(shards, X[share()])
            grads = jax.grad(mean)(whole, X)
            whole = jax.tree.map(lambda p, g: p - 0.5 * np.asarray(g), whole, grads)
        (part,) = shards.parts
        assert sum(s.data.shape[0] for s in part.addressable_shards) * 2 == part.shape[0]
        refused = raised(lambda: jc.save_checkpoint("never.npz", shards), ValueError)
        assert "Call `whole = jc.unshard(tree)` in all processes" in refused
        found = jc.unshard(shards)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, whole)
        draw = lambda: jax.random.uniform(jax.random.key(0), (5, 40))
        np.testing.assert_array_equal(jc.unshard(jc.shard(draw, "data")), draw())
        with tempfile.TemporaryDirectory() as folder:
            jc.save_checkpoint(f"{folder}/last.npz", found)
            again, _ = jc.restore_checkpoint(f"{folder}/last.npz", shards)
        assert again.parts[0].sharding == part.sharding
        jax.tree.map(np.testing.assert_array_equal, jc.unshard(again), found)
        return bits(found["w"])

    first, second = launch(run, 2)
    assert first == second


def test_weak_types_cross_processes(launch):
    """A bfloat16 run with a number in its state goes on from a file as without."""

    def run():
        @jc.data_parallel
        def step(state, x):
            mean = jc.pmean(x.mean().astype(state["w"].dtype))
            return {"w": state["w"] - state["rate"] * mean, "rate": state["rate"] * 0.5}

        start = {"w": jnp.ones(4, jnp.bfloat16), "rate": 0.3}
        batch = np.full(2, 1.0 + jax.process_index(), "f")
        middle = step(start, batch)
        with tempfile.TemporaryDirectory() as folder:
            jc.save_checkpoint(f"{folder}/state.npz", middle)
            restored, _ = jc.restore_checkpoint(f"{folder}/state.npz", start)
        end, again = (step(state, batch) for state in (middle, restored))
        for state in (end, again):
            kinds = {k: (x.dtype.name, x.weak_type) for k, x in state.items()}
            assert kinds == {"w": ("bfloat16", False), "rate": ("float32", True)}
        assert {k: bits(x) for k, x in end.items()} == {k: bits(x) for k, x in again.items()}

    launch(run, 2)


def test_process_without_devices_may_call(launch):
    """Every process calls what only the others have devices for, as JAX allows."""

    def run():
        absent = jax.process_index() == 0
        mesh = jax.sharding.Mesh(np.array(jax.devices()[2:]), ("data",))
        w, x = (
            jax.make_array_from_callback(
                (4,), jax.NamedSharding(mesh, s), lambda at: np.arange(4, dtype="f")[at], dtype="f"
            )
            for s in (jax.P(), jax.P("data"))
        )
        add = lambda w, x: w + jc.all_reduce("sum", x.sum(), "data")
        step = jc.data_parallel(add, mesh=mesh, batch_argnums=1)
        for _ in range(2):
            out = step(w, x)
        parts = [shard.data.tolist() for shard in out.addressable_shards]
        assert parts == [[6.0, 7.0, 8.0, 9.0]] * (0 if absent else 2)
        if absent:
            refused = raised(lambda: jc.check_replicas(w), ValueError)
            assert "all copies of these leaves lie in other processes" in refused
        else:
            assert not jc.check_replicas(w).divergent()
        assert float(jc.MultiWorkerMirroredStrategy().reduce("sum", 1.0, axis=None)) == 3

    launch(run, 3, devices_per_process=2)


def test_others_learn_failed_process(launch):
    """A callback fails on process 0, in whose program the other waits for it."""

    def run():
        first, keys = jax.process_index() == 0, store()

        def call_back(x):
            if first:
                raise OSError("no such host")
            return x

        @jc.data_parallel(options=jc.CommunicationOptions(timeout_seconds=3))
        def step(x):
            x = jax.pure_callback(call_back, jax.ShapeDtypeStruct((), "f"), x.sum())
            return jc.all_reduce("sum", x, "data")

        with pytest.raises((jc.errors.DeadlineExceededError, RuntimeError)) as caught:
            step(np.ones(2, "f"))
        if first:
            assert "no such host" in str(caught.value)
            keys.get("reported", 60)
        else:
            keys.set("reported", "")
            assert caught.value.ranks == (0,)
            why = "Process 0 of 2 failed in it: process 0 raised OSError: no such host."
            assert why in str(caught.value)

    launch(run, 2)


def test_forked_child_saves_alone(launch):
    """A child of a process that has made calls saves what it has, and waits for nobody."""

    def run():
        jc.MultiWorkerMirroredStrategy().reduce("sum", 1.0, axis=None)
        with tempfile.TemporaryDirectory() as folder:
            with warnings.catch_warnings(action="ignore"):
                child = os.fork()
            if not child:
                start = time.monotonic()
                jc.save_checkpoint(f"{folder}/last.npz", {"w": np.arange(3)})
                os._exit(time.monotonic() - start > 5)
            assert os.waitpid(child, 0)[1] == 0
            saved, _ = jc.restore_checkpoint(f"{folder}/last.npz", {"w": np.arange(3)})
            assert saved["w"].tolist() == [0, 1, 2]

    launch(run, 2)


def test_codes_travel_narrow(launch):
    """What travels in a wire format, and of bfloat16 by itself; the bits; the error."""

    def run():
        whole, totals = RNG.standard_normal((2, 3000)).astype("f"), []
        for compression, dtype, kind, size, bar in (
            (None, jnp.bfloat16, "u16", 3000 * 2, 0.002),
            ("int4", jnp.float32, "u8", 48 * 34, 0.13),
        ):
            x = over(mesh_of(), whole, dtype)
            compiled = summed(mesh_of(), compression=compression).lower(x).compile()
            report = jc.inspect(compiled)
            wire = {(c.kind, *c.dtypes) for c in report.collectives}
            assert wire == {("all-gather", kind), ("all-to-all", kind)}
            assert report.wire_bytes == size
            total = here(compiled(x)).astype("f")
            want = np.asarray(jnp.asarray(whole, dtype), "f8").sum(0)
            assert 0 < np.linalg.norm(total - want) / np.linalg.norm(want) < bar
            totals.append(bits(total))
        return totals

    first, second = launch(run, 2)
    assert first == second


def test_first_arguments_are_compared(launch):
    """Rows should differ, state must not, and after each refusal both go on."""

    def run():
        rank = jax.process_index()
        x = X[:4, :3]  # the same on every process
        params = {"b": np.zeros(3, "f"), "w": x[0]}
        differ = params | {"w": x[rank]}
        mean = lambda p, x: jc.all_reduce("mean", (x * p["w"]).sum(), "data")
        named = (lambda w, x: mean(w, x)) if rank else (lambda p, x: mean(p, x))

        def attempt(function, p=params, x=x + rank, warns=False):
            step = function if hasattr(function, "lower") else jc.data_parallel(function)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                result = float(here(step(p, x)))
            ours = [w for w in caught if w.category is jc.errors.SameRowsWarning]
            assert len(ours) == warns
            for each in ours:
                assert each.filename == __file__, "it points at the line of the call"
                assert "all 2 processes pass the same rows in x." in str(each.message)
            return result

        def refuse(function, p=differ, first="p['w']"):
            with pytest.raises(jc.errors.ReplicaDivergenceError) as caught:
                attempt(function, p)
            assert f"The first is {first}: processes 0 | 1. Nothing was run." in str(caught.value)
            return caught.value

        known, refused = jc.data_parallel(mean), jc.data_parallel(mean)
        attempt(known, x=x, warns=True)
        attempt(known, x=x)
        own = attempt(mean)
        assert attempt(named) == own, "another name for a parameter"
        attempt(mean, x=np.ones_like(x))
        refuse(mean)  # a mark that ran before
        refuse(refused)
        refuse(refused)
        assert attempt(refused) == own
        for k in range(2):
            assert attempt(mean if rank == k else known) == own
        other = differ | {"key": jax.random.key(rank)}
        error = refuse(mean, other, "p['key']")
        assert "different values in 2 of 3 leaves" in str(error)
        both = (("0",), ("1",))
        assert error.divergent == {"p['key']": both, "p['w']": both}
        assert attempt(known) == own
        strategy, context = jc.MultiWorkerMirroredStrategy(), jc.get_replica_context
        call = lambda: strategy.run(lambda v: context().all_reduce("sum", v), (x[rank],))
        text = raised(call, jc.errors.ReplicaDivergenceError)
        assert "in 1 of 1 leaf that must be equal" in text
        assert "The first is args[0][0]:" in text

    launch(run, 2)


def test_every_algorithm_over_processes(launch):
    """Over one axis and over two, three processes with two devices each."""
    names = ("native", "ring", "halving_doubling", "shuffle")
    two = ("nccl/xring", "nccl/rechd", "pscpu/pscpu", "nccl/pscpu", "rechd/nccl")
    cases = [*(((6,), {"algorithm": name}) for name in names), *(((3, 2), {"algorithm": name}) for name in two),
             ((6,), {"algorithm": "pscpu", "shards": 2}), ((6,), {"algorithm": "rechd", "shards": 3})]  # fmt: skip

    def run():
        values = RNG.standard_normal((6, 1009)).astype("f")
        exact, size = values.astype("f8").sum(0), np.abs(values.astype("f8")).sum(0)
        found = []
        for shape, asked in cases:
            mesh = mesh_of(*shape, axes=("node", "data")[-len(shape) :])
            out = summed(mesh, **asked)(over(mesh, values))
            got = [np.asarray(s.data) for s in out.addressable_shards]
            assert max(float(np.max(np.abs(g - exact) / size)) for g in got) <= 6 * 2.0**-23, asked
            options = jc.CommunicationOptions(**asked)
            plan = jc.plan(values[0], mesh=mesh, axis_name=mesh.axis_names, options=options)
            assert asked["algorithm"] != "nccl/xring" or plan.algorithm == "shuffle/ring"
            found.append({bits(g) for g in got})
        return found

    for case, *each in zip(cases, *launch(run, 3, devices_per_process=2), strict=True):
        assert len(set.union(*each)) == 1, case


@pytest.mark.usefixtures("optimized")
def test_reproducible_sums_ignore_processes(launch):
    """Those of one process are in tests/collectives/test_reproducible.py, and float16 is as wide."""

    def run():
        draw = lambda dtype, n: RNG.standard_normal((2, 4, n)).astype(jnp.dtype(dtype))
        kinds = itertools.product(("float32", "bfloat16"), (1009, 5))
        factors = {kind: draw(*kind) for kind in kinds}
        names, want = [*factors], {}
        for k, (x, y) in factors.items():
            a, b, c, d = x * y
            want[k] = bits((a + b) + (c + d))

        def sums(chosen, **asked):
            products = lambda pairs: [x[0] * y[0] for x, y in pairs]
            given = [[over(mesh_of(), x, x.dtype) for x in factors[k]] for k in chosen]
            out = summed(mesh_of(), products, **asked)(given)
            return {k: bits(here(x)) for k, x in zip(chosen, out, strict=True)}

        for chosen, asked in (
            (names[1::-1], {"bytes_per_pack": 1 << 20}),
            (names, {"algorithm": "shuffle"}),
            (names[1::-1], {"algorithm": "rechd", "shards": 2}),
        ):
            assert sums(chosen, reproducible=True, **asked) == {k: want[k] for k in chosen}, asked
        native = sums(names[:2], algorithm="native")
        assert native[names[0]] != want[names[0]], "the compiler's own keeps no law"

    launch(run, 2, devices_per_process=2)
