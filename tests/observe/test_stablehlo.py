"""StableHLO notations that small programs here do not use, and texts that are not in order."""

import re

import pytest

from jaxcoll._observe.parse.collective import Operand
from jaxcoll._observe.parse.stablehlo import read_stablehlo


def module(*lines, meshes=""):
    body = "".join(f"    {line}\n" for line in lines)
    return (
        "module @jit_f attributes {mhlo.num_partitions = 8 : i32, mhlo.num_replicas = 1 : i32} {\n"
        f"{meshes}  func.func public @main(%arg0: tensor<4xf32>) -> (tensor<4xf32>) {{\n{body}"
        "    return %arg0 : tensor<4xf32>\n  }\n}\n"
    )


def permute(pairs, signature="(tensor<4xf32>) -> tensor<4xf32>"):
    return (
        '%1 = "stablehlo.collective_permute"(%arg0) <{channel_handle = '
        f"#stablehlo.channel_handle<handle = 1, type = 1>, source_target_pairs = {pairs}}}> : "
        f"{signature}"
    )


def gather(groups, signature="(tensor<4xf32>) -> tensor<32xf32>"):
    return (
        '%1 = "stablehlo.all_gather"(%arg0) <{all_gather_dim = 0 : i64, channel_handle = '
        f"#stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = {groups}, "
        f"use_global_device_ids}}> : {signature}"
    )


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ("dense<[[0, 1], [2, 3]]> : tensor<2x2xi64>", ((0, 1), (2, 3))),
        ("dense<[[0, 1], [2, -1]]> : tensor<2x2xi64>", ((0, 1), (2,))),
        ("dense<0> : tensor<1x1xi64>", ((0,),)),
        ("dense<> : tensor<0x0xi64>", (tuple(range(8)),)),
    ],
)
def test_dense_groups(groups, expected):
    (found,) = read_stablehlo(module(gather(groups)))
    assert found.groups == expected


def test_long_lists_are_in_hexadecimal():
    digits = "".join(n.to_bytes(8, "little").hex() for n in (0, 1, 1, 2, 2, 300))
    (found,) = read_stablehlo(module(permute(f'dense<"0x{digits}"> : tensor<3x2xi64>')))
    assert found.groups == ((0, 1), (1, 2), (2, 300))
    assert found.group_size == 4


@pytest.mark.parametrize(
    ("mesh", "axis", "expected"),
    [
        ('<["a"=2, "b"=4]>', 'name = "a"', ((0, 4), (1, 5), (2, 6), (3, 7))),
        ('<["a"=2, "b"=2], device_ids=[3, 1, 2, 0]>', 'name = "b"', ((3, 1), (2, 0))),
        (
            '<["a"=4]>',
            'name = "a", sub_axis_info = #stablehlo.sub_axis_info<pre_size = 2, size = 2>',
            ((0, 1), (2, 3)),
        ),
    ],
)
def test_axes_of_a_mesh(mesh, axis, expected):
    groups = (
        f"#stablehlo.replica_group_mesh_axes<mesh = @mesh_0, axes = [#stablehlo.axis_ref<{axis}>]>"
    )
    meshes = f"  sdy.mesh @mesh_0 = {mesh} {{stablehlo.mesh = {{axes = []}}}}\n"
    (found,) = read_stablehlo(module(gather(groups), meshes=meshes))
    assert found.groups == expected


def test_host_callbacks_are_no_collectives():
    send = '"stablehlo.send"(%arg0, %0) <{is_host_transfer = true}> : (tensor<4xf32>) -> !t'
    assert read_stablehlo(module(send)) == ()


def test_ragged_exchange():
    types = "(tensor<16xf32>, tensor<16xf32>, tensor<8xi32>) -> tensor<16xf32>"
    line = (
        "%1 = stablehlo.custom_call @ragged_all_to_all(%arg0, %a, %b) {api_version = 4 : i32, "
        "backend_config = {channel_id = 1 : i64, replica_groups = dense<[[0, 1]]> : "
        f"tensor<1x2xi64>}}}} : {types}"
    )
    (found,) = read_stablehlo(module(line))
    assert (found.kind, found.operands) == ("ragged-all-to-all", (Operand("f32", (16,)),))


PAIRS = "dense<[[0, 1]]> : tensor<1x2xi64>"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "expected StableHLO text, with a line that begins with 'module'.*got ''"),
        ("HloModule jit_f\n", "got 'HloModule jit_f.n'.*is HLO: use `read_hlo`"),
        (module(permute(PAIRS))[:-3], "looks cut off: it ends inside"),
        ("module @jit_f {\n}", "looks cut off: it ends before the function 'main'"),
        (module("%1 = call @lost(%arg0) : (tensor<4xf32>) -> ()"), "calls 'lost', which is not"),
        (module(permute("pairs<0, 1>")), "expected replica groups as `dense<...>` or as axes"),
        (
            module(gather("#stablehlo.replica_group_mesh_axes<mesh = @lost, axes = []>")),
            "expected replica groups as `dense<...>` or as axes",
        ),
        (module(permute(PAIRS, "tensor<4xf32>")), "expected a signature, .*cut off or damaged"),
        (
            module(permute(PAIRS, "(tensor<?xi8>) -> tensor<?xi8>")),
            "of known shape, .*tensor<.xi8>",
        ),
        (
            module(permute(PAIRS).replace("collective_permute", "collective_shuffle")),
            "`stablehlo.collective-shuffle` moves data between devices in a way",
        ),
        (module("%1 = sdy.all_gather [{}] %arg0"), "`sdy.all-gather` moves data between devices"),
    ],
)
def test_what_is_not_understood_is_an_error(text, words):
    with pytest.raises(ValueError, match=re.compile(words, re.DOTALL)):
        read_stablehlo(text)
