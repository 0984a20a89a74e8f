"""HLO notations that today's compilers here do not print, and texts that are not in order."""

import re

import pytest

from jaxcoll._observe.parse.collective import Operand
from jaxcoll._observe.parse.hlo import read_hlo

ADD = """\
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
"""


def module(*computations, counts="num_partitions=8"):
    return "\n\n".join([f"HloModule jit_f, is_scheduled=true, {counts}", *computations])


def entry(*lines):
    body = "".join(f"  {line}\n" for line in ("%x = f32[16,4]{1,0} parameter(0)", *lines))
    return f"ENTRY %main (x: f32[16,4]) -> f32[16,4] {{\n{body}}}\n"


def only(text):
    (found,) = read_hlo(text).collectives
    return found


def test_operands_typed_in_place():
    text = module(
        ADD,
        entry(
            "ROOT %ar = (f32[2,3]{1,0}, bf16[7]{0}) all-reduce(f32[2,3]{1,0} %p, "
            "/*index=1*/bf16[7]{0:T(8,128)(2,1)} %q), replica_groups={}, to_apply=%add"
        ),
        counts="replica_count=4",
    )
    found = only(text)
    assert found.operands == (Operand("f32", (2, 3)), Operand("bf16", (7,)))
    assert found.groups == ((0, 1, 2, 3),)


@pytest.mark.parametrize(
    ("ends", "names"),
    [
        ({"a": "jit(f)/pack0/psum", "b": "jit(f)/pack1/psum"}, "(jit(f)/pack0/psum:jit(f)/pack1/psum)"),
        ({"a": "jit(f)/pack0/psum", "b": "jit(f)/pack0/psum"}, "jit(f)/pack0/psum"),
        ({"a": "jit(f)/add", "b": "jit(f)/reduce_sum"}, ""),
    ],
)  # fmt: skip
def test_a_merged_collective_without_a_name_has_those_of_the_slices_of_its_result(ends, names):
    slices = [
        f'%{name} = f32[8,4] fusion(%done), kind=kLoop, calls=%add, metadata={{op_name="{of}"}}'
        for name, of in ends.items()
    ]
    start = "%ar = f32[16,4] all-reduce-start(%x), replica_groups={}, to_apply=%add"
    done = '%done = f32[16,4] all-reduce-done(%ar), metadata={scheduling_name="done"}'
    assert only(module(ADD, entry(start, done, *slices))).op_name == names
    unnamed = [line.partition(", metadata")[0].replace("%", "%s", 1) for line in slices]
    views = [
        f'%{name} = f32[32] bitcast(%s{name}), metadata={{op_name="{of}"}}'
        for name, of in ends.items()
    ]
    assert only(module(ADD, entry(start, done, *unnamed, *views))).op_name == names


def test_a_collective_without_a_name_does_not_have_that_of_the_next_one():
    end = "replica_groups={}, to_apply=%add"
    first, second = f"%a = f32[4] all-reduce(%x), {end}", f"%b = f32[4] all-reduce(%a), {end}"
    named = f'{second}, metadata={{op_name="jit(f)/pack1/psum"}}'
    found = read_hlo(module(ADD, entry(first, named))).collectives
    assert [x.op_name for x in found] == ["", "jit(f)/pack1/psum"]
    whole = "%t = (f32[4], f32[4]) tuple(%a, %x)"
    part = '%p = f32[4] get-tuple-element(%t), index=1, metadata={op_name="jit(f)/pack1/psum"}'
    assert only(module(ADD, entry(first, whole, part))).op_name == "", "nor that of what is beside"


def test_a_text_that_is_not_compiled_yet_is_for_as_many_devices_as_is_said():
    mark = "channel_id=1, use_global_device_ids=true, to_apply=%add"
    text = module(
        ADD, entry(f"ROOT %ar = f32[16,4]{{1,0}} all-reduce(%x), replica_groups={{}}, {mark}"),
        counts="x=1",
    )  # fmt: skip
    (found,) = read_hlo(text, devices=8).collectives
    assert found.groups == (tuple(range(8)),)


def test_names_without_percent_signs():
    text = module(
        "add {\n  a = f32[] parameter(0)\n  b = f32[] parameter(1)\n  ROOT s = f32[] add(a, b)\n}",
        "ENTRY main {\n  x.1 = f32[8]{0} parameter(0)\n"
        "  ROOT ar = f32[8]{0} all-reduce(x.1), channel_id=1, replica_groups=[4,2]<=[8], "
        "use_global_device_ids=true, to_apply=add\n}",
    )
    assert (only(text).operands, only(text).group_size) == ((Operand("f32", (8,)),), 2)


