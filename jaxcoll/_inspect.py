"""`jc.inspect` and `jc.assert_collectives`: what a program will send, before it runs."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from jaxcoll._errors import ReductionInLoopWarning
from jaxcoll._jaxpr.loop_reductions import described
from jaxcoll._observe.parse.collective import KINDS
from jaxcoll._observe.report import Report, report_of
from jaxcoll._observe.report_text import carried, like
from jaxcoll._show.units import counted, size
from jaxcoll._step.aot import compile_for
from jaxcoll._step.lowering import stage_of, texts_of

_REPEATED = (
    "reductions stand in a loop, and all that becomes of their results there is that they are "
    "added up: {found}. Add up what each replica has and reduce it once, after the loop; "
    "`jc.accumulate` does so for gradients, `jc.reduce_metrics` for metrics."
)


def inspect(fun: Any, *args: Any, topology: Any = None, **kwargs: Any) -> Report:
    """What a program asks for, and beside it what the compiler makes of that. Nothing runs.

    Law: nothing is skipped in silence. Every collective of the compiled program is listed once,
    an asynchronous pair as one, with the element types that the compiler settled on and the
    loops it stands in; what cannot be counted is in `Report.uncounted`. It works with programs that
    do not use jaxcoll; of those that do, it names the packs and their leaves.

    Args:
      fun: a function, jitted here; one that `jax.jit`, `jax.pmap`, flax's `nnx.jit` or equinox's
        `filter_jit` returned; a `data_parallel` step; a `functools.partial` or a method of one; or,
        without arguments, what `.trace`, `.lower` or `.compile` returned, or HLO text. Of what is
        compiled already, what was requested is no longer known. A function that takes a `mesh` is
        given one, of all devices on the axis "data".
      *args: its arguments: arrays, or `jax.ShapeDtypeStruct`s in their place. Only their shapes
        are read, so that donated ones serve, too.
      topology: a cluster to compile for in place of the devices that are here, such as "h100:2x8"
        or "v5p:8x8x8" (docs/clusters.md); the vendor's compiler must be installed, no device. A
        `data_parallel` step is laid over it as it stands, a function that takes a `mesh` is given
        one, and others use that of `jax.set_mesh`.
      **kwargs: its keyword arguments, likewise. With a topology, `mesh` says how its devices are
        arranged: `jax.sharding.AbstractMesh(sizes, names)`.

    Returns:
      A `Report`: print it for a table, `plot()` for a picture, `to_json()` for machines. Cost:
      tracing and compiling; reading takes a few seconds for 100 MB of text.

    Raises:
      ValueError: `fun` is none of these, or a text is not HLO or is cut off. What `fun` itself
        raises while it is traced passes through.
      ValueError: there is no such topology (the nearest are listed), or the mesh does not fit it.
      ImportError: the compiler for the topology is not installed; the message has the command.
      DeadlineExceededError: it took longer than ten minutes to compile for the topology.

    Warns:
      ReductionInLoopWarning: reductions stand in a loop that only adds up their results. It is
        also among `Report.notes`.

    Examples:
      >>> import jax, jax.numpy as jnp, numpy as np
      >>> step = data_parallel(lambda w, x: all_reduce("mean", w * x.sum(), "data"))
      >>> report = inspect(step, np.ones(1000, "f"), np.ones(8, "f"))
      >>> [c.kind for c in report.collectives], report.wire_bytes
      (['all-reduce'], 7000)
      >>> report.leaves_of(0), report.changes(0)
      (('',), ())
    """
    return _report(fun, args, kwargs, topology, "inspect")


def assert_collectives(
    fun: Any,
    *args: Any,
    max_count: int | None = None,
    max_wire_bytes: int | None = None,
    max_operands: int | None = None,
    none_in_loops: bool = False,
    dtypes: Iterable[str] | None = None,
    kinds: Iterable[str] | None = None,
    topology: Any = None,
    **kwargs: Any,
) -> Report:
    """Hold a program to limits on what it sends, in a test suite. Nothing runs.

    Law: it passes only if every limit is known to be kept; where the text does not say (a loop of
    unknown length, a custom call that may send), a limit that depends on it fails.

    Args:
      fun: as in `inspect`, or the `Report` that it returned.
      *args: as in `inspect`.
      max_count: collectives that one run of the compiled program carries out, each turn of a
        loop counted; 0 for none at all.
      max_wire_bytes: bytes that leave one device in one run.
      max_operands: arrays that any one collective takes.
      none_in_loops: no collective may stand in a loop.
      dtypes: the element types that may travel, as HLO spells them: f32, bf16, s8, ...
      kinds: the kinds that may occur: all-reduce, all-gather, reduce-scatter, ...
      topology: as in `inspect`.
      **kwargs: as in `inspect`.

    Returns:
      The report, for what else a test may ask.

    Raises:
      AssertionError: a limit is exceeded; the message lists each limit, what was found, and the
        collectives behind it with the lines that ask for them.
      ValueError: an argument is invalid, or as in `inspect`.

    Examples:
      >>> import numpy as np
      >>> step = data_parallel(lambda w, x: all_reduce("mean", w * x.sum(), "data"))
      >>> report = assert_collectives(step, np.ones(10, "f"), np.ones(8, "f"), max_count=1)
      >>> assert_collectives(report, none_in_loops=True, dtypes=["f32"]).count
      1
    """
    most = {
        "max_count": max_count, "max_wire_bytes": max_wire_bytes, "max_operands": max_operands,
    }  # fmt: skip
    for name, limit in most.items():
        if limit is not None and (type(limit) is not int or limit < 0):
            raise ValueError(f"`{name}` must be None or an integer of at least 0; got {limit!r}.")
    allowed = {"dtypes": _words("dtypes", dtypes), "kinds": _words("kinds", kinds)}
    unknown = sorted((allowed["kinds"] or set()) - set(KINDS))
    if unknown:
        raise ValueError(f"`kinds` may name {', '.join(KINDS)}; got {unknown[0]!r}.")
    report = fun if isinstance(fun, Report) else None
    if report is None:
        report = _report(fun, args, kwargs, topology, "assert_collectives")
    if complaints := list(_complaints(report, most, none_in_loops, allowed)):
        raise AssertionError("\n".join([f"{report.name} exceeds its limits.", *complaints]))
    return report


def _report(fun: Any, args: Any, kwargs: Any, topology: Any, caller: str) -> Report:
    if isinstance(fun, str):
        if args or kwargs or topology is not None:
            raise ValueError(
                f"`{caller}` got arguments or a topology for a text, which is compiled already; "
                "pass the function and its arguments, or the text alone."
            )
        return report_of(fun)
    if topology is None:
        texts = texts_of(fun, args, kwargs, caller)
    elif callable(fun) and stage_of(fun) is None:
        others = {name: value for name, value in kwargs.items() if name != "mesh"}
        texts = compile_for(fun, args, others, topology, mesh=kwargs.get("mesh"))
    else:
        raise ValueError(
            f"`{caller}` compiles functions for a topology, and got {type(fun).__name__}, which is "
            "lowered for devices already, or no program; pass the function and its arguments."
        )
    notes = [_REPEATED.format(found=described(texts.repeated))] if texts.repeated else []
    for note in notes:
        warnings.warn(f"`{caller}`: {note}", ReductionInLoopWarning, stacklevel=3)
    return report_of(
        texts.compiled, texts.requested, texts.plans, texts.where, texts.terms, notes, texts.memory
    )


def _words(name: str, given: Iterable[str] | None) -> set[str] | None:
    if given is None:
        return None
    words = [given] if isinstance(given, str) else list(given)
    if not all(isinstance(word, str) for word in words):
        raise ValueError(f"`{name}` must be None or names, as in {name}=['...']; got {given!r}.")
    return set(words)


def _complaints(
    report: Report,
    most: Mapping[str, int | None],
    none_in_loops: bool,
    allowed: Mapping[str, set[str] | None],
) -> Iterable[str]:
    """What exceeds the limits on everything together, and those on each collective by itself."""
    runs, sent = report.runs, report.wire_bytes
    for name, found, text in (
        ("max_count", runs, f"{counted(runs, 'collective')} in one run"),
        ("max_wire_bytes", sent, f"{sent:,} wire bytes a device"),
    ):
        limit = most[name]
        if limit is not None and found > limit:
            text = f"{name}={limit:,}, found {text}:"
            yield from _complaint(report, text, range(report.count))
        elif limit is not None and report.uncounted:
            yield f"{name}={limit:,}, found {text}, but that is not all:"
            yield from (f"  {note}" for note in report.uncounted)
    each = list(enumerate(report.collectives))
    if (limit := most["max_operands"]) is not None:
        large = [k for k, c in each if len(c.operands) > limit]
        found = max((len(c.operands) for _, c in each), default=0)
        yield from _complaint(report, f"max_operands={limit}, found {found} in one:", large)
    if none_in_loops:
        inside = [k for k, c in each if c.loops]
        text = f"none_in_loops=True, found {counted(len(inside), 'collective')} in loops:"
        yield from _complaint(report, text, inside)
    for name, words in allowed.items():
        if words is not None:
            others = [set(c.dtypes if name == "dtypes" else [c.kind]) - words for _, c in each]
            text = f"{name}={sorted(words)}, found {', '.join(sorted(set().union(*others)))}:"
            yield from _complaint(report, text, [k for k, other in enumerate(others) if other])


def _complaint(report: Report, text: str, offending: Iterable[int]) -> Iterable[str]:
    """What is wrong, and the collectives behind it, the dearest first."""
    wanted = set(offending)
    groups = [kept for each in like(report) if (kept := [k for k in each if k in wanted])]
    if groups:
        yield text
        sent = [c.turns * c.wire_bytes for c in report.collectives]
        worst = sorted(groups, key=lambda each: -len(each) * sent[each[0]])
        for each in worst[:20]:
            c = report.collectives[each[0]]
            many = f"{len(each)} × " * (len(each) > 1)
            runs = " in a loop of unknown turns" if c.trips is None else f", run {c.trips:,} ×"
            yield (
                f"  {many}{c.kind} {c.name}: {counted(len(c.operands), 'operand')}, "
                f"{','.join(c.dtypes)}, {size(c.wire_bytes)} wire bytes"
                + (runs if c.trips != 1 else "")
                + (f"; {below}" if (below := carried(report, each[0])) else "")
            )
        if len(worst) > 20:
            yield f"  … and {sum(map(len, worst[20:]))} more"
