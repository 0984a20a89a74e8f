"""Programs compiled for clusters that are not here, by a process of its own."""

import json
import re

import forks
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import plans_of
from fake_compiler import ANSWER, stand_in
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

import jaxcoll as jc
from jaxcoll._compat import compiler
from jaxcoll._compat.compiler import has_compiler
from jaxcoll._report import aot as service
from jaxcoll._report.aot import compile_for, lay_out_step, lower_for, trace_for
from jaxcoll._step.mesh.clusters import topology_named

P = PartitionSpec
W, X = np.ones((8, 8), "f"), jax.ShapeDtypeStruct((64, 8), jnp.float32)
LINE = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
GRID = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def loss(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def step(w, x):
    value, grad = jc.value_and_grad(loss, "data")(w, x)
    return w - grad, value


def mapped(mesh, **settings):
    specs = {"in_specs": (P(), P("data")), "out_specs": P()}
    return jax.jit(jax.shard_map(step, mesh=mesh, **specs), **settings)


def takes_mesh(w, x, *, mesh):
    return mapped(mesh)(w, x)


def requested(fun, args=(W, X), topology="h100:2x8", mesh=None):
    where = topology_named(topology)
    traced = trace_for(fun, args, {}, where, mesh, lambda plan: None)
    return lower_for(traced, where).as_text(debug_info=True)


def partitions(text):
    return int(re.search(r"num_partitions = (\d+)", text)[1])


WAYS = {
    "data_parallel": jc.data_parallel(step),
    "data_parallel over a mesh of this machine": jc.data_parallel(step, mesh=LINE),
    "a builder": lambda mesh: mapped(mesh),
    "a builder of a data_parallel step": lambda mesh: jc.data_parallel(step),
    "a function that takes mesh": takes_mesh,
}


@pytest.mark.parametrize(
    ("way", "topology"),
    [*zip(WAYS, ["h100:128x8", "cpu:3", "h100:8", "v5p:8x8x8", "v5e:2x4"], strict=True)],
)
def test_step_fits_any_cluster(way, topology):
    size = topology_named(topology).size
    x = jax.ShapeDtypeStruct((2 * size, 8), jnp.float32)
    text = requested(WAYS[way], (W, x), topology)
    assert partitions(text) == size
    assert f'"data"={size}' in text
    assert "stablehlo.all_reduce" in text


def test_ambient_mesh_fits_the_cluster():
    mapped = lambda w, x: jax.shard_map(step, in_specs=(P(), P("data")), out_specs=P())(w, x)
    for topology in ("h100:4", "h100:8", "h100:2x8"):
        with jax.set_mesh(LINE):
            text = requested(jax.jit(mapped), topology=topology)
        assert partitions(text) == topology_named(topology).size
    mesh = AbstractMesh((16,), ("data",), axis_types=(AxisType.Auto,))
    assert partitions(requested(jax.jit(mapped), mesh=mesh)) == 16
    assert jax.sharding.get_abstract_mesh().empty


def test_mesh_of_equal_size_fits():
    assert partitions(requested(mapped(LINE), topology="h100:8")) == 8
    total = jax.pmap(lambda x: jax.lax.psum(x, "i"), axis_name="i")
    assert partitions(requested(total, (np.ones((8, 2)),), "v5e:2x4")) == 8
    placed = jax.device_put(jnp.ones((64, 8)), NamedSharding(LINE, P("data")))
    assert '[{"data"}, {}]' in requested(mapped(LINE), (W, placed), "h100:8").split("->")[0]


def test_axes_become_hosts_and_devices():
    both = jc.data_parallel(
        lambda w, x: jc.all_reduce("mean", w + x.sum(), ("node", "data")),
        mesh=jax.make_mesh((4, 2), ("node", "data")),
        axis_name=("node", "data"),
    )
    assert '"node"=2, "data"=8' in requested(both)
    beside = jc.data_parallel(step, mesh=GRID)
    assert '"data"=4, "model"=2' in requested(beside, topology="v5e:2x4")
    assert '"data"=2, "model"=8' in requested(beside, mesh=AbstractMesh((2, 8), ("data", "model")))
    sharded = jax.ShapeDtypeStruct((64, 8), jnp.float32, sharding=NamedSharding(GRID, P("data")))
    auto = jax.jit(lambda w, x: (x @ w).sum())
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = AbstractMesh((2, 8), ("data", "model"), axis_types=(kind,) * 2)
        assert partitions(requested(auto, (W, sharded), mesh=mesh)) == 16


def test_plans_are_the_clusters():
    seen = []

    def ring(w, x):
        seen.append(jc.plan([w], topology="h100:2x8").world)
        return jc.all_reduce("mean", w + x.sum(), "data")

    requested(lambda mesh: jax.shard_map(ring, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()))
    there = lay_out_step(jc.data_parallel(step), topology_named("h100:2x8"))
    (plan,) = plans_of(there, W, X)
    assert (plan.world.platform, plan.world.processes) == ("gpu", 2)
    assert seen[0] == plan.world


def test_static_arguments_stay():
    def scaled(w, x, scale, kind):
        f = lambda w, x: jc.all_reduce(kind, x.sum() * w * scale, "data")
        return jax.shard_map(f, mesh=LINE, in_specs=(P(), P("data")), out_specs=P())(w, x)

    fun = jax.jit(scaled, static_argnums=(2, 3))
    assert partitions(requested(fun, (W, X, 2.0, "mean"), "h100:8")) == 8
    with_number = jc.data_parallel(lambda s, x: jc.all_reduce("sum", x.sum() * s, "data"))
    assert partitions(requested(with_number, (2.0, X))) == 16


def test_unfit_steps_are_refused():
    for fun, settings, words in (
        (lambda w, x: x @ w, {}, r"runs on 1 of the 16 devices of h100:2x8 .*let the topology"),
        (mapped(LINE), {}, r"runs on 8 of the 16 devices"),
        (jc.data_parallel(step, mesh=GRID), {}, r"mesh \(data=4, model=2\) does not fit h100:2x8"),
        (jc.data_parallel(step), {"mesh": AbstractMesh((2, 2), ("data", "b"))}, "does not fit"),
        (jc.data_parallel(step), {"mesh": AbstractMesh((16,), ("x",))}, "no such axis"),
        (jc.data_parallel(step), {"mesh": 16}, "must be a jax.sharding.Mesh or AbstractMesh"),
        (jc.data_parallel(step, axis_name="data"), {"args": (W, W)}, "8 rows.*16 replicas"),
        (lambda w, x: jnp.dot(w, x), {}, "dot_general"),
    ):
        with pytest.raises((ValueError, TypeError), match=words):
            requested(fun, **settings)


def test_callbacks_explain_the_failure():
    def noisy(w, x):
        jax.debug.print("{}", x.sum())
        return step(w, x)

    with pytest.raises(ValueError, match="different from the lowering platform") as caught:
        requested(jc.data_parallel(noisy))
    assert "callbacks into Python" in caught.value.__notes__[0]


def without_names(text):
    """Compiled text without where it came from, and what differs because it has been loaded."""
    text = re.sub(r"^(FileNames|FunctionNames|FileLocations|StackFrames)\n(.+\n)*\n?", "", text, flags=re.M)  # fmt: skip
    text = re.sub(r",? ?(metadata=\{[^}]*\}|stack_frame_id=\d+)", "", text)
    text = re.sub(r"backend_config=.*", lambda found: "".join(sorted(found[0])), text)
    return re.sub(r"(fingerprint_before_lhs|fdo_profile)=\"\w+\"", "", text)


def here(topology, fun):
    """The text that JAX gets in this process for the same cluster."""
    devices = [*jax.devices()]
    if topology.platform != "cpu":
        devices = compiler.cluster_devices(topology.request(), [topology.size])
    found = len({d.process_index for d in devices}), devices[0].device_kind
    assert found == (topology.hosts, topology.kind)
    mesh = Mesh(np.array(devices, dtype=object), ("data",), axis_types=(AxisType.Auto,))
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (W, X)]
    return fun(mesh).lower(*types).compile().as_text()


