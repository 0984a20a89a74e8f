"""`batches`: each row once, equally many for every replica, in an order by seed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import jaxcoll as jc
from jaxcoll._train.batches import order

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


def ids(batches):
    return [batch["id"].tolist() for batch in batches]


def real(rows, weights):
    """The rows of a batch that are no padding."""
    return np.asarray(rows["id"])[np.asarray(weights) == 1].tolist()


@pytest.mark.parametrize("source", [SOURCE, Items(), jax.tree.map(jnp.asarray, SOURCE), "file"])
@pytest.mark.parametrize("seed", [None, 3])
def test_every_row_is_read_once(source, seed, tmp_path):
    if source == "file":
        np.save(tmp_path / "x.npy", SOURCE["x"])
        source = {**SOURCE, "x": np.load(tmp_path / "x.npy", mmap_mode="r")}
    batches, seen = jc.batches(source, 16, seed=seed, uneven="pad"), []
    rows = jax.NamedSharding(jc.data_parallel(lambda x: x).mesh, jax.P("data"))
    for batch, weights in batches:
        assert batch["x"].sharding == rows
        assert (weights.shape, weights.dtype) == ((16,), np.float32)
        np.testing.assert_array_equal(batch["x"], SOURCE["x"][np.asarray(batch["id"])])
        seen += real(batch, weights)
    assert sorted(seen) == list(range(N))
    assert (seen == list(range(N))) == (seed is None)
    assert (len(batches), len(jc.batches(source, 16))) == (4, 3)


def test_each_epoch_has_its_order():
    batches = jc.batches(SOURCE, 48, seed=7)
    (first,), (second,) = ids(batches), ids(batches)
    assert [first, second] == [order(N, 7, epoch)[:48].tolist() for epoch in (0, 1)]
    assert first != second
    assert ids(jc.batches(SOURCE, 48, seed=7)) == [first] != ids(jc.batches(SOURCE, 48, seed=8))
    # From the raw bits of Philox 4x64, which NumPy promises to keep.
    assert order(10, 7, 1).tolist() == [3, 9, 1, 6, 2, 5, 4, 8, 0, 7]


def test_padding_counts_for_nothing():
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


def test_state_continues_an_epoch(tmp_path):
    whole = jc.batches(SOURCE, 8, seed=1)
    epochs = [ids(whole), ids(whole)]
    for given in (1, 5, 6):
        walk = iter(broken := jc.batches(SOURCE, 8, seed=1))
        for _ in range(given):
            next(walk)
        again, other = jc.batches(SOURCE, 8, seed=1), jc.batches(SOURCE, 40, seed=1, uneven="pad")
        jc.save_checkpoint(tmp_path / "c.npz", broken.state)
        state, _ = jc.restore_checkpoint(tmp_path / "c.npz", again.state)
        again.state = other.state = state
        # Five rows are left after six batches: they are dropped, and the next epoch has begun.
        assert ids(again) == (epochs[0][given:] or epochs[1])
        # Another size of batch: the same rows, cut elsewhere.
        seen = [i for batch in other for i in real(*batch)]
        assert seen == order(N, 1, state["epoch"])[int(state["row"]) :].tolist()


def test_broken_epoch_begins_again():
    batches = jc.batches(SOURCE, 8, seed=1)
    first = [batch["id"].tolist() for _, batch in zip(range(2), batches)]  # noqa: B905
    assert batches.state == {"epoch": 0, "row": 16, "rows": N, "seed": 1}
    epoch = ids(batches)
    assert epoch[:2] == first
    assert (batches.state["epoch"], batches.state["row"]) == (1, 0)
    assert ids(batches) != epoch


@pytest.mark.parametrize("names", [("host", "gpu"), ("gpu",)])
def test_two_axes_are_split(names):
    mesh = jax.make_mesh((2, 4), ("host", "gpu"), axis_types=(AxisType.Auto,) * 2)
    axis = names if len(names) > 1 else names[0]
    total = jc.data_parallel(
        lambda x: jc.all_reduce("sum", x["id"].sum(), axis), mesh=mesh, axis_name=axis
    )
    for batch in jc.batches(SOURCE, 16, mesh=mesh, axis_name=axis):
        assert total(batch) == np.asarray(batch["id"]).sum()
        assert total._arguments.place(total._arguments.check((batch,), {})).args[0] is batch


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_workers_share_a_batch(workers, monkeypatch):
    batches = jc.batches(SOURCE, 16, seed=2, uneven="pad")
    monkeypatch.setattr(jax, "local_device_count", lambda: 2)
    for step in (0, 3, 5):
        parts = [batches.share(step, worker, workers) for worker in range(workers)]
        (each,) = {len(weights) for _, weights in parts}
        assert each % 2 == 0
        epoch, at = divmod(step, 4)
        assert [i for part in parts for i in real(*part)] == order(N, 2, epoch)[16 * at :][
            :16
        ].tolist()
    drops = jc.batches(SOURCE, 16, seed=2)
    joined = np.concatenate([drops.share(1, w, workers)["id"] for w in range(workers)])
    assert joined.tolist() == order(N, 2, 0)[16 : 32 - 16 % (2 * workers)].tolist()
    with pytest.raises(ValueError, match="16 rows, fewer than one for each of 18 replicas"):
        drops.share(1, 0, 9)


def test_elastic_trains_on_batches():
    @jc.data_parallel(batch_argnums=1)
    def step(seen, batch):
        rows, real = batch
        return seen + jc.all_reduce("sum", jnp.sum(rows["x"] * real[:, None]), "data"), 0

    seen = jc.Elastic(step, np.float32(0)).run(
        jc.batches(SOURCE, 20, seed=0, uneven="pad").share, 6
    )
    assert seen == 2 * SOURCE["x"].sum()  # two epochs of three batches


def test_wrong_batches_are_refused():
    b = jc.batches(SOURCE, 8)
    continued = lambda state: lambda: setattr(b, "state", state)
    for message, call, *args in (
        ("`batch_size` to be an integer above 0; got 0", jc.batches, SOURCE, 0),
        ("`seed` to be an integer from 0, or None; got -1", lambda: jc.batches(SOURCE, 8, seed=-1)),
        ("`uneven` to be 'drop' or 'pad'; got 'keep'", lambda: jc.batches(SOURCE, 8, uneven="keep")),
        ("the source has 53 rows, fewer than one batch of 64", jc.batches, SOURCE, 64),
        ("the source has 0 rows, fewer than one batch of 8. Give it rows",
         lambda: jc.batches(np.ones((0, 3)), 8, uneven="pad")),
        ("`len` and `\\[i\\]` that returns a row; got list of nothing", jc.batches, [], 8),
        ("got list of int, int", jc.batches, [1, 2], 8),
        ("got list_iterator of list_iterator", jc.batches, iter([1]), 8),
        (r"equally many rows.* got dict of \(8,\), \(9,\)", jc.batches, {"x": np.ones(8), "y": np.ones(9)}, 8),
        (r"12 rows does not divide over 8 replicas \(12 = 8 × 1 \+ 4\)", list, jc.batches(SOURCE, 12)),
        ("`batches` over axis 'model': the mesh has no such axis",
         lambda: jc.batches(SOURCE, 8, axis_name="model", mesh=jax.make_mesh((8,), ("data",)))),
        (r"must be a `batches\(...\).state` for", continued({"epoch": 0})),
        (r"\{'rows': 53, 'seed': -1\}; got \{'epoch': 0, 'row': 0, 'rows': 53, 'seed': 4\}",
         continued(jc.batches(SOURCE, 8, seed=4).state)),
        (r"must be a `batches\(...\).state` for .*'row': -8", continued({**b.state, "row": -8})),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            call(*args)