def test_a_wrapped_asynchronous_computation():
    wrapped = (
        "%wrapped (p: f32[16,4]) -> f32[16,4] {\n  %p = f32[16,4]{1,0} parameter(0)\n"
        "  ROOT %exchange = f32[16,4]{1,0} all-to-all(%p), channel_id=2, "
        "replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}\n}"
    )
    done = "f32[16,4]{1,0} async-done(%start), calls=%wrapped"
    text = module(
        wrapped,
        entry(
            "%start = ((f32[16,4]{1,0}), f32[16,4]{1,0}, s32[]) async-start(%x), calls=%wrapped",
            "%going = ((f32[16,4]{1,0}), f32[16,4]{1,0}, s32[]) async-update(%start), "
            "calls=%wrapped",
            f"ROOT %done = {done}",
        ),
    )
    found = only(text)
    assert (found.kind, found.is_async, found.group_size) == ("all-to-all", True, 4)


def test_a_start_that_the_compiler_has_made_synchronous():
    text = module(
        entry(
            "%s = f32[16,4]{1,0} all-reduce-start(%x), replica_groups={{0,1}}, channel_id=1, "
            'use_global_device_ids=true, backend_config={"collective_backend_config":'
            '{"is_sync":true}}',
            "ROOT %d = f32[16,4]{1,0} all-reduce-done(%s)",
        )
    )
    assert not only(text).is_async


def test_nested_loops_calls_and_fusions():
    text = module(
        "%inner (p: f32[16,4]) -> f32[16,4] {\n  %p = f32[16,4]{1,0} parameter(0)\n"
        "  ROOT %ar = f32[16,4]{1,0} all-reduce(%p), replica_groups={{0,1}}\n}",
        "%fused (p: f32[16,4]) -> f32[16,4] {\n  %p = f32[16,4]{1,0} parameter(0)\n"
        "  ROOT %c = f32[16,4]{1,0} call(%p), to_apply=%inner\n}",
        "%body (p: f32[16,4]) -> f32[16,4] {\n  %p = f32[16,4]{1,0} parameter(0)\n"
        "  ROOT %f = f32[16,4]{1,0} fusion(%p), kind=kCustom, calls=%fused\n}",
        "%more (p: f32[16,4]) -> pred[] {\n  %p = f32[16,4]{1,0} parameter(0)\n"
        "  %ag = f32[32,4]{1,0} all-gather(%p), replica_groups={{0,1}}, dimensions={0}\n"
        "  ROOT %yes = pred[] constant(true)\n}",
        "%outer (p: f32[16,4]) -> f32[16,4] {\n  %p = f32[16,4]{1,0} parameter(0)\n"
        "  ROOT %w = f32[16,4]{1,0} while(%p), condition=%more, body=%body, "
        'backend_config="{\\"known_trip_count\\":{\\"n\\":\\"3\\"}}"\n}',
        "%always (p: f32[16,4]) -> pred[] {\n  %p = f32[16,4]{1,0} parameter(0)\n"
        "  ROOT %yes = pred[] constant(true)\n}",
        entry(
            "%w = f32[16,4]{1,0} while(%x), condition=%always, body=%outer, "
            'backend_config={"known_trip_count":{"n":"10"}}',
            "ROOT %again = f32[16,4]{1,0} call(%w), to_apply=%fused",
        ),
        counts="replica_count=2",
    )
    found = [(c.kind, c.computation, c.trips) for c in read_hlo(text).collectives]
    assert found == [
        ("all-gather", "more", 40),  # the condition is asked once more than the loop turns
        ("all-reduce", "inner", 30),
        ("all-reduce", "inner", 1),
    ]


@pytest.mark.parametrize(
    "lines",
    [
        (),
        ("%t = token[] after-all()", "%send = (f32[16,4]{1,0}, u32[], token[]) send(%x, %t), "
         "channel_id=9, is_host_transfer=true"),
        ("%all-reduce.7 = f32[16,4]{1,0} negate(%x), "
         'metadata={op_name="jit(f)/all-reduce(x) body=%nowhere"}',
         "ROOT %all-gather = f32[16,4]{1,0} copy(%all-reduce.7)"),
    ],
    ids=["nothing", "host callback", "names"],
)  # fmt: skip
def test_what_only_looks_like_a_collective_is_none(lines):
    program = read_hlo(module(entry(*lines)))
    assert program.collectives == program.unread == ()