CLUSTERS = ["cpu:8", "h100:8", "h100:2x8", "v5e:2x4", "v5p:2x2x4", "tpu7x:2x2x1"]


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("name", CLUSTERS)
def test_text_is_the_compilers_own(name):
    topology = topology_named(name)
    if not has_compiler(topology.platform):
        pytest.skip(f"the compiler for {name} is not installed")

    def program(mesh):
        return mapped(mesh, donate_argnums=0)

    found = compile_for(program, (W, X), {}, name)
    assert without_names(found.compiled) == without_names(here(topology, program))
    assert "input_output_alias" in found.compiled
    assert "test_aot.py" in found.requested
    assert "all-reduce" in found.compiled
    assert found.memory["argument"] > 0


def test_compiler_options_arrive():
    fun = jax.jit(lambda x: x * 2, compiler_options={"xla_jaxcoll_nonsense": 1})
    words = "cpu:1 .*No such compile option: 'xla_jax"
    with pytest.raises(jax.errors.JaxRuntimeError, match=words):
        compile_for(fun, (X,), {}, "cpu:1")


def test_other_compiler_gets_everything(tmp_path, monkeypatch):
    kept = tmp_path / "asked.json"
    copy = f'    pathlib.Path("{kept}").write_text((folder / "request.json").read_text())\n'
    stand_in(tmp_path, monkeypatch, ANSWER + copy)
    beside = jc.data_parallel(step, mesh=GRID)
    found = compile_for(beside, (W, X), {}, "h100:8")
    asked = json.loads(kept.read_text())
    assert (found.compiled, asked["size"], asked["mesh_sizes"]) == ("HloModule stand_in", 8, [4, 2])
    assert asked["compiler_options"] == plans_of(beside, W, X)[0].compiler_options("gpu")


