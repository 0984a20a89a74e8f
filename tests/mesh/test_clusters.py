"""Clusters by name."""

import itertools

import pytest

import jaxcoll as jc
from jaxcoll._step.mesh.clusters import CHIPS, _usual, topology_named


def test_name_says_what_exists():
    for name, platform, size, hosts in (
        ("a100:16", "gpu", 16, 1),
        ("H100:2x8", "gpu", 16, 2),
        ("h200:128x8", "gpu", 1024, 128),
        ("b200:4x4", "gpu", 16, 4),
        ("v5e:1x1", "tpu", 1, 1),
        ("v5e:2x4", "tpu", 8, 2),
        ("v6e:4x4", "tpu", 16, 4),
        ("v5p:16x20x28", "tpu", 8960, 2240),
        ("tpu7x:2x2x1", "tpu", 8, 1),
        ("cpu:8", "cpu", 8, 1),
    ):
        found = topology_named(name)
        assert (found.platform, found.size, found.hosts) == (platform, size, hosts)
        assert topology_named(found) is found


def test_named_clusters_exist():
    for known in itertools.chain(*map(_usual, CHIPS)):
        assert topology_named(known.name) == known


def test_gpus_are_described_fully():
    text = CHIPS["h100"].description()
    assert "core_count: 132 " in text
    assert "cuda_compute_capability { major: 9 }" in text
    assert topology_named("h100:2x8").request()["topology"] == "2x1x8"


def test_unknown_clusters_list_the_nearest():
    for name, words in (
        ("h100:16", r"a host has at most 8 GPUs of type h100\. Nearest: 'h100:2x8'"),
        ("h1000:8", r"There is no topology 'h1000:8'\. Nearest: 'h100:8'.*Chips that can be"),
        ("h10:2x8", "Nearest: 'h100:2x8'"),
        ("v5:4x4", "Nearest: 'v5"),
        ("gpu", "There is no topology 'gpu'"),
        (8, "There is no topology 8"),
        ("b200:3x2x8", "expected a number of GPUs, or hosts x GPUs per host"),
        ("h100:0", "it would be empty"),
        ("v5e:2x2x1", r"v5e chips have 2 dimensions\. Nearest: 'v5e:2x2'"),
        ("v5p:2x2", "Nearest: 'v5p:2x2x1', 'v5p:2x2x2', 'v5p:2x4x1', 'v5p:2x4x2', 'v5p:4x4x1'"),
        ("v5e:2x3", "the first two numbers must be even. Nearest: 'v5e:2x"),
        ("v6e:32x32", "at most 256 v6e chips are connected"),
        ("cpu:2x4", r"expected a number of simulated CPUs\. Nearest: 'cpu:8'"),
    ):
        with pytest.raises(ValueError, match=words):
            topology_named(name)


def test_plan_knows_its_cluster():
    world = lambda **where: jc.plan([1.0], **where).world
    flat = world(topology="h100:2x8")
    assert (flat.platform, flat.sizes, flat.processes) == ("gpu", (16,), 2)
    assert world(topology="h100:2x8", axis_name=("host", "gpu")).sizes == (2, 8)
    assert world(topology="v5p:4x4x4", axis_size=(2, 4, 8)).sizes == (2, 4, 8)
    assert world(topology="cpu:8").processes == 1
    for where, words in (
        ({"axis_size": (4, 8)}, r"`axis_size` \(4, 8\) makes 32 replicas, but h100:2x8 .* has 16"),
        ({"axis_size": 0}, "`axis_size` must be a positive integer"),
        ({"mesh": object()}, "takes `topology` or `mesh`, not both"),
        ({"axis_name": ("a", "b", "c")}, "does not say how its 16 replicas lie along 3 axes"),
    ):
        with pytest.raises(ValueError, match=words):
            world(topology="h100:2x8", **where)
