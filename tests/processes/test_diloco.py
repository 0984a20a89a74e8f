"""Local updates over real processes."""

import tempfile

import jax
import numpy as np
import optax
import pytest
from diloco_simulation import PARAMS, local_step, rows, simulated
from jax.sharding import NamedSharding

import jaxcoll as jc

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("types_may_mix")]


def test_diloco_is_its_simulation(launch):
    """Local updates, from a checkpoint now and then, beside one process that simulates all."""

    def run():
        rank, inner = jax.process_index(), optax.sgd(1e-2, momentum=0.9)
        outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
        train = jc.diloco(local_step(inner), every=4, outer=outer)
        same, split = (NamedSharding(train.mesh, s) for s in (jax.P(), jax.P("data")))
        put = jax.make_array_from_process_local_data
        # Whatever a data-parallel step returned is on all processes, and so may a batch be.
        params = jc.data_parallel(lambda p, x: p)(PARAMS, np.zeros((1, 1), "f"))
        first = state = train.init(params, inner.init(PARAMS))
        losses = []
        for t in range(1, 21):
            batch = rows(t, 2)[4 * rank : 4 * rank + 4]
            state, loss = train(state, put(split, batch) if t == 7 else batch)
            losses.append(float(loss[0]))
            if t % 8 == 7:
                with tempfile.TemporaryDirectory() as folder:
                    jc.save_checkpoint(f"{folder}/state.npz", state)
                    state, _ = jc.restore_checkpoint(f"{folder}/state.npz", first)
        shared, own, values = simulated(inner, 2, 20, every=4, outer=outer)
        mine = jax.tree.map(lambda x: x[rank : rank + 1], own)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(np.asarray(a), b, rtol=0, atol=1e-5),
            (state.shared, state.replicas[0], losses),
            (shared, mine, values[:, rank].tolist()),
        )
        other, differ = jc.diloco(local_step(inner), every=1), PARAMS | {"w": np.float32(rank)}
        away = [d for d in jax.devices() if d.process_index != rank]
        absent = jc.diloco(local_step(inner), mesh=jax.sharding.Mesh(away, ("data",)))
        for call, words in (
            (lambda: other(other.init(differ, inner.init(differ)), rows(0, 1)),
             "pass different values in 1 of 5 leaves that must be equal on every replica. The first "
             "is shared['w']: processes 0 | 1. Nothing was run."),
            (lambda: train(first, put(same, rows(0, 1))),
             "that are split by rows over the mesh; got float32(4, 4)"),
            (lambda: other.init({"w": put(split, np.ones((1, 2), "f"))}, ()),
             "the same on every device of the mesh; got float32(2, 2)"),
            (lambda: absent.init(PARAMS, ()), "no device of the mesh belongs to this process, number"),
        ):  # fmt: skip
            with pytest.raises((ValueError, jc.errors.ReplicaDivergenceError)) as caught:
                call()
            assert words in str(caught.value)
        return [np.asarray(x).tobytes() for x in jax.tree.leaves(state.shared)]

    first, second = launch(run, 2)
    assert first == second
