"""Everyday tasks with accelerate: `torchrun --nproc-per-node 2 accelerated.py`."""

import torch
from accelerate import Accelerator
from ddp import run
from problem import CLIP, RATE
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset


def train_step(model, x, y):
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    loader = DataLoader(TensorDataset(x, y), len(x) // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x, y in loader:
        accelerator.backward(mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()


def accumulate(model, x, y):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    loader = DataLoader(TensorDataset(x, y), len(x) // accelerator.num_processes // 4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()


def clip(model, x, y):
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    loader = DataLoader(TensorDataset(x, y), len(x) // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x, y in loader:
        accelerator.backward(mse_loss(model(x), y))
        accelerator.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()


def uneven_rows(model, x, y, real):
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    loader = DataLoader(TensorDataset(x, y, real), len(x) // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x, y, real in loader:
        rows = accelerator.reduce(real.sum(), "sum")
        loss = (mse_loss(model(x), y, reduction="none")[:, 0] * real).sum()
        accelerator.backward(loss * accelerator.num_processes / rows)
        optimizer.step()
        optimizer.zero_grad()


def skip_not_finite(model, x, y):
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    loader = DataLoader(TensorDataset(x, y), len(x) // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x, y in loader:
        accelerator.backward(mse_loss(model(x), y))
        if all(p.grad.isfinite().all() for p in model.parameters()):
            optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    run([train_step, accumulate, clip, uneven_rows, skip_not_finite])
