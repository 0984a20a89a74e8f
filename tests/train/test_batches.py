"""`batches` and `prefetch`: each row once, equally many for every replica, in an order by seed."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import jaxcoll as jc
from jaxcoll._train.rows import order

N = 53
SOURCE = {"x": np.arange(N * 3.0, dtype="f").reshape(N, 3), "id": np.arange(N)}


class Items:
    """What PyTorch calls a map-style data set."""

    def __init__(self, rows=N):
        self.rows, self.read = rows, []

    def __len__(self):
        return self.rows

    def __getitem__(self, i):
        self.read.append(i)
        return {"x": SOURCE["x"][i], "id": i}


class Tensor:
    """As a framework's tensor: no numpy array, but one can be made of it."""

    def __init__(self, value):
        self.value = np.asarray(value)

    def __array__(self, dtype=None, copy=None):
        return self.value if dtype is None else self.value.astype(dtype)


def ids(batches):
    return [batch["id"].tolist() for batch in batches]


@pytest.mark.parametrize("source", [SOURCE, Items(), jax.tree.map(jnp.asarray, SOURCE)])
@pytest.mark.parametrize("seed", [None, 3])
def test_every_row_is_read_once_an_epoch_beside_its_own(source, seed):
    batches = jc.batches(source, 16, seed=seed, uneven="pad")
    seen = []
    for batch, weights in batches:
        assert batch["x"].sharding == jax.sharding.NamedSharding(
            jc.data_parallel(lambda x: x).mesh, jax.P("data")
        )
        assert weights.shape == (16,)
        assert weights.dtype == np.float32
        np.testing.assert_array_equal(batch["x"], SOURCE["x"][np.asarray(batch["id"])])
        seen += np.asarray(batch["id"])[np.asarray(weights) == 1].tolist()
    assert sorted(seen) == list(range(N))
    assert (seen == list(range(N))) == (seed is None)
    assert len(batches) == 4
    assert len(jc.batches(source, 16)) == 3


def test_an_epoch_is_in_an_order_of_its_own_and_no_numpy_changes_it():
    batches = jc.batches(SOURCE, 48, seed=7)
    (first,), (second,) = ids(batches), ids(batches)
    assert first != second
    assert first == order(N, 7, 0)[:48].tolist()
    assert second == order(N, 7, 1)[:48].tolist()
    assert ids(jc.batches(SOURCE, 48, seed=7)) == [first] != ids(jc.batches(SOURCE, 48, seed=8))
    # From the raw bits of Philox 4x64, which NumPy promises to keep.
    assert order(10, 7, 1).tolist() == [3, 9, 1, 6, 2, 5, 4, 8, 0, 7]


def test_a_memory_mapped_array_is_read_by_rows(tmp_path):
    np.save(tmp_path / "x.npy", SOURCE["x"])
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    for batch in jc.batches({"x": mapped, "id": SOURCE["id"]}, 16, seed=0):
        np.testing.assert_array_equal(batch["x"], SOURCE["x"][np.asarray(batch["id"])])


def test_padding_is_a_copy_of_a_real_row_and_counts_for_nothing():
    def loss(w, batch):
        rows, real = batch
        return jc.WeightedLoss(jnp.sum(jnp.log(rows["x"][:, 0] + 1) * w * real), jnp.sum(real))

    step = jc.data_parallel(jc.value_and_grad(loss, "data"))
    # 53 rows over 8 replicas: a batch of 53 has 56 places.
    (batch,) = jc.batches(SOURCE, N, uneven="pad")
    assert batch[0]["id"].tolist() == [*range(N), 52, 52, 52]
    value, grad = step(np.float32(2), batch)
    want = np.log(SOURCE["x"][:, 0] + 1).mean()
    np.testing.assert_allclose([value, grad], [2 * want, want], rtol=1e-6)


def test_a_state_leaves_out_what_was_given_and_not_what_was_read_ahead():
    whole = jc.batches(SOURCE, 8, seed=1)
    epochs = [ids(whole), ids(whole)]
    for given in (1, 5, 6):
        broken = jc.batches(SOURCE, 8, seed=1, prefetch=3)
        walk = iter(broken)
        for _ in range(given):
            next(walk)
        state = jax.tree.map(np.asarray, broken.state)  # as a checkpoint returns it
        again = jc.batches(SOURCE, 8, seed=1)
        again.state = state
        # Five rows are left after six batches: they are dropped, and the next epoch has begun.
        assert ids(again) == (epochs[0][given:] or epochs[1])
        # Another size of batch: the same rows, cut elsewhere.
        other = jc.batches(SOURCE, 40, seed=1, uneven="pad")
        other.state = state
        seen = [i for b, w in other for i in np.asarray(b["id"])[np.asarray(w) == 1].tolist()]
        want = order(N, 1, state["epoch"])[int(state["row"]) :]
        assert seen == want.tolist()


