"""The mean of integers is that of their values, although their sum does not fit their type."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from cases import OPTIONS, each_row, grid

import jaxcoll as jc
from jaxcoll import distribute

N = 8
NARROW = [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, ml_dtypes.int4]
VALUE = 1_700_000_000  # seconds: eight of them do not fit 32 bits


def inside(reduce, **settings):
    own = lambda x: jax.tree.map(lambda rows: rows[0], x)
    return lambda rows: jc.data_parallel(lambda x: reduce(own(x)), **settings)(rows)


def with_options(options):
    return inside(lambda x: jc.all_reduce("mean", x, options=options))


def coded(compression):
    """Beside a leaf that is coded, as options refuse to code nothing."""
    options, floats = jc.CommunicationOptions(compression=compression), np.ones(1 << 14, "f")
    return inside(lambda x: jc.all_reduce("mean", (x, floats), options=options)[0])


def by(op):
    def reduced(rows):
        value = each_row(N, rows)
        return op.reduce("mean", value, value)[3]

    return reduced


def metrics(x):
    """A metric is a number."""
    means = jax.tree.map(lambda y: [jc.WeightedMean(v[0], 1) for v in y], x)
    return jc.reduce_metrics(means, "data")


def sparse(x):
    slices = lambda y: jc.IndexedSlices(y[None], jnp.array([0]), (1, *y.shape))
    means = jc.pmean(jax.tree.map(slices, x))
    return {name: mean.to_dense()[0] for name, mean in means.items()}


def elastic(rows):
    step = jc.data_parallel(lambda state, x: (state, jc.pmean({k: y[0] for k, y in x.items()})))
    means = []
    jc.Elastic(step, np.float32(0), report=lambda _, mean: means.append(mean)).run([rows], 1)
    return means[0]


def along(rows):
    return STRATEGY.reduce("mean", each_row(N, {k: y.reshape(N, 1, 3) for k, y in rows.items()}), 0)


def run(rows):
    mean = lambda x: jc.get_replica_context().all_reduce("mean", x)
    return {k: y[0] for k, y in STRATEGY.run(mean, (each_row(N, rows),)).items()}


STRATEGY = jc.MirroredStrategy()
COMPRESSED = ("bf16", "int8", "auto")
SCATTERED = inside(lambda x: jc.all_gather(jc.reduce_scatter("mean", x, "data"), "data"))
ENTRIES = {
    "pmean": inside(jc.pmean),
    **{name: with_options(options) for name, options in OPTIONS.items()},
    **{name: coded(name) for name in COMPRESSED},
    "reproducible": with_options(jc.CommunicationOptions(reproducible=True)),
    "two axes": inside(jc.pmean, mesh=grid(2, 4), axis_name=("node", "data")),
    "checked": inside(jc.pmean, check_vma=True),
    "reduce_scatter": SCATTERED,
    "reduce_metrics": inside(metrics),
    "sparse": inside(sparse),
    "Elastic": elastic,
    "run": run,
    "reduce": lambda rows: STRATEGY.reduce("mean", each_row(N, rows), axis=None),
    "reduce along": along,
    **{type(op).__name__ + str(k): by(op) for k, op in enumerate((
        jc.NcclAllReduce(), distribute.HierarchicalCopyAllReduce(), distribute.ReductionToOneDevice(),
        distribute.ReductionToOneDevice(accumulation_fn=sum),
        distribute.CollectiveAllReduce(jax.devices(), 8),
        distribute.MultiWorkerAllReduce([jax.devices()[:4], jax.devices()[4:]], 4)))},
}  # fmt: skip


def examples(dtype):
    info = ml_dtypes.iinfo(dtype)
    rows = np.empty((N, 3, 1), dtype)
    rows[:, 0], rows[:, 1] = info.max, info.min
    rows[:, 2, 0] = [min(VALUE + i, info.max - i) for i in range(N)]
    return rows


@pytest.mark.parametrize("name", ENTRIES)
def test_integer_means_are_right(name):
    given = {str(np.dtype(dtype)): examples(dtype) for dtype in NARROW}
    if name == "Elastic":  # its programs take no arrays of 4 bits
        del given["int4"]
    means = ENTRIES[name](given)
    for dtype, rows in given.items():
        mean = np.asarray(means[dtype])
        assert mean.dtype == np.float32
        want = rows.astype(np.float64).mean(0).squeeze()
        np.testing.assert_allclose(mean.squeeze(), want, rtol=1e-6, err_msg=dtype)
    with jax.enable_x64(True):
        rows = np.full((N, 3, 1), 2**62 + 1)
        mean = np.asarray(ENTRIES[name]({"": rows})[""])
        assert mean.dtype == np.float64
        np.testing.assert_allclose(mean.squeeze(), rows[0].squeeze(), rtol=1e-12)


def test_means_of_flags_are_refused():
    flags = {"": np.ones((N, 3, 1), bool)}
    for name in {*ENTRIES} - {"reduce_metrics", "sparse"}:
        with pytest.raises(ValueError, match=r"booleans have no sum .*`\.astype"):
            ENTRIES[name](flags)
    assert [float(x) for x in ENTRIES["reduce_metrics"](flags)[""]] == [1, 1, 1]
