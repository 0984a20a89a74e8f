"""What the planner decides for an exchange that runs during the backward pass."""

import dataclasses

import jax
import numpy as np
import pytest

import jaxcoll as jc
from jaxcoll._plan.choose import make_plan
from jaxcoll._plan.options import ReduceOp
from jaxcoll._report.show_plan import plan_in
from jaxcoll._report.shown_plan import Plan
from jaxcoll._step.mesh.clusters import topology_named, topology_world

H100 = topology_world(topology_named("h100:8"))
ASKED = jc.CommunicationOptions(overlap=True)


def layers(count, width, dtype=np.float32):
    shapes = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width)}
    shapes |= {"down": (4 * width, width), "norm": (width,)}
    return [
        {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}
        for _ in range(count)
    ]


def known(tree, options=None, world=H100):
    """The plan of a tree whose last leaf is ready first."""
    bare = plan_in(tree, world)
    leaves = [dataclasses.replace(x, ready=-i) for i, x in enumerate(bare.leaves)]
    return Plan.of(make_plan(ReduceOp.MEAN, leaves, options or jc.CommunicationOptions(), world))


@pytest.mark.parametrize(
    ("tree", "fewest", "most"),
    [
        (layers(12, 1024), 24, 60),
        (layers(1, 512), 6, 24),
        (layers(2, 512), 6, 24),
        (layers(48, 2048), 40, 220),
    ],
    ids=["604MB", "13MB", "25MB", "9.7GB"],
)
def test_gpus_get_tapering_packs(tree, fewest, most):
    plan = known(tree)
    assert plan.overlap
    assert plan.chained
    assert fewest <= len(plan.packs) <= most
    # None has more than a quarter of what is left; at most 48 are of the full size.
    largest = max(pack.nbytes for pack in plan.packs)
    assert 4 * largest <= plan.nbytes <= 49 * max(largest, 16 << 20)
    assert 24 * plan.packs[-2].nbytes <= plan.nbytes, "those at the end are small"
    assert plan.packs[-1].nbytes <= 2 << 20
    assert min(p.nbytes for p in plan.packs[:3]) > 2 * plan.packs[-1].nbytes
    assert any("order: as the gradients" in reason for reason in plan.reasons)


def test_gradients_are_sent_as_ready():
    (leaves,) = layers(1, 1024)
    leaves |= {f"norm{k}": leaves["norm"] for k in range(3)}
    bare = plan_in(leaves, H100)

    def plan(options=None, leaves=bare.leaves):
        options = options or jc.CommunicationOptions()
        return Plan.of(make_plan(ReduceOp.MEAN, leaves, options, H100, in_backward=True))

    found = plan()
    assert found == plan(ASKED)
    assert found.overlap
    assert not found.chained
    assert sorted(len(pack.segments) for pack in found.packs) == [1, 1, 1, 1, 4]
    options = found.compiler_options()
    assert options["xla_gpu_all_reduce_combine_threshold_bytes"] == 1
    assert any(all(name in reason for name in options) for reason in found.reasons)
    assert not any(reason.startswith(("order:", "apart: each")) for reason in found.reasons)
    assert not plan(leaves=bare.leaves[1:3]).overlap  # tiny
    assert not plan(jc.CommunicationOptions(overlap=False)).compiler_options()


def test_tiny_trees_are_left_alone():
    assert not known(layers(1, 64)).overlap
    assert not known(layers(2, 512), jc.CommunicationOptions(overlap=False)).overlap
    assert not plan_in(layers(2, 512), H100).overlap  # its order is not known
    for where in ("v5p:2x2x2", "tpu7x:2x2x1"):
        world = topology_world(topology_named(where))
        assert not known(layers(2, 512), world=world).overlap
        asked = known(layers(2, 512), ASKED, world)
        assert asked.overlap
        assert not asked.chained
        assert any("xla_jf_crs_combiner_threshold_in_bytes" in r for r in asked.reasons)


def test_two_mebibytes_are_left_alone():
    def overlaps(elements, **where):
        leaf = jax.ShapeDtypeStruct((elements,), np.float32)
        return known({"a": leaf, "b": jax.ShapeDtypeStruct((1,), np.float32)}, **where).overlap

    assert not overlaps((2 << 20) // 4 - 1)
    assert overlaps((2 << 20) // 4)
    one = dataclasses.replace(H100, sizes=(1,), processes=1, hosts=1)
    assert not overlaps(1 << 20, world=one)


def test_cpu_plan_admits_no_overlap():
    plan = jc.plan(layers(2, 512), axis_size=8, options=ASKED)
    assert plan.overlap
    assert any("waits for each collective" in reason for reason in plan.reasons)
    within = Plan.of(make_plan(ReduceOp.MEAN, plan.leaves, ASKED, plan.world, in_backward=True))
    assert any("waits for each collective" in reason for reason in within.reasons)


def test_separate_packs_start_in_turn():
    together, apart = (
        jc.plan(layers(2, 512), topology="h100:8", options=jc.CommunicationOptions(overlap=overlap))
        for overlap in (False, True)
    )
    assert apart.predicted.latency > 3 * together.predicted.latency
