"""Every notation of groups means the devices it means to XLA."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxcoll._hlo.replica_groups import (
    count_group,
    find_groups,
    read_groups,
)

GLOBAL = "use_global_device_ids=true"


def test_notations():
    for text, expected in [
        ("{{0,1},{2,3}}, to_apply=%add", ((0, 1), (2, 3))),
        ("{{0, 1, 2}, {3}}", ((0, 1, 2), (3,))),
        ("{{3,0}}", ((3, 0),)),
        ("{}, to_apply=%add", ()),
        ("[1,4]<=[4]", ((0, 1, 2, 3),)),
        ("[2,4]<=[8], dimensions={0}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("[4,2]<=[2,4]T(1,0), dimensions={1}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("[2,4]<=[2,2,2]T(1,0,2)", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("mesh['a'=2,'b'=4] {'b'}, use_global_device_ids=true", ((0, 1, 2, 3), (4, 5, 6, 7))),
        # Parts of an axis, as XLA prints them when a reshape splits it.
        ("mesh['a'=8] {'a':(4)2}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("mesh['a'=8] {'a':(1)4}", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("mesh['x'=2,'y'=4] {'y':(2)2}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("mesh['a'=8] {'a':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        # A mesh whose devices are not in order.
        ("mesh['a'=2,'b'=4], device_ids=([2,2,2]T(1,0,2)) {'a'}", ((0, 2), (1, 3), (4, 6), (5, 7))),
    ]:
        assert read_groups(text) == expected


def test_unknown_notations_are_refused():
    for text in [
        "",
        "{{0,1},{2",
        "[2,4]<=",
        "mesh['a'=2,'b'=4]",
        "mesh['a'=2] {'a':2}",
        "ring{0..7}",
        "{{a}}",
    ]:
        with pytest.raises(
            ValueError, match=r"expected replica groups as .* newer than this version"
        ):
            read_groups(text)


@pytest.mark.parametrize("axes", ["'c'", "'a':(1)3"])
def test_unknown_axes_are_refused(axes):
    with pytest.raises(ValueError, match="no such axis, or the part does not divide it"):
        read_groups(f"mesh['a'=2,'b'=4] {{{axes}}}")


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_mesh_groups_differ_along_axes_only(sizes, data):
    names = [f"n{k}" for k in range(len(sizes))]
    chosen = data.draw(st.lists(st.sampled_from(names), unique=True, min_size=1))
    devices = np.array(data.draw(st.permutations(range(math.prod(sizes)))))
    mesh = ",".join(f"'{name}'={size}" for name, size in zip(names, sizes, strict=True))
    order, axes = ",".join(map(str, devices)), ",".join(f"'{name}'" for name in chosen)
    groups = read_groups(f"mesh[{mesh}], device_ids=({order}) {{{axes}}}")

    place = {d: np.unravel_index(k, sizes) for k, d in enumerate(devices.tolist())}
    apart = [names.index(name) for name in chosen]
    assert sorted(itertools.chain(*groups)) == sorted(devices.tolist())
    for group in groups:
        places = [place[d] for d in group]
        assert len({tuple(c for k, c in enumerate(p) if k not in apart) for p in places}) == 1
        assert [tuple(p[k] for k in apart) for p in places] == list(
            itertools.product(*(range(sizes[k]) for k in apart))
        )


def test_three_device_numberings():
    for kind, attributes, expected in [
        ("all-reduce", f"channel_id=1, replica_groups={{}}, {GLOBAL}", ((0, 1, 2, 3, 4, 5),)),
        ("all-reduce", f"channel_id=1, replica_groups={{{{0,5}}}}, {GLOBAL}", ((0, 5),)),
        ("all-reduce", "replica_groups={}", ((0, 1),)),
        ("all-reduce", "channel_id=1", ((0, 1, 2, 3, 4, 5),)),
        ("all-reduce", "channel_id=1, replica_groups={{0},{1}}", ((0, 1, 2), (3, 4, 5))),
        ("all-to-all", "channel_id=1, replica_groups={}", ((0, 1, 2),)),
        ("collective-permute", "channel_id=1, source_target_pairs={{0,1}}", ((0, 1),)),
    ]:
        assert find_groups(kind, attributes, replicas=2, partitions=3) == expected


def test_permutation_counts_moving_devices():
    assert count_group("collective-permute", ((0, 1), (1, 0), (2, 2))) == 2
    assert count_group("collective-permute", ((0, 0), (1, 1))) == 0
    assert count_group("all-reduce", ((0, 1, 2), (3,))) == 3
