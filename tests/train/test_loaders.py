"""The loaders of the page "Your data", each where it is installed."""

import re
from pathlib import Path

import numpy as np
import pytest

import jaxcoll as jc

PAGE = Path(__file__).parents[2] / "docs" / "your_data.md"
CODE = dict(re.findall(r"^\| (PyTorch|grain|tf\.data) \| `(.*?)` \|", PAGE.read_text("utf8"), re.M))
N, ROWS = 4, np.arange(128, dtype="f")


def torch():
    sampler = pytest.importorskip("torch.utils.data.distributed").DistributedSampler
    return vars(pytest.importorskip("torch.utils.data")) | {"DistributedSampler": sampler}


def grain():
    return {"grain": pytest.importorskip("grain"), "seed": 3}


def tensorflow():
    tensorflow = pytest.importorskip("tensorflow")
    return {"data": tensorflow.data.Dataset.from_tensor_slices(ROWS)}


NAMES = {"PyTorch": torch, "grain": grain, "tf.data": tensorflow}


def loader(name, rank):
    return eval(CODE[name], {"data": ROWS, "n": N, "rank": rank} | NAMES[name]())


@pytest.mark.parametrize("name", NAMES)
def test_loader_shares_cover_all_rows(name):
    """In batches that a step takes."""
    step = jc.data_parallel(lambda x: jc.all_reduce("sum", x.sum(), "data"))
    shares = [[np.asarray(batch) for batch in loader(name, rank)] for rank in range(N)]
    assert {batch.shape for share in shares for batch in share} == {(16,)}
    assert {len(share) for share in shares} == {len(ROWS) // 16 // N}
    np.testing.assert_array_equal(np.sort(np.ravel(shares)), ROWS)
    assert [float(step(batch)) for batch in shares[1]] == [
        float(batch.sum()) for batch in shares[1]
    ]
