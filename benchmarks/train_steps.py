"""Compare train steps of `jc.data_parallel` and PyTorch's DistributedDataParallel over Gloo.

    python -m benchmarks.train_steps TORCH_PYTHON [PROCESSES [ROUNDS]]

A step computes and averages the gradients of a CNN (6.2 MB) or a GPT (13.7 MB), and applies SGD
with momentum. Both libraries must give the same losses. Rounds are interleaved, and each library is
measured twice.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE))  # imports `ranks` without jaxcoll, as in teams.py

from ranks.rank import Rank, serve  # noqa: E402

RATE, MOMENTUM, HEADS, CHECKED = 0.01, 0.9, 4, 3
CHANNELS = (3, 64, 128, 256, 512)
WIDTH, LAYERS, WORDS, LENGTH = 256, 4, 512, 32


def parameters(model: str) -> dict[str, np.ndarray]:
    """Return the initial parameters; a convolution's kernel has shape (height, width, in, out)."""
    if model == "cnn":
        shapes = {f"conv{i}": (3, 3, *CHANNELS[i : i + 2]) for i in range(len(CHANNELS) - 1)}
        shapes["out"] = (CHANNELS[-1], 10)
    else:
        shapes = {"words": (WORDS, WIDTH), "places": (LENGTH, WIDTH), "out": (WIDTH, WORDS)}
        for i in range(LAYERS):
            shapes |= {f"qkv{i}": (WIDTH, 3 * WIDTH), f"mix{i}": (WIDTH, WIDTH)}
            shapes |= {f"up{i}": (WIDTH, 4 * WIDTH), f"down{i}": (4 * WIDTH, WIDTH)}
    random = np.random.default_rng(0)
    return {
        name: (random.standard_normal(s) / np.prod(s[:-1]) ** 0.5).astype("f")
        for name, s in shapes.items()
    }


