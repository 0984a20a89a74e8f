"""Everyday tasks with torch's DistributedDataParallel: `torchrun --nproc-per-node 2 ddp.py`."""

import contextlib

import torch
import torch.distributed as dist
from problem import CLIP, RATE, REAL, W, X, Y, check
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel


def train_step(model, x, y):
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = x[rank::world], y[rank::world]
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    mse_loss(model(x), y).backward()
    optimizer.step()


def accumulate(model, x, y):
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = x[rank::world], y[rank::world]
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    for k, (part, aim) in enumerate(zip(x.chunk(4), y.chunk(4), strict=True)):
        with model.no_sync() if k < 3 else contextlib.nullcontext():
            (mse_loss(model(part), aim) / 4).backward()
    optimizer.step()


def clip(model, x, y):
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = x[rank::world], y[rank::world]
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    mse_loss(model(x), y).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()


def uneven_rows(model, x, y, real):
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y, real = x[rank::world], y[rank::world], real[rank::world]
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    rows = real.sum()
    dist.all_reduce(rows)
    loss = (mse_loss(model(x), y, reduction="none")[:, 0] * real).sum()
    (loss * world / rows).backward()
    optimizer.step()


def sharded_optimizer(model, x, y):
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = x[rank::world], y[rank::world]
    model = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=RATE)
    mse_loss(model(x), y).backward()
    optimizer.step()


def skip_not_finite(model, x, y):
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = x[rank::world], y[rank::world]
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    mse_loss(model(x), y).backward()
    if all(p.grad.isfinite().all() for p in model.parameters()):
        optimizer.step()


def run(tasks, wrapped=lambda model: model):
    """Run each task on a new model, and check the result."""
    for task in tasks:
        model = torch.nn.Linear(16, 1, bias=False)
        model.weight.data[:] = torch.from_numpy(W)
        x, y, real = (
            torch.from_numpy(X.copy()),
            torch.from_numpy(Y)[:, None],
            torch.from_numpy(REAL),
        )
        if task.__name__ == "skip_not_finite":
            x[1, 0] = torch.inf
        task(model, x, y, *([real] if task.__name__ == "uneven_rows" else []))
        check(model.weight.detach()[0], task.__name__)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run([train_step, accumulate, clip, uneven_rows, sharded_optimizer, skip_not_finite])
    dist.destroy_process_group()