def test_a_broken_off_for_begins_its_epoch_again_and_a_complete_one_the_next():
    batches = jc.batches(SOURCE, 8, seed=1)
    first = []
    for batch in batches:
        first.append(batch["id"].tolist())
        if len(first) == 2:
            break
    assert batches.state == {"epoch": 0, "row": 16, "rows": N, "seed": 1}
    epoch = ids(batches)
    assert epoch[:2] == first
    assert batches.state["epoch"] == 1
    assert batches.state["row"] == 0
    assert ids(batches) != epoch


def test_a_state_goes_through_a_checkpoint(tmp_path):
    batches = jc.batches(SOURCE, 8)
    walk = iter(batches)
    next(walk)
    jc.save_checkpoint(tmp_path / "c.npz", batches.state)
    again = jc.batches(SOURCE, 8)
    again.state, _ = jc.restore_checkpoint(tmp_path / "c.npz", again.state)
    assert ids(again) == ids(batches)[1:]


def wait_for(read, n):
    """Until so many were read by another thread; none more may come."""
    until = time.monotonic() + 60
    while len(read) < n and time.monotonic() < until:
        time.sleep(0.001)
    assert read == list(range(n))


def test_batches_are_read_ahead_and_no_further():
    items = Items(40)
    walk = iter(jc.batches(items, 8, prefetch=2))
    assert items.read == []
    for rows in (24, 32, 40, 40, 40):
        assert next(walk)["id"].shape == (8,)
        wait_for(items.read, rows)
    assert next(walk, None) is None
    walk = iter(jc.batches(items := Items(40), 8, prefetch=0))
    for rows in (8, 16):
        next(walk)
        assert items.read == list(range(rows))


def test_what_reading_raises_is_raised_where_the_batch_is_asked_for():
    class Broken(Items):
        def __getitem__(self, i):
            if i == 8:
                raise OSError("no such row")
            return super().__getitem__(i)

    walk = iter(jc.batches(Broken(), 8))
    assert next(walk)["id"].tolist() == list(range(8))
    with pytest.raises(OSError, match="no such row"):
        next(walk)


@pytest.mark.parametrize("names", [("host", "gpu"), ("gpu",)])
def test_a_mesh_of_two_axes(names):
    mesh = jax.make_mesh((2, 4), ("host", "gpu"), axis_types=(AxisType.Auto,) * 2)
    axis = names if len(names) > 1 else names[0]
    total = jc.data_parallel(
        lambda x: jc.all_reduce("sum", x["id"].sum(), axis), mesh=mesh, axis_name=axis
    )
    for batch in jc.batches(SOURCE, 16, mesh=mesh, axis_name=axis):
        assert total(batch) == np.asarray(batch["id"]).sum()
        assert total._arguments.placed(total._arguments.asked((batch,), {})).args[0] is batch


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_workers_share_the_batch_of_a_step(workers, monkeypatch):
    batches = jc.batches(SOURCE, 16, seed=2, uneven="pad")
    monkeypatch.setattr(jax, "local_device_count", lambda: 2)
    for step in (0, 3, 5):
        parts = [batches.share(step, worker, workers) for worker in range(workers)]
        assert len({len(weights) for _, weights in parts}) == 1
        assert len(parts[0][1]) % 2 == 0
        seen = [i for rows, weights in parts for i in rows["id"][weights == 1].tolist()]
        epoch, at = divmod(step, 4)
        assert seen == order(N, 2, epoch)[16 * at :][:16].tolist()
    drops = jc.batches(SOURCE, 16, seed=2)
    if workers == 3:
        with pytest.raises(ValueError, match="16 rows does not divide over 6 replicas"):
            drops.share(0, 0, 3)
    else:
        joined = np.concatenate([drops.share(1, w, workers)["id"] for w in range(workers)])
        assert joined.tolist() == order(N, 2, 0)[16:32].tolist()


def test_elastic_trains_on_them():
    @jc.data_parallel(batch_argnums=1)
    def step(seen, batch):
        rows, real = batch
        return seen + jc.all_reduce("sum", jnp.sum(rows["x"] * real[:, None]), "data"), 0

    seen = jc.Elastic(step, np.float32(0)).run(
        jc.batches(SOURCE, 20, seed=0, uneven="pad").share, 6
    )
    assert seen == 2 * SOURCE["x"].sum()  # two epochs of three batches


