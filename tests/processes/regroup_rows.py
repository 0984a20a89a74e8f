"""What workers of some jobs give in a step, and how they train by themselves; for tests, too."""

import numpy as np


def owing_rows(at, rank):
    return np.random.default_rng((at, rank)).standard_normal((1, 600)).astype("f")


def local_start():
    """Parameters and the state of an optimizer with momentum."""
    params = {"a": np.zeros(200, "f"), "b": np.ones(400, "f")}
    return params, {"a": np.zeros(200, "f"), "b": np.zeros(400, "f")}


def local_step(params, momentum, batch):
    """A step of one replica, in the arithmetic of JAX or NumPy."""
    goals = {"a": batch[0, :200], "b": batch[0, 200:]}
    momentum = {k: 0.5 * momentum[k] + (params[k] - goals[k]) for k in params}
    return {k: params[k] - 0.25 * momentum[k] for k in params}, momentum, batch[0, 0]


def local_rounds(steps, every, lost, taken):
    """Three workers in one process: number 1 is absent after `lost` steps, until after `taken`."""
    shared, momentum = local_start()
    own = {rank: (dict(shared), momentum) for rank in range(3)}
    for step in range(steps):
        if step == taken:  # with the optimizer state of worker 0
            own[1] = dict(shared), own[0][1]
        there = [rank for rank in own if rank != 1 or not lost <= step < taken]
        for rank in there:
            own[rank] = local_step(*own[rank], owing_rows(step, rank))[:2]
        if (step + 1) % every == 0:
            shared = {k: np.mean([own[rank][0][k] for rank in there], 0) for k in shared}
            for rank in there:
                own[rank] = dict(shared), own[rank][1]
    return shared, own
