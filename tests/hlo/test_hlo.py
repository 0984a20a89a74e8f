"""HLO notations that today's compilers here do not print, and texts that are not in order."""

import re

import pytest

from jaxcoll._hlo.collective import Operand
from jaxcoll._hlo.hlo import read_hlo

ADD = """\
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
"""


AR = "%ar = f32[16,4]{1,0} all-reduce(%x), replica_groups={{0,1}}"


def module(*computations, counts="num_partitions=8"):
    return "\n\n".join([f"HloModule jit_f, is_scheduled=true, {counts}", *computations])


def entry(*lines):
    body = "".join(f"  {line}\n" for line in ("%x = f32[16,4]{1,0} parameter(0)", *lines))
    return f"ENTRY %main (x: f32[16,4]) -> f32[16,4] {{\n{body}}}\n"


def only(text):
    (found,) = read_hlo(text).collectives
    return found


def test_operands_typed_in_place():
    line = (
        "ROOT %ar = (f32[2,3]{1,0}, bf16[7]{0}) all-reduce(f32[2,3]{1,0} %p, "
        "/*index=1*/bf16[7]{0:T(8,128)(2,1)} %q), replica_groups={}, to_apply=%add"
    )
    found = only(module(ADD, entry(line), counts="replica_count=4"))
    assert found.operands == (Operand("f32", (2, 3)), Operand("bf16", (7,)))
    assert found.groups == ((0, 1, 2, 3),)


def test_slices_name_nameless_collective():
    for ends, names in [
        ({"a": "jit(f)/pack0/psum", "b": "jit(f)/pack1/psum"}, "(jit(f)/pack0/psum:jit(f)/pack1/psum)"),
        ({"a": "jit(f)/pack0/psum", "b": "jit(f)/pack0/psum"}, "jit(f)/pack0/psum"),
        ({"a": "jit(f)/add", "b": "jit(f)/reduce_sum"}, ""),
    ]:  # fmt: skip
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


def test_nameless_collective_borrows_no_name():
    end = "replica_groups={}, to_apply=%add"
    first, second = f"%a = f32[4] all-reduce(%x), {end}", f"%b = f32[4] all-reduce(%a), {end}"
    named = f'{second}, metadata={{op_name="jit(f)/pack1/psum"}}'
    found = read_hlo(module(ADD, entry(first, named))).collectives
    assert [x.op_name for x in found] == ["", "jit(f)/pack1/psum"]
    whole = "%t = (f32[4], f32[4]) tuple(%a, %x)"
    part = '%p = f32[4] get-tuple-element(%t), index=1, metadata={op_name="jit(f)/pack1/psum"}'
    assert only(module(ADD, entry(first, whole, part))).op_name == "", "nor that of what is beside"


def test_lowered_text_takes_device_count():
    line = "replica_groups={}, channel_id=1, use_global_device_ids=true, to_apply=%add"
    text = module(ADD, entry(f"ROOT %ar = f32[16,4] all-reduce(%x), {line}"), counts="x=1")
    assert [c.groups for c in read_hlo(text, devices=8).collectives] == [(tuple(range(8)),)]


def test_a_wrapped_asynchronous_computation():
    wrapped = fusion(
        "wrapped", "%p = f32[16,4]{1,0} parameter(0)",
        "ROOT %exchange = f32[16,4]{1,0} all-to-all(%p), channel_id=2, "
        "replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}",
    )  # fmt: skip
    lines = (
        "%start = ((f32[16,4]), f32[16,4], s32[]) async-start(%x), calls=%wrapped",
        "%going = ((f32[16,4]), f32[16,4], s32[]) async-update(%start), calls=%wrapped",
        "ROOT %done = f32[16,4]{1,0} async-done(%start), calls=%wrapped",
    )
    found = only(module(wrapped, entry(*lines)))
    assert (found.kind, found.is_async, found.group_size) == ("all-to-all", True, 4)