@pytest.mark.parametrize("kind", ["tuples of tensors", "list", "jax"])
def test_a_loader_is_placed_as_it_yields(kind):
    make = {
        "tuples of tensors": lambda k: (Tensor(SOURCE["x"][k : k + 16]), Tensor(np.arange(16))),
        "list": lambda k: [SOURCE["x"][k : k + 16], np.arange(16)],
        "jax": lambda k: (jnp.asarray(SOURCE["x"][k : k + 16]), jnp.arange(16)),
    }[kind]
    found = list(jc.prefetch([make(0), make(16)]))
    assert [type(batch) for batch in found] == [type(make(0))] * 2
    for k, (x, y) in zip((0, 16), found, strict=True):
        np.testing.assert_array_equal(x, SOURCE["x"][k : k + 16])
        assert len(x.sharding.device_set) == 8
        assert y.dtype == np.int32


@pytest.mark.parametrize("size", [0, 1, 2])
def test_a_loader_may_use_the_same_memory_again(size):
    def loader():
        memory = np.zeros((1024, 8), "f")
        for k in range(6):
            memory[:] = k
            yield memory
        memory[:] = -1

    found = [np.asarray(batch) for batch in jc.prefetch(loader(), size)]
    assert [set(batch.ravel().tolist()) for batch in found] == [{k} for k in range(6)]


@pytest.mark.parametrize("uneven", ["drop", "pad"])
def test_a_loaders_short_batches(uneven):
    loader = [SOURCE["x"][:16], SOURCE["x"][16:29], SOURCE["x"][29:45]]
    found = list(jc.prefetch(iter(loader), uneven=uneven))
    if uneven == "drop":
        assert [x.shape[0] for x in found] == [16, 16]
        np.testing.assert_array_equal(found[1], loader[2])
        return
    assert [int(weights.sum()) for _, weights in found] == [16, 13, 16]
    for (x, weights), rows in zip(found, loader, strict=True):
        np.testing.assert_array_equal(np.asarray(x)[np.asarray(weights) == 1], rows)
        assert (np.asarray(x)[len(rows) :] == rows[-1]).all()


def test_a_loader_is_read_ahead_and_no_further():
    read = []

    def loader():
        for k in range(5):
            read.append(k)
            yield np.full(8, k)

    walk = jc.prefetch(loader(), 1)
    assert read == []
    for k in range(4):
        assert next(walk)[0] == k
        wait_for(read, k + 2)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: jc.batches(SOURCE, 0), "`batch_size` to be an integer above 0; got 0"),
        (lambda: jc.batches(SOURCE, 8, seed=-1), "`seed` to be an integer from 0, or None; got -1"),
        (lambda: jc.batches(SOURCE, 8, uneven="keep"), "`uneven` to be 'drop' or 'pad'; got 'keep'"),
        (lambda: jc.batches(SOURCE, 8, prefetch=True), "a whole number of batches ahead, from 0; got True"),
        (lambda: jc.batches(SOURCE, 64), "the source has 53 rows, fewer than one batch of 64"),
        (lambda: jc.batches([], 8), "`len` and `\\[i\\]` that gives a row; got list, empty"),
        (lambda: jc.batches([1, 2], 8), "got list in which one leaf is int, without rows"),
        (lambda: jc.batches(iter([1]), 8), "got list_iterator. What gives one batch after another"),
        (lambda: jc.batches({"x": np.ones(8), "y": np.ones(9)}, 8),
         r"source\['x'\] has 8, and source\['y'\] 9"),
        (lambda: list(jc.batches(SOURCE, 12)), r"12 rows does not divide over 8 replicas \(12 = 8 × 1 \+ 4\)"),
        (lambda: jc.batches(SOURCE, 8, axis_name="model", mesh=jax.make_mesh((8,), ("data",))),
         "`batches` over axis 'model': the mesh has no such axis"),
        (lambda: setattr(jc.batches(SOURCE, 8), "state", {"epoch": 0}), r"must be what `batches\(...\).state` was"),
        (lambda: setattr(jc.batches(SOURCE, 8), "state", jc.batches(SOURCE, 8, seed=4).state),
         "it is of 53 rows in the order of seed 4, and these are of 53 rows and seed -1"),
        (lambda: setattr(b := jc.batches(SOURCE, 8), "state", {**b.state, "row": -8}),
         "an epoch from 0 and a row from 0 to 52; got 0 and -8"),
        (lambda: jc.prefetch(3), "expects an iterable of batches; got int"),
        (lambda: list(jc.prefetch([np.ones(9)])), "batch 0 of the loader has 9 rows, which do not divide over this process's 8"),
        (lambda: list(jc.prefetch([np.ones(8), np.ones(16)])), "batch 1 of the loader has 16 rows, more than the first"),
        (lambda: list(jc.prefetch([np.float32(1)])), r"at least one; its shapes are: \(\)"),
        (lambda: list(jc.prefetch([(np.ones(8), np.ones(9))])), r"its shapes are: \(8,\), \(9,\)"),
        (lambda: list(jc.prefetch([{}])), "its shapes are: none"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)  # fmt: skip
def test_what_cannot_be_batches_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()
