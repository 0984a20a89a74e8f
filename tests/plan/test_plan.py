"""jc.plan: what will be sent, before anything is compiled; as a table, JSON and HTML."""

import html
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import plans_of
from IPython.core.formatters import DisplayFormatter

import jaxcoll as jc
from jaxcoll._plan.options import ReduceOp
from jaxcoll._plan.packs.leaves import Leaf
from jaxcoll._plan.packs.shard_layout import lay_out, plan_half
from jaxcoll._plan.world import World
from jaxcoll._report.shown_plan import Plan

TREE = {"w": jax.ShapeDtypeStruct((10, 10), jnp.float32), "b": np.zeros(10, np.float32), "s": 1.0}


def test_counts_packs_and_wire_bytes():
    plan = jc.plan(TREE, axis_size=8, options=jc.CommunicationOptions(bytes_per_pack=100))
    assert [(p.nbytes, len(p.segments)) for p in plan.packs] == [(44, 2), (400, 1)]
    assert plan.nbytes == 444
    assert plan.wire_bytes == 2 * ((11 - 1) + (100 - 12)) * 4
    assert [x.path for x in plan.leaves] == ["['b']", "['s']", "['w']"]


def test_shows_table_and_json():
    plan = jc.plan(TREE, axis_size=4, options=jc.CommunicationOptions(bytes_per_pack=100))
    text = str(plan)
    assert "all_reduce MEAN of 3 leaves, 444 bytes a replica, over 4 × cpu, one process" in text
    assert "['b'] … ['s']" in text
    assert "packs: at most 100 bytes, as requested" in text
    data = json.loads(plan.to_json())
    assert data["packs"][0]["leaves"][1] == {"path": "['s']", "start": 0, "elements": 1}
    assert data["wire_bytes_per_device"] == plan.wire_bytes


@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize(
    "given",
    [
        {}, {"reproducible": True}, {"bytes_per_pack": 500, "shards": 2},
        {"bytes_per_pack": 1 << 20, "algorithm": "ring"},
        *({"compression": name} for name in ("bf16", "int8", "int4")),
    ],
    ids=str,
)  # fmt: skip
def test_trace_carries_out_the_plan(op, given):
    options = jc.CommunicationOptions(**given)
    dtypes = "float32 float16 bfloat16 float8_e4m3fn int32 int8 uint8 int4 complex64".split()
    shapes = {dtype: jax.ShapeDtypeStruct((4, 128), dtype) for dtype in dtypes}
    shapes |= {"empty": jax.ShapeDtypeStruct((0, 3), "float32"), "one": 1.0, "none": None}

    def step(x):
        fill = lambda y: jnp.full(
            jnp.shape(y), x[0, 0].astype(jnp.asarray(0, jnp.result_type(y)).dtype)
        )
        return jc.all_reduce(op, jax.tree.map(fill, shapes), options=options)

    (made,) = plans_of(jc.data_parallel(step), np.ones((8, 1), "f"))
    plan = jc.plan(shapes, axis_size=8, reduce_op=op, options=options)
    facts = "path shape dtype wire over solid indices format".split()
    for leaf, shown in zip(made.leaves, plan.leaves, strict=True):
        assert [getattr(leaf, name) for name in facts] == [getattr(shown, name) for name in facts]
    facts = "dtype over segments algorithm format".split()
    for pack, shown in zip(made.packs, plan.packs, strict=True):
        assert [getattr(pack, name) for name in facts] == [getattr(shown, name) for name in facts]
    facts = "name reasons wire_bytes world".split()
    assert [getattr(made, name) for name in facts] == [getattr(plan, name) for name in facts]


def test_its_prediction_is_in_milliseconds():
    plan = jc.plan({"a": np.ones(1 << 20, "f")}, topology="h100:8")
    cost = plan.predicted
    parts = (cost.seconds, cost.latency, cost.bandwidth, cost.reduction, cost.copy)
    shown = re.findall(r"([\d.e+-]+) (?:ms|latency|bandwidth|sums|copies)", plan.prediction)
    assert [float(figure) for figure in shown] == pytest.approx([1e3 * x for x in parts], rel=0.01)


def test_plan_admits_ignored_requests():
    plan = jc.plan(TREE, axis_size=4, options=jc.CommunicationOptions(implementation="nccl"))
    assert "NCCL was requested, but memory shared by the devices of this process" in str(plan)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"reproducible": True}, "halving and doubling, because `reproducible` is set"),
        ({"algorithm": "rechd"}, "halving and doubling, as requested"),
        ({"compression": "int4"},
         "the compiler's own all-reduce, carried by memory shared by the devices of this process; "
         "shuffle for 1 of 2 packs"),
    ],
)  # fmt: skip
def test_names_the_algorithm_and_why(options, words):
    tree = {"w": np.zeros(4096, "f"), "b": np.zeros(3, "f")}
    plan = jc.plan(tree, axis_size=8, options=jc.CommunicationOptions(**options))
    assert f"algorithm: {words}" in plan.reasons
    in_order = any("every element is summed in pairs of replicas" in r for r in plan.reasons)
    assert (
        plan.reproducible
        == plan.to_dict()["reproducible"]
        == in_order
        == ("reproducible" in options)
    )


