"""The examples of docs/examples: every way trains one model, and there is something to inspect."""

import difflib
import functools
from pathlib import Path

import flax_plain
import flax_shards
import forks
import gpt
import jax
import numpy as np
import pytest
import sharded
import stacks
import transformer
from cases import plans_of
from jax.sharding import AbstractMesh, AxisType

from jaxcoll._report.aot import lay_out_step
from jaxcoll._step.mesh.clusters import topology_named

pytestmark = pytest.mark.product
EXAMPLES = Path(gpt.__file__).parent


@pytest.fixture
def short(monkeypatch, types_may_mix):
    """Texts and batches of the GPT that take little time, and its model as it is."""
    for name, size in {"LENGTH": 16, "TEXTS": 16}.items():
        monkeypatch.setattr(gpt, name, size)


@functools.cache
def trained(name):
    """Train once for all tests, which want the fixture `short`; None is one device."""
    return gpt.train(name and gpt.MODES[name], jax.devices(), 4, 0)


@pytest.mark.slow
@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("name", gpt.MODES)
def test_mode_trains_one_model(name):
    one, plain, mode = map(trained, (None, "plain", name))
    assert gpt.difference(one, mode) < 1e-5
    # Two gathers and a reduce-scatter of the layers are half as much again.
    least, most = (1.3, 1.5) if name == "parameters" else (0.98, 1.02)
    assert least <= mode.report.wire_bytes / plain.report.wire_bytes <= most
    state, parameters = gpt.MODES[name].sharded, name == "parameters"
    for ours, whole, in_parts in (
        (mode.state_bytes, one.state_bytes, state),
        (mode.params_bytes, one.params_bytes, parameters),
    ):
        assert (0 < ours <= 0.13 * whole) if in_parts else (ours == whole)


@pytest.mark.slow
@pytest.mark.usefixtures("short")
def test_collectives_of_each_mode():
    losses = trained(None).losses
    assert losses[-1] < losses[0]
    collectives = {name: trained(name).report.runs for name in gpt.MODES}
    assert collectives["plain"] == collectives["accumulate"] == 1
    assert collectives["overlap"] > 1, "packs stay separate"
    assert collectives["sync"] == gpt.LAYERS + 1, "one per layer, in the loop, and one for the rest"
    seven = gpt.train(gpt.MODES["sharded"], jax.devices()[:7], 1, 0)
    assert np.isfinite(seven.losses).all(), "a prime number of replicas"


@pytest.mark.slow
@pytest.mark.usefixtures("short")
def test_examples_table(monkeypatch, capsys):
    by_mode = {id(mode): name for name, mode in gpt.MODES.items()}
    monkeypatch.setattr(gpt, "train", lambda mode, *_: trained(by_mode.get(id(mode))))
    monkeypatch.setattr("sys.argv", ["gpt", "--steps", "4", "--modes", "sharded"])
    assert gpt.main() == 0
    first, header, row = capsys.readouterr().out.splitlines()
    assert first.startswith("one device: last loss ")
    assert header.split()[-3:] == ["state", "bytes", "parameters"]
    assert row.split()[0] == "sharded"


@pytest.mark.slow
@pytest.mark.usefixtures("types_may_mix")
def test_flax_moves_by_eight_lines():
    """Of a training script, its model among it: what a new user has to change."""
    plain, moved = (
        Path(example.__file__).read_text().splitlines() for example in (flax_plain, flax_shards)
    )
    lines = [line for line in difflib.ndiff(plain, moved) if line.startswith("+ ")]
    lines = [line for line in lines if not line.startswith('+ """') and line.strip("+ ")]
    assert len(lines) == 8, "one of them the import, two in the model's loss"
    losses = flax_plain.train(4)
    assert losses[-1] < losses[0]
    np.testing.assert_allclose(flax_shards.train(4), losses, rtol=1e-4)


def test_unknown_mode_is_refused(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["gpt", "--modes", "plain,magic"])
    with pytest.raises(SystemExit, match="2"):
        gpt.main()
    expected = "--modes: no 'magic'; choose from plain, overlap, sync"
    assert expected in capsys.readouterr().err


def test_seed_names_batches():
    text = gpt.load()
    assert b"import" in bytes(text)
    one, again, other = (next(gpt.batches(4, 1, seed)) for seed in (0, 0, 1))
    assert np.array_equal(one, again)
    assert not np.array_equal(one, other)
    assert bytes(one[0].astype(np.uint8)) in bytes(text)
    assert [gpt.batch_size(n) for n in (1, 3, 7, 8, 100)] == [32, 30, 28, 32, 200]


def test_large_step_is_planned():
    step, args = transformer.example()
    (plan,) = plans_of(step, *args)
    assert plan.nbytes == 367_575_044
    assert len(plan.leaves) == 74


def test_stack_and_twin_share_arguments():
    for name in ("scanned", "scanned_by_sixes", "unrolled", "small"):
        step, args = getattr(stacks, name)()
        plain, same = getattr(stacks, f"{name.removesuffix('_by_sixes')}_plain")()
        assert callable(step)
        assert callable(plain)
        assert args == same, name


@pytest.mark.slow
def test_diloco_in_one_process():
    code = "import sys, diloco; sys.exit(diloco.main())"
    flags = "--compute 0.001 --every 4 --size 2000 --only int4".split()
    done = forks.with_commands().run(code, "diloco", *flags, cwd=EXAMPLES)
    assert done.returncode == 0, done.stderr
    rows = [line.split("  ")[0] for line in done.stdout.splitlines()]
    assert rows == ["data parallel int4", "local int4"]


def test_sharded_stack_is_bfloat16():
    mesh = jax.make_mesh((8,), ("data",))
    step, args = sharded.ahead(mesh)
    gather, scatter, value = plans_of(step, *args)
    parameters = 12 * (12 * 1024**2 + 2 * 1024)
    for plan, turns in ((gather, 23), (scatter, 12)):
        assert {pack.dtype.name for pack in plan.packs} == {"bfloat16"}
        assert plan.wire_bytes * 12 == 2 * parameters * 7 // 8
        assert f"{turns} times" in plan.reasons[0]
        assert "widens to float32 on the wire" in plan.reasons[-1]
    assert value.leaves[0].path == ".value"
    there = plans_of(lay_out_step(step, topology_named("h100:8")), *args)
    option = {"xla_gpu_experimental_parallel_collective_overlap_limit": 8}
    assert [plan.compiler_options() for plan in there] == [option, option, {}]
    assert all("which `jc.data_parallel` sets" in plan.reasons[-1] for plan in there[:2])
    by_hand, (whole, texts) = sharded.in_place(mesh)
    abstract = AbstractMesh((8,), ("data",), (AxisType.Auto,))  # as `jaxcoll inspect` passes it
    over = functools.partial(by_hand, mesh=abstract)
    assert jax.eval_shape(over, whole, texts)[1].shape == ()
    assert sum(x.size for x in jax.tree.leaves(whole)) == parameters
    assert texts == args[1]