def test_missing_compiler_names_its_command(tmp_path, monkeypatch):
    stand_in(tmp_path, monkeypatch, '(folder / "answer.json").write_text(\'{"missing": {}}\')')
    for topology, wheel in (("h100:8", "cuda13-local"), ("v5e:2x4", "tpu")):
        with pytest.raises(ImportError, match=rf"python -m pip install 'jax\[{wheel}\]==\d"):
            compile_for(jc.data_parallel(step), (W, X), {}, topology)
    monkeypatch.delenv(service.PYTHON)
    monkeypatch.setattr(service, "has_compiler", lambda platform: False)
    with pytest.raises(ImportError, match=r"jaxcoll\[gpu-aot\].*JAXCOLL_AOT_PYTHON"):
        compile_for(jc.data_parallel(step), (W, X), {}, "h100:8")


def test_dying_compiler_leaves_last_words(tmp_path, monkeypatch):
    stand_in(tmp_path, monkeypatch, 'sys.exit("Check failed: no such thing")')
    words = r"status 1 and no answer(.|\n)*Check failed"
    with pytest.raises(jax.errors.JaxRuntimeError, match=words):
        compile_for(jc.data_parallel(step), (W, X), {}, "h100:8")


@pytest.mark.slow
def test_hanging_compiler_is_ended(tmp_path, monkeypatch):
    stand_in(tmp_path, monkeypatch, f"""
        other = subprocess.Popen(["sleep", "600"])
        pathlib.Path({str(tmp_path)!r}, "pids").write_text(f"{{os.getpid()}} {{other.pid}}")
        time.sleep(600)
    """)  # fmt: skip
    with pytest.raises(
        jc.errors.DeadlineExceededError, match="did not finish within 1.5 s and was stopped.*few of"
    ):
        compile_for(jc.data_parallel(step), (W, X), {}, "h100:8", timeout_seconds=1.5)
    for pid in (tmp_path / "pids").read_text().split():
        assert forks.gone([pid])