def test_shows_what_travels_wider():
    tree = {"f": jnp.zeros(3, jnp.float8_e4m3fn), "i": np.zeros(3, np.int8)}
    plan = jc.plan(tree, axis_size=2)
    assert "float8_e4m3fn as float32, int8 as float32" in str(plan)


MESH = jax.make_mesh((8,), ("data",))


@pytest.mark.parametrize(
    ("tree", "more", "words"),
    [
        (TREE, {"axis_size": 0},
         "`axis_size` must be a positive integer, or a tuple of them; got 0"),
        (TREE, {"axis_size": 2, "mesh": MESH}, "takes `axis_size` or `mesh`, not both"),
        (TREE, {"mesh": MESH, "axis_name": "model"},
         r"over axis 'model': the mesh has no such axis. .* 'data'"),
        ({"k": np.zeros(3, bool)}, {"axis_size": 2},
         r"cannot reduce leaf \['k'\]: booleans have no sum"),
        ({"q": "text"}, {"axis_size": 2}, r"`plan`: leaf \['q'\]: expected an array or a number"),
        ({"q": object()}, {"axis_size": 2}, r"`plan`: leaf \['q'\]: expected an array or a number"),
        ({"a": np.zeros(3, jax.dtypes.float0)}, {"axis_size": 2},
         r"leaf \['a'\]: float0 is the gradient of an integer"),
        ({"a": np.array(["x"])}, {"axis_size": 2}, r"leaf \['a'\]: an array of <U1 holds no"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(tree, more, words):
    with pytest.raises(ValueError, match=words):
        jc.plan(tree, **more)


def test_reads_the_mesh():
    mesh = jax.make_mesh((2, 4), ("node", "data"))
    assert jc.plan(TREE, mesh=mesh).world.replicas == 4
    assert jc.plan(TREE, mesh=mesh, axis_name=("node", "data")).world.replicas == 8
    assert jc.plan(TREE).world.replicas == 8


@pytest.mark.parametrize(
    ("world", "asked", "planned", "steps"),
    [
        (World("cpu", (8,)), None, "native", 1),
        (World("gpu", (8,), processes=8), None, "native", 1),
        (World("cpu", (8,), processes=8), None, "halving_doubling", 3),
        (World("cpu", (6,), processes=6), None, "shuffle", 1),
        (World("cpu", (6,), processes=6), "ring", "ring", 5),
        (World("cpu", (2, 4), processes=2), "ring/native", "ring/shuffle", 4),
    ],
    ids=str,
)
def test_halves_avoid_gloos_reduce_scatter(world, asked, planned, steps):
    options = jc.CommunicationOptions(algorithm=asked)
    leaf = Leaf("", (999,), np.dtype("f"), np.dtype("f"), world.sizes)
    packs = lay_out(jax.tree.structure(0), (leaf,), world.replicas).packs
    for half in ("reduce_scatter", "all_gather"):
        plan = Plan.of(plan_half(half, ReduceOp.MEAN, packs, (leaf,), options, world))
        assert (plan.algorithm, plan.steps) == (planned, steps)
        spared = planned != (asked or "native")
        assert any("Gloo's own reduce-scatter sends more" in r for r in plan.reasons) == spared


def test_shards_pack_to_16_mib():
    sizes = [1 << 18] * 33 + [1 << 19, (1 << 19) + 1]
    single = np.dtype("f4")
    leaves = tuple(Leaf(f"[{i}]", (n,), single, single, (8,)) for i, n in enumerate(sizes))
    layout = lay_out(jax.tree.structure(sizes), leaves, 8)
    assert [(len(pack.segments), pack.nbytes) for pack in layout.packs] == [
        (16, 16 << 20), (16, 16 << 20), (2, 3 << 20), (1, (2 << 20) + 4)
    ]  # fmt: skip


def test_notebook_shows_escaped_text():
    plan = jc.plan({"<b>&": [np.zeros(k + 1, "f") for k in range(50)]}, axis_size=8)
    assert "… and 31 more" in str(plan)
    assert "more" not in plan.text()
    texts, _ = DisplayFormatter().format(plan)
    assert texts["text/plain"] == str(plan)
    shown = texts["text/html"]
    assert shown.startswith("<pre style=")
    assert html.unescape(shown.partition(">")[2]) == f"{plan}</pre>"
    assert "<b>&" not in shown