def test_start_made_synchronous():
    lines = (
        "%s = f32[16,4]{1,0} all-reduce-start(%x), replica_groups={{0,1}}, channel_id=1, "
        'use_global_device_ids=true, backend_config={"collective_backend_config":{"is_sync":true}}',
        "ROOT %d = f32[16,4]{1,0} all-reduce-done(%s)",
    )
    assert not only(module(entry(*lines))).is_async


def fusion(name, *lines):
    return f"%{name} (p: f32[2,4]) -> f32[16,4] {{\n" + "".join(f"  {x}\n" for x in lines) + "}\n"


GATHER = (
    "%{name} = f32[16,4]{{1,0}} all-gather(%p), channel_id=1, replica_groups=[1,8]<=[8], "
    'dimensions={{0}}, use_global_device_ids=true, frontend_attributes={{chain_id="{chain}"}}'
)
PART = "%p = f32[2,4]{1,0} parameter(0)"


def chain(number, *products):
    """The fusions of a TPU v5e that start, continue and end an all-gather, and their calls."""
    starts = [GATHER.format(name=f"ag{number}.{k}", chain=number) for k in range(3)]
    call = 'custom-call({}), custom_call_target="AsyncCollective{}"'
    ends = f"ROOT %e{number} = f32[16,4] {call.format(f'%p, %ag{number}.2', 'Done')}"
    begin = f"ROOT %b{number} = (f32[2,4], u32[]) {call.format(f'%ag{number}.0', 'Start')}"
    multiply = "%m = f32[2,2] dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={1}"
    return (
        fusion(f"begin{number}", PART, starts[0], begin),
        fusion(f"go_on{number}", PART, starts[1], multiply, "ROOT %t = (f32[2,2]) tuple(%m)"),
        fusion(f"end{number}", PART, starts[2], ends),
    ), (
        f"%start{number} = (f32[2,4], u32[]) fusion(%p), kind=kCustom, calls=%begin{number}",
        f"%going{number} = (f32[2,2]) fusion(%p), kind=kOutput, calls=%go_on{number}",
        f"%done{number} = f32[16,4] fusion(%p), kind=kCustom, calls=%end{number}",
    )  # fmt: skip


def test_chain_is_one_asynchronous_collective():
    (first, a), (second, b) = chain(0), chain(1)
    program = read_hlo(module(*first, *second, entry(PART, *a[:2], *b[:2], a[2], b[2])))
    assert program.unread == ()
    found = [(c.kind, c.operands, c.group_size, c.is_async, c.trips) for c in program.collectives]
    assert found == [("all-gather", (Operand("f32", (2, 4)),), 8, True, 1)] * 2
    # What continues the one multiplies while the other is in flight, too.
    assert [c.meanwhile.matmuls for c in program.collectives] == [2, 1]
    (note,) = read_hlo(module(*first[1:], entry(PART, *a[1:]))).unread
    assert "chain_id='0'" in note


def test_scattering_fusion_is_reduce_scatter():
    for emitter, kind, wire_bytes in [
        ("SingleInputAllReduceScatterFusion", "reduce-scatter", 7 * 32),
        ("RotatedPincerEmitter", "all-reduce", 14 * 32),
    ]:
        scatter = fusion(
            "all-reduce-scatter",
            "%p = f32[16,4]{1,0} parameter(0)",
            "%ar = f32[16,4]{1,0} all-reduce(%p), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, "
            "use_global_device_ids=true, to_apply=%add",
            "ROOT %own = f32[2,4]{1,0} dynamic-slice(%ar, %i, %i), dynamic_slice_sizes={2,4}",
        )
        call = (
            "ROOT %f = f32[2,4]{1,0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter, "
            f'backend_config={{"collective_algorithm_config":{{"emitter":"{emitter}"}}}}'
        )
        found = only(module(ADD, scatter, entry(call)))
        assert (found.kind, found.wire_bytes, found.nbytes) == (kind, wire_bytes, 256)


