"""Which terms a program goes by: a calibration that is named, one that was saved, or the preset."""

import dataclasses
import json
import re

import pytest

from jaxcoll._cluster.hosts import Hosts
from jaxcoll._mesh import machine_costs as host
from jaxcoll._mesh.machine_costs import calibration, circumstances, machine, saved, terms_here
from jaxcoll._plan.cost.presets import preset
from jaxcoll._plan.cost.terms import Link
from jaxcoll._plan.world import World

WORLD = World("cpu", (4,), processes=4)
LINK = Link(1e-6, 1e-9)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    keeps_memory(monkeypatch, False)


def keeps_memory(monkeypatch, kept):
    monkeypatch.setattr(host, "keeps_freed_memory", lambda: kept)


def ours(world=WORLD):
    return dataclasses.replace(preset(world), source="calibration: a test", between=LINK)


def written(path, world=WORLD, **changes):
    path.parent.mkdir(parents=True, exist_ok=True)
    text = calibration(ours(world), circumstances(world))
    path.write_text(json.dumps({**json.loads(text), **changes}) if changes else text)
    return path


@pytest.fixture
def named(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXCOLL_TERMS", str(tmp_path / "named.json"))
    return tmp_path / "named.json"


def test_without_a_calibration_the_preset_stands():
    found = terms_here(WORLD)
    assert found == preset(WORLD, cores=host.cores())
    assert found.source.startswith("preset: CPU processes over Gloo")


def test_what_is_named_is_gone_by(named):
    written(named)
    assert terms_here(WORLD) == ours()


def test_what_is_saved_is_found_and_read_once(tmp_path):
    file = written(saved(WORLD))
    assert file.is_relative_to(tmp_path / "cache" / "jaxcoll" / "terms")
    assert file.name == "gloo-n4-processes4-hosts1.json"
    assert terms_here(WORLD) == ours()
    file.unlink()
    assert terms_here(WORLD) == ours(), "nothing changes during a run"


def test_saved_bytes_that_are_not_text_are_refused_for_their_own_world_only():
    saved(WORLD).parent.mkdir(parents=True)
    saved(WORLD).write_bytes(b"\xff")
    other = World("cpu", (8,), processes=8)
    assert terms_here(other).source.startswith("preset: ")
    with pytest.raises(ValueError, match=f"the calibration {re.escape(str(saved(WORLD)))}: "):
        terms_here(WORLD)


def test_what_is_saved_later_changes_nothing_either():
    before = terms_here(WORLD)
    written(saved(WORLD))
    assert terms_here(WORLD) == before


def test_names_tell_machines_worlds_and_memory_apart(monkeypatch):
    h100 = World("gpu", (16,), 2, device_kind="NVIDIA H100 80GB HBM3/x", hosts=2)
    assert saved(h100).name == "nccl-NVIDIA_H100_80GB_HBM3_x-n16-processes2-hosts2.json"
    fresh = saved(WORLD)
    keeps_memory(monkeypatch, True)
    assert saved(WORLD).name == "gloo-n4-processes4-hosts1-kept.json"
    assert saved(h100).name == "nccl-NVIDIA_H100_80GB_HBM3_x-n16-processes2-hosts2.json"
    monkeypatch.setattr(host, "machine", lambda: "another, 3 cores")
    assert saved(WORLD).parent != fresh.parent


def test_the_cache_is_in_the_home_folder_where_nothing_is_said(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert saved(WORLD).is_relative_to(tmp_path / ".cache" / "jaxcoll")


@pytest.mark.parametrize(
    ("hosts", "found"),
    [
        (Hosts((0, 0, 0, 0), 2, known=True), True),
        (Hosts((0, 0, 2, 2), 2, known=True), False),
        (Hosts((0, 0, 0, 0)), False),
    ],
    ids=["one host", "two hosts", "hosts that are not known"],
)
def test_several_processes_read_what_is_saved_only_on_one_host(monkeypatch, hosts, found):
    monkeypatch.setattr(host, "hosts_of_job", lambda: hosts)
    written(saved(WORLD))
    assert (terms_here(WORLD) == ours()) is found


def test_processes_of_several_hosts_go_by_what_all_of_them_know(monkeypatch):
    monkeypatch.setattr(host, "hosts_of_job", lambda: Hosts((0, 0, 2, 2), 7, known=True))
    keeps_memory(monkeypatch, True)
    assert terms_here(WORLD) == preset(WORLD, cores=7)


def test_processes_of_a_cluster_read_what_is_named(monkeypatch, named):
    monkeypatch.setattr(host, "hosts_of_job", lambda: Hosts((0, 0, 2, 2), 7, known=True))
    written(named)
    assert terms_here(WORLD) == ours()


def test_the_preset_knows_whether_malloc_keeps_memory(monkeypatch):
    keeps_memory(monkeypatch, True)
    assert terms_here(WORLD) == preset(WORLD, cores=host.cores(), keeps_memory=True)
    gpu = World("gpu", (4,))
    assert terms_here(gpu) == preset(gpu)


def test_a_file_of_another_world_leaves_the_preset_and_the_plan_says_so(named):
    written(named)
    other = World("cpu", (2,), processes=2)
    found = terms_here(other)
    assert found.source.startswith(preset(other, cores=host.cores()).source)
    assert f"since {named} is of another world (gloo, 4 replicas" in found.source
    assert dataclasses.replace(found, source="") == dataclasses.replace(
        preset(other, cores=host.cores()), source=""
    )


@pytest.mark.parametrize("kept", [True, False])
def test_a_file_of_other_memory_leaves_the_preset_and_the_plan_says_so(monkeypatch, named, kept):
    keeps_memory(monkeypatch, not kept)
    written(named)
    keeps_memory(monkeypatch, kept)
    words = "memory that malloc gives back" if kept else "memory that malloc keeps"
    assert terms_here(WORLD).source.endswith(words)


def test_a_named_file_that_is_not_there(named):
    with pytest.raises(
        ValueError,
        match="named.json cannot be read .No such file or directory.: name another in JAXCOLL_TERMS",
    ):
        terms_here(WORLD)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": 2}, "named.json: these cost terms are of version 2, and this jaxcoll reads"),
        ({"format": "x"}, "named.json: this is no file of cost terms"),
        ({"call": -1}, "named.json: these cost terms are damaged"),
        (
            {"measured_on": {"machine": "abacus", "keeps_memory": False}},
            "measured on another machine .abacus.; this is .*: calibrate here with `jaxcoll bench",
        ),
        ({"measured_on": None}, "measured on another machine .None."),
    ],
    ids=str,
)
def test_files_that_are_refused(named, changes, words):
    written(named, **changes)
    with pytest.raises(ValueError, match=words):
        terms_here(WORLD)


@pytest.mark.parametrize("automatic", [True, False])
def test_a_file_that_is_cut_off_is_refused(named, monkeypatch, automatic):
    if automatic:
        monkeypatch.delenv("JAXCOLL_TERMS")
    file = written(saved(WORLD) if automatic else named)
    file.write_text(file.read_text()[:100])
    with pytest.raises(ValueError, match="cannot be read: expected JSON as a calibration writes"):
        terms_here(WORLD)


def test_the_machine_is_its_processor_and_cores(monkeypatch, tmp_path):
    assert machine().endswith(f" {host.cores()} cores")
    monkeypatch.setattr(host, "_PROCESSOR", tmp_path / "none")
    monkeypatch.delattr("os.sched_getaffinity", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: None)
    assert host.machine.__wrapped__().endswith(", 1 cores")
