"""What replicas hold, and what their sum has to be."""

import numpy as np
import pytest

from jaxcoll.bench.ranks.data import BLOCK, Exact, block, held, leaf


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (BLOCK + 7,)])
def test_the_exact_sum_of_a_leaf_costs_no_copy_of_it(shape, mean):
    blocks = [block(replica) for replica in range(3)]
    exact = Exact(blocks, mean)
    for index in (0, 5, 1000):
        rows = [leaf(values, index, shape).astype(np.float64) for values in blocks]
        total = np.sum(rows, axis=0) / (3 if mean else 1)
        assert exact.error(index, total) < 1e-15
        if total.size:
            wrong = np.array(total)
            wrong.flat[-1] += 1
            assert exact.error(index, wrong) > 0.01
            assert exact.error(index + 1, total) > 0.01
            wrong.flat[0] = np.nan
            assert exact.error(index, wrong) == np.inf


def test_replicas_differ_and_processes_agree():
    assert not np.array_equal(block(0), block(1))
    assert np.array_equal(block(1), block(1))
    assert held(block(0), np.dtype("uint8")).dtype == np.uint8
    assert held(block(0), np.dtype("int32")).min() < 0