@pytest.mark.parametrize("quote", ["", '"'])
def test_send_to_targets_is_permute(quote):
    pairs = f"frontend_attributes={{_xla_send_recv_source_target_pairs={quote}{{{{0,1}},{{1,2}}}}{quote}}}"
    lines = (
        "%t = token[] after-all()",
        f"%r = (f32[16,4], u32[], token[]) recv(%t), channel_id=1, {pairs}",
        f"%s = (f32[16,4], u32[], token[]) send(%x, %t), channel_id=1, {pairs}",
        "%m = f32[16,16] dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={1}",
        "%d = token[] send-done(%s), channel_id=1",
        "%e = (f32[16,4], token[]) recv-done(%r), channel_id=1",
    )
    found = only(module(entry(*lines)))
    assert (found.kind, found.groups, found.nbytes) == ("collective-permute", ((0, 1), (1, 2)), 256)
    assert (found.is_async, found.meanwhile.matmuls) == (True, 1)


def test_convolution_counts_no_padding():
    for window, n, pairs in [
        ("size=3", 2, 6), ("size=3 pad=1_1", 4, 10), ("size=3 stride=2 pad=1_1", 2, 5),
        ("size=3 pad=1_1 lhs_dilate=2", 7, 10), ("size=2 pad=1_1 rhs_dilate=2", 4, 6),
    ]:  # fmt: skip
        line = (
            f"%c = f32[5,{n},2] convolution(f32[5,4,3] %a, f32[{window[5]},3,2] %k), "
            f"window={{{window}}}, dim_labels=b0f_0io->b0f"
        )
        (product,) = read_hlo(module(entry(line))).matmuls
        assert product.flops == 2 * 5 * 3 * 2 * pairs


def test_operand_is_a_tuple_element():
    """XLA since JAX 0.12 dumps elements of tuples so, without instructions of their own."""
    lines = (
        "%t = (f32[16,4]{1,0}, (s8[3]{0}, /*index=1*/f16[8]{0})) custom-call(%x), "
        'custom_call_target="many"',
        f"ROOT {AR.replace('%x', '%t#0, %t#1#1')}",
    )
    assert only(module(entry(*lines))).operands == (Operand("f32", (16, 4)), Operand("f16", (8,)))


LAYOUTS = {  # beside those of compare_hlo.py
    "a brace on its own line in a value": lambda t: t.replace("NOTE", "{\n}"),
    "one line": lambda t: t.replace("\n", " ").replace("devices=8 ", "devices=8\n"),
    "comments": lambda t: "// a\n" + t.replace("(%x)", "(/* ) */ %x // }\n)"),
    "computations in place": lambda t: t.replace("to_apply=%inner", "to_apply=\n" + INNER),
    "a list of computations": lambda t: t.replace("to_apply=%inner", f"called_computations={{{INNER}}}"),
}  # fmt: skip
INNER = f"{{\n  %x = f32[16,4]{{1,0}} parameter(0)\n  ROOT {AR}, frontend_attributes={{v=NOTE}}\n}}"


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_read_alike(name):
    call = "%c = f32[16,4]{1,0} call(%x), to_apply=%inner, frontend_attributes={v=NOTE}"
    last = "ROOT " + AR.replace("%ar", "%last").replace("%x", "%c")
    inner = f"%inner (x: f32[16,4]) -> f32[16,4] {INNER}"
    text = module(inner, entry(call, last), counts="num_partitions=8, devices=8")
    expected, found = (
        [
            (c.kind, c.name, c.operands, c.groups, c.trips, c.wire_bytes)
            for c in read_hlo(written.replace("NOTE", "1")).collectives
        ]
        for written in (text, LAYOUTS[name](text))
    )
    assert len(found) == 2
    assert found == expected