def batch(model: str, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a rank's inputs and labels: four images, or two texts."""
    random = np.random.default_rng(rank + 1)
    if model == "cnn":
        return random.standard_normal((4, 32, 32, 3)).astype("f"), random.integers(0, 10, 4)
    texts = random.integers(0, WORDS, (2, LENGTH + 1))
    return texts[:, :-1], texts[:, 1:]


class JaxSteps(Rank):
    """A rank of jaxcoll."""

    def __init__(self) -> None:
        import jax

        import jaxcoll as jc

        jc.initialize()
        self._jax, self._jc = jax, jc

    def world(self) -> dict[str, Any]:
        """See `Rank`."""
        return {"library": f"jax {self._jax.__version__}"}

    def prepare(self, leaves: list[dict[str, Any]], reduce_op: str) -> None:
        """Create the model named by `reduce_op`."""
        jax, jc = self._jax, self._jc
        loss = {"cnn": self._cnn, "gpt": self._gpt}[reduce_op]

        def step(params: Any, moved: Any, x: Any, y: Any) -> Any:
            value, grads = jc.value_and_grad(loss, "data")(params, x, y)
            moved = jax.tree.map(lambda m, g: MOMENTUM * m + g, moved, grads)
            return jax.tree.map(lambda p, m: p - RATE * m, params, moved), moved, value

        self._step = jc.data_parallel(step, batch_argnums=(2, 3), donate_argnums=(0, 1))
        params = parameters(reduce_op)
        every = jax.NamedSharding(self._step.mesh, jax.P())
        self._state = jax.device_put((params, jax.tree.map(np.zeros_like, params)), every)
        rows = jax.NamedSharding(self._step.mesh, jax.P("data"))
        given = batch(reduce_op, jax.process_index())
        self._batch = [jax.make_array_from_process_local_data(rows, x) for x in given]

    def _cnn(self, params: Any, x: Any, y: Any) -> Any:
        jax, nn = self._jax, self._jax.nn
        for i in range(len(CHANNELS) - 1):
            x = nn.relu(
                jax.lax.conv_general_dilated(
                    x, params[f"conv{i}"], (2, 2), [(1, 1)] * 2,
                    dimension_numbers=("NHWC", "HWIO", "NHWC"),
                )
            )  # fmt: skip
        return self._entropy(x.mean((1, 2)) @ params["out"], y)

    def _gpt(self, params: Any, x: Any, y: Any) -> Any:
        nn = self._jax.nn
        h = params["words"][x] + params["places"]
        for i in range(LAYERS):
            qkv = (nn.standardize(h) @ params[f"qkv{i}"]).reshape(*x.shape, 3, HEADS, -1)
            seen = nn.dot_product_attention(*(qkv[:, :, k] for k in range(3)), is_causal=True)
            h = h + seen.reshape(h.shape) @ params[f"mix{i}"]
            h = h + nn.gelu(nn.standardize(h) @ params[f"up{i}"]) @ params[f"down{i}"]
        return self._entropy(nn.standardize(h) @ params["out"], y)

    def _entropy(self, logits: Any, y: Any) -> Any:
        found = self._jax.nn.log_softmax(logits)
        return -self._jax.numpy.take_along_axis(found, y[..., None], -1).mean()

    def describe(self, name: str) -> dict[str, Any]:
        """Return the losses of the first steps."""
        return {"losses": [self.call(name) for _ in range(CHECKED)]}

    def barrier(self) -> None:
        """See `Rank`."""
        from jax.experimental.multihost_utils import sync_global_devices

        sync_global_devices("steps")

    def call(self, name: str) -> float:
        """See `Rank`."""
        *state, value = self._step(*self._state, *self._batch)
        self._state = self._jax.block_until_ready(state)
        return float(value)


class TorchSteps(Rank):
    """A rank of PyTorch."""

    def __init__(self) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        self._torch, self._dist = torch, dist

    def world(self) -> dict[str, Any]:
        """See `Rank`."""
        return {"library": f"torch {self._torch.__version__}"}

    def prepare(self, leaves: list[dict[str, Any]], reduce_op: str) -> None:
        """Create the model named by `reduce_op`."""
        torch = self._torch
        loss = {"cnn": self._cnn, "gpt": self._gpt}[reduce_op]

        class Model(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                for name, value in parameters(reduce_op).items():
                    held = torch.from_numpy(value)
                    held = held.permute(3, 2, 0, 1).contiguous() if held.ndim == 4 else held
                    setattr(self, name, torch.nn.Parameter(held))

            def forward(self, x: Any, y: Any) -> Any:
                return loss(dict(self.named_parameters()), x, y)

        self._model = torch.nn.parallel.DistributedDataParallel(
            Model(), gradient_as_bucket_view=True, static_graph=True
        )
        self._sgd = torch.optim.SGD(self._model.parameters(), RATE, MOMENTUM)
        x, y = map(torch.from_numpy, batch(reduce_op, self._dist.get_rank()))
        self._batch = (x.permute(0, 3, 1, 2).contiguous() if x.ndim == 4 else x), y

    def _cnn(self, params: Any, x: Any, y: Any) -> Any:
        f = self._torch.nn.functional
        for i in range(len(CHANNELS) - 1):
            x = f.relu(f.conv2d(x, params[f"conv{i}"], stride=2, padding=1))
        return f.cross_entropy(x.mean((2, 3)) @ params["out"], y)

    def _gpt(self, params: Any, x: Any, y: Any) -> Any:
        f = self._torch.nn.functional
        h = params["words"][x] + params["places"]
        for i in range(LAYERS):
            qkv = f.layer_norm(h, (WIDTH,)) @ params[f"qkv{i}"]
            qkv = qkv.reshape(*x.shape, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
            seen = f.scaled_dot_product_attention(*qkv, is_causal=True)
            h = h + seen.transpose(1, 2).reshape(h.shape) @ params[f"mix{i}"]
            up = f.layer_norm(h, (WIDTH,)) @ params[f"up{i}"]
            h = h + f.gelu(up, approximate="tanh") @ params[f"down{i}"]
        logits = f.layer_norm(h, (WIDTH,)) @ params["out"]
        return f.cross_entropy(logits.flatten(0, 1), y.flatten())

    def describe(self, name: str) -> dict[str, Any]:
        """Return the losses of the first steps."""
        return {"losses": [self.call(name) for _ in range(CHECKED)]}

    def barrier(self) -> None:
        """See `Rank`."""
        self._dist.barrier()

    def call(self, name: str) -> float:
        """See `Rank`."""
        self._sgd.zero_grad(set_to_none=False)  # gradients stay views of the buckets
        loss = self._model(*self._batch)
        loss.backward()
        self._sgd.step()
        return loss.item()


def measured(teams: dict[str, Any], rounds: int) -> None:
    """Measure the teams, and print a row for each model."""
    from jaxcoll.cli.bench import interleave, ratio

    for model in ("cnn", "gpt"):
        losses = {}
        for name, team in teams.items():
            team.do("prepare", leaves=[], reduce_op=model)
            losses[name] = np.mean([each["losses"] for each in team.do("describe", name="")], 0)
        np.testing.assert_allclose(losses["jaxcoll"], losses["DDP"], rtol=1e-4)

        def turn(name: str) -> float:
            return max(each["seconds"] for each in teams[name].do("time", name="", calls=3)) / 3

        turns = {
            f"{name}{again}": lambda n=name: turn(n) for name in teams for again in ("", " again")
        }
        found = list(interleave(turns, rounds))
        seconds = {name: [each[name] for each in found] for name in turns}
        ms = {name: 1e3 * float(np.median(each)) for name, each in seconds.items()}
        print(
            f"| {model} | {ms['jaxcoll']:.1f} | {ms['DDP']:.1f} | "
            f"{ratio(seconds['jaxcoll'], seconds['DDP'])} | "
            f"{ratio(seconds['jaxcoll'], seconds['jaxcoll again'])} | "
            f"{ratio(seconds['DDP'], seconds['DDP again'])} |",
            flush=True,
        )


def main(torch_python: str, processes: int = 4, rounds: int = 12) -> None:
    """Start both teams, and measure them in interleaved rounds."""
    from benchmarks.rank_pool import launched
    from benchmarks.teams import ours, worlds

    print("| model | jaxcoll ms | DDP ms | jaxcoll ÷ DDP | jaxcoll again | DDP again |")
    print("| --- | --- | --- | --- | --- | --- |")
    with contextlib.ExitStack() as stack:
        theirs = [
            {**world, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
            for world in worlds(processes)
        ]
        own = [{**ours(1), **world} for world in worlds(processes)]
        command = [__file__, "--rank"]
        both = {
            "jaxcoll": ([sys.executable, *command, "jax"], own),
            "DDP": ([torch_python, *command, "torch"], theirs),
        }
        measured(
            {
                name: stack.enter_context(launched(name, [("step",)], run, variables, 300))
                for name, (run, variables) in both.items()
            },
            rounds,
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        serve({"jax": JaxSteps, "torch": TorchSteps}[sys.argv[2]])
    else:
        main(sys.argv[1], *map(int, sys.argv[2:]))