def test_what_may_send_and_is_not_understood_is_told():
    kernel = (
        '%k = f32[16,4]{1,0} custom-call(%x), custom_call_target="my_nccl_kernel", '
        "api_version=API_VERSION_TYPED_FFI"
    )
    shuffle = "%s = f32[16,4]{1,0} all-shuffle(%x), replica_groups={{0,1}}"
    gemm = '%g = f32[16,4]{1,0} custom-call(%x, %x), custom_call_target="__cublas$gemm"'
    program = read_hlo(module(entry(kernel, shuffle, gemm, AR)))
    assert [c.name for c in program.collectives] == ["ar"]
    assert "`all-shuffle` ('s') moves data" in program.unread[0]
    assert "custom call 'k' (my_nccl_kernel) may communicate" in program.unread[1]
    assert "'g' multiplies matrices of unknown sizes" in program.notes[0]


AR = "%ar = f32[16,4]{1,0} all-reduce(%x), replica_groups={{0,1}}"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (AR.replace("%x", "%y"), "has the operand '%y', which its computation"),
        (AR[: AR.index("(%x)") + 3], "expected an instruction, .*truncated or damaged"),
        (AR.replace("{{0,1}}", "ring(8)"), "expected replica groups as"),
        (AR.replace("all-reduce", "all-shuffle"), "`all-shuffle` .'ar'. moves data"),
        ("%s = (f32[]) send(%x), channel_id=1", "`send` .'s'. moves data between"),
        (
            "%s = (f32[]) send(%x), is_host_transfer=true, frontend_attributes="
            '{_xla_host_transfer_handler_name="xla_megascale_runtime"}',
            "`send` .'s'. moves data between devices, which is not counted",
        ),
        (
            "%p = f32[] collective-permute(%x, %x), source_target_pairs={{0,1}}, slice_sizes={{4}}",
            "'p' sends slices in place, which jaxcoll does not count",
        ),
    ],
)
def test_a_line_that_is_not_understood_is_unread(line, words):
    program = read_hlo(module(entry(line)))
    assert program.collectives == ()
    (note,) = program.unread
    assert re.search(words, note)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "expected HLO text, which begins with 'HloModule'.*got ''"),
        ("module @jit_f {\n}", "got 'module @jit_f {'.*only lowered, pass it"),
        ("HloModule jit_f", "looks truncated: it ends before the ENTRY computation"),
        (module(ADD), "looks truncated: it ends before the ENTRY computation"),
        (module(entry(AR))[:-3], "looks truncated: it ends inside the computation 'main'"),
        (module(entry("%c = f32[] call(%x), to_apply=%lost")), "'c' calls 'lost', which is not"),
        (
            module(f"%apart () -> f32[] {{\n  %x = f32[] parameter(0)\n  {AR}\n}}", entry()),
            "all-reduce 'ar' is in 'apart', which no instruction calls in a known way",
        ),
        (
            module(
                f"%circle () -> f32[] {{\n  %x = f32[] parameter(0)\n  {AR}\n"
                "  %c = f32[] call(%x), to_apply=%circle\n}",
                entry("%c = f32[] call(%x), to_apply=%circle"),
            ),
            "'circle' calls itself, which HLO does not allow",
        ),
    ],
)
def test_a_text_that_is_no_whole_program_is_an_error(text, words):
    with pytest.raises(ValueError, match=words):
        read_hlo(text)


@pytest.mark.timeout(60)  # reading takes less than a second, and if it were quadratic, minutes
def test_five_megabytes_are_read_in_linear_time():
    fusion = (
        "  %fusion.{k} = f32[256,256]{{1,0}} fusion(%x), kind=kLoop, calls=%add, "
        'metadata={{op_name="jit(train)/transpose(jvp(layer_{k}))/dot_general" stack_frame_id={k}}}'
    )
    reduce = (
        "  %ar.{k} = f32[256,256]{{1,0}} all-reduce(%fusion.{k}), channel_id={k}, "
        "replica_groups=mesh['d'=8] {{'d'}}, use_global_device_ids=true, to_apply=%add"
    )
    count = 30_000
    lines = [fusion.format(k=k) for k in range(count)]
    lines += [reduce.format(k=k) for k in range(0, count, 50)]
    text = module(ADD, entry(*[line.strip() for line in lines]))
    assert len(text) > 4e6
    assert len(read_hlo(text).collectives) == count // 50