def test_start_calling_sum_counts_once():
    """XLA's canonical text has `calls=` for `to_apply=`."""
    add = "calls=\n{\n  %a = f32[] parameter(0)\n  ROOT %s = f32[] add(%a, %a)\n}"
    groups = "f32[4,4] reduce-scatter(%x), replica_groups={{0,1,2,3}}, dimensions={0}"
    inner = f"{{\n  %x = f32[16,4] parameter(0)\n  ROOT %r = {groups}, {add}\n}}"
    start = groups.replace(
        "f32[4,4] reduce-scatter", "((f32[16,4]), f32[4,4]) reduce-scatter-start"
    )
    text = module(entry(f"%s = {start}, {add}, calls=\n{inner}", "ROOT %d = f32[4,4] reduce-scatter-done(%s)"))  # fmt: skip
    assert only(text).is_async


def test_start_wrapping_twice_counts_once():
    thread = 'execution_thread="sparsecore"'
    inner = f"called_computations={{\n{INNER}, {thread}\n}}"
    wrapped = f"ROOT %k = f32[16,4]{{1,0}} custom-call(%p), {inner}"
    start = f"((f32[16,4]), f32[16,4]) custom-call-start(%x), {inner}, calls="
    body = f"{{\n  %p = f32[16,4]{{1,0}} parameter(0)\n  {wrapped}\n}}, {thread}"
    text = module(entry(f"%s = {start}\n{body}", "ROOT %d = f32[16,4] custom-call-done(%s)"))
    found = only(text.replace("NOTE", "1"))
    assert (found.name, found.is_async, found.trips) == ("ar", True, 1)


def test_unknown_nested_computation_is_refused():
    text = module(entry(f"%c = f32[16,4] call(%x), beside={INNER}"))
    with pytest.raises(ValueError, match="'c' in 'main' defines a computation in an unknown way"):
        read_hlo(text)
    text = module(entry(f"%c = f32[16,4] call(%x), to_apply={INNER}").replace("call", "visit"))
    with pytest.raises(ValueError, match="'ar' is in 'main.c.0', which no instruction calls"):
        read_hlo(text)


def test_condition_runs_once_more():
    line = "%{0} = f32[32,4] all-gather(%p), replica_groups={{{{0,1}}}}, dimensions={{0}}"
    parts = [
        fusion(name, "%p = f32[16,4] parameter(0)", line.format(name), "ROOT %y = pred[] constant(true)")
        for name in ("more", "body")
    ]  # fmt: skip
    loop = (
        'condition=%more, body=%body, backend_config="{\\"known_trip_count\\":{\\"n\\":\\"3\\"}}"'
    )
    outer = fusion("outer", "%p = f32[16,4] parameter(0)", f"ROOT %w = f32[16,4] while(%p), {loop}")
    many = loop.replace("body=%body", "body=%outer").replace("3", "10").replace("%more", "%always")
    always = fusion("always", "ROOT %yes = pred[] constant(true)")
    text = module(*parts, outer, always, entry(f"ROOT %w = f32[16,4] while(%x), {many}"))
    assert {c.name: c.trips for c in read_hlo(text).collectives} == {"more": 40, "body": 30}


def test_look_alikes_are_no_collectives():
    for lines in [
        (),
        ("%t = token[] after-all()", "%send = (f32[16,4]{1,0}, u32[], token[]) send(%x, %t), "
         "channel_id=9, is_host_transfer=true"),
        ("%all-reduce.7 = f32[16,4]{1,0} negate(%x), "
         'metadata={op_name="jit(f)/all-reduce(x) body=%nowhere"}',
         "ROOT %all-gather = f32[16,4]{1,0} copy(%all-reduce.7)"),
    ]:  # fmt: skip
        program = read_hlo(module(entry(*lines)))
        assert program.collectives == program.unread == ()


def test_unknown_senders_are_unread():
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


def test_unknown_lines_are_unread():
    for line, words in [
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
    ]:
        program = read_hlo(module(entry(line)))
        assert program.collectives == ()
        (note,) = program.unread
        assert re.search(words, note)


def test_damaged_texts_are_refused():
    for text, words in [
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
    ]:
        with pytest.raises(ValueError, match=words):
            read_hlo(text)


@pytest.mark.timeout(60)  # reading takes less than a second, and if it were quadratic, minutes
def test_reading_time_is_linear():
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
