"""`jc.inspect` for clusters that are not here: what goes to the compiler, and what is made of it."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_compiler import answering, stand_in
from jax.sharding import AbstractMesh

import jaxcoll as jc
from jaxcoll._compat.compiler import has_compiler
from jaxcoll._report.cost.rates import find_rates
from jaxcoll.cli.main import main

GOLDEN = Path(__file__).parent / "golden"
PACKS = (GOLDEN / "gpu-0.12.0.1-packs.hlo").read_text()
TREE = {name: jax.ShapeDtypeStruct((200,), jnp.float32) for name in "abc"}
X = jax.ShapeDtypeStruct((64, 8), jnp.float32)


@jc.data_parallel
def step(tree, x):
    return jc.all_reduce("mean", jax.tree.map(lambda a: a + x.sum(), tree), "data")


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    stand_in(tmp_path, monkeypatch, answering(PACKS))


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("fun", [step, lambda mesh: step, lambda mesh: jax.shard_map(
    step.__wrapped__, mesh=mesh, in_specs=(jax.P(), jax.P("data")), out_specs=jax.P())],
    ids=["a step", "a builder", "a builder of a shard_map"])  # fmt: skip
def test_report_and_plans_are_clusters(fun):
    report = jc.inspect(fun, TREE, X, topology="h100:8")
    assert report.where == "h100:8 (8 × NVIDIA H100 80GB HBM3, one host)"
    (plan,) = report.plans
    assert plan.world == jc.plan(TREE, topology="h100:8").world
    assert report.predicted_from == find_rates(plan.world).source
    assert [c.kind for c in report.requested] == ["all-reduce"] * 3
    assert [c.kind for c in report.collectives] == ["all-reduce"]
    assert report.where in str(report)


@pytest.mark.usefixtures("compiler")
def test_mesh_must_fit_the_cluster():
    mesh = AbstractMesh((4, 2), ("data", "model"))
    assert jc.inspect(step, TREE, X, topology="h100:8", mesh=mesh).plans[0].world.sizes == (4,)
    with pytest.raises(ValueError, match="does not fit h100:8"):
        jc.inspect(step, TREE, X, topology="h100:8", mesh=AbstractMesh((2, 2), ("data", "b")))


@pytest.mark.usefixtures("compiler")
def test_picture_names_its_rates(tmp_path):
    report = jc.inspect(step, TREE, X, topology="h100:8")
    words = [text.get_text() for axes in report.plot().axes for text in axes.texts]
    assert any("predicted from Hopper" in text for text in words)
    bare = jc.inspect(PACKS).plot()
    assert any("counted in wire bytes" in t.get_text() for a in bare.axes for t in a.texts)


def test_impossible_programs_are_refused():
    lowered = step.lower(*jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), (TREE, X)))
    cluster = {"topology": "h101:8"}
    for program, given, words, where in (
        (3, (), "`inspect` expects a function and its arguments.*got int", {}),
        (lowered, (1,), "got arguments with a program that was already traced with its own", {}),
        (PACKS, (1,), "got arguments or a topology with HLO text", {}),
        (lowered.as_text(), (), "begins with 'HloModule'.*only lowered, pass it", {}),
        (lowered, (), "compiles functions for a topology; got Lowered", cluster),
        (lowered.compile(), (), "; got Compiled", cluster),
        (PACKS, (), "got arguments or a topology with HLO text", cluster),
        (step, (TREE, X), "There is no topology 'h101:8'. Nearest: 'h100:8'", cluster),
    ):
        with pytest.raises(ValueError, match=words):
            jc.inspect(program, *given, **where)


MODULE = """
import jax, jax.numpy as jnp
import jaxcoll as jc

@jc.data_parallel
def clustered(x):
    return jc.all_reduce("mean", x, "data")

clustered.example_args = (jax.ShapeDtypeStruct((16, 5), jnp.float32),)

def sized(mesh):
    return clustered, (jax.ShapeDtypeStruct((2 * mesh.size, 5), jnp.float32),)

def unready(mesh, batch):
    return None
"""


def test_command_compiles_for_cluster(tmp_path, monkeypatch, capsys):
    (tmp_path / "of_a_cluster.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(jax.config, "update", lambda *_: None)  # devices are there already
    stand_in(tmp_path, monkeypatch, answering(PACKS))
    assert main(["inspect", "of_a_cluster:clustered", "--topology", "h100:2x8"]) == 0
    assert "h100:2x8 (16 × NVIDIA" in capsys.readouterr().out.replace("\n  ", " ")
    assert main(["inspect", "of_a_cluster:sized", "--topology", "h100:2x8"]) == 0
    assert "h100:2x8 (16 × NVIDIA" in capsys.readouterr().out.replace("\n  ", " ")
    assert main(["inspect", "of_a_cluster:sized"]) == 0
    assert "8 devices: requested 1 all-reduce, 40 B" in capsys.readouterr().out
    stand_in(tmp_path, monkeypatch, '(folder / "answer.json").write_text(\'{"missing": {}}\')')
    assert main(["inspect", "of_a_cluster:clustered", "--topology", "v5e:2x4"]) == 2
    error = capsys.readouterr().err
    assert "pip install 'jax[tpu]==" in error
    assert error.count("\n") == 1
    assert main(["inspect", "of_a_cluster:sized", "--topology", "h1000:8"]) == 2
    assert (
        "no mesh for of_a_cluster:sized: There is no topology 'h1000:8'" in capsys.readouterr().err
    )
    assert main(["inspect", "of_a_cluster:unready"]) == 2
    assert "called with only a `mesh`: TypeError: unready() missing" in capsys.readouterr().err


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("name", ["h100:8", "v5e:2x4"])
def test_with_the_vendors_own_compiler(name):
    if not has_compiler("tpu" if name.startswith("v") else "gpu"):
        pytest.skip(f"the compiler for {name} is not installed")
    report = jc.inspect(step, TREE, X, topology=name)
    jc.assert_collectives(report, max_count=1, kinds=["all-reduce"])
    assert report.rows[0].changes[0].startswith("merged 3")
    assert report.uncounted == ()
