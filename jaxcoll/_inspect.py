"""`jc.inspect` and `jc.assert_collectives`: look at what a program will send, before it runs."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax

from jaxcoll._observe.parse.collective import KINDS, Collective, bytes_of
from jaxcoll._observe.programs import Programs
from jaxcoll._observe.report import Report, report_of
from jaxcoll._show.units import counted, some
from jaxcoll._step.aot import compile_for
from jaxcoll._step.lowering import lowerable, stage_of, texts_of
from jaxcoll._watch.watch import measured


def inspect(fun: Any, *args: Any, topology: Any = None, measure: int = 0, **kwargs: Any) -> Report:
    """Report what a program asks for, what the compiler makes of that, and what it takes.

    Nothing runs unless `measure` says so.

    Nothing is skipped in silence. Every collective of the compiled program is listed once,
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
      measure: how often to run it, on arrays, under JAX's profiler: what each collective took, how
        long each rank waited, and which came late. It runs as often again without the profile, on
        copies of what it donates. Over several processes all of them call this. 0: not at all.
      **kwargs: its keyword arguments, likewise. With a topology, `mesh` says how its devices are
        arranged: `jax.sharding.AbstractMesh(sizes, names)`.

    Returns:
      A `Report`: print it for a table, `plot()` for a picture, `to_json()` for machines. Cost:
      tracing and compiling, and what runs; reading takes a few seconds for 100 MB of text.

    Raises:
      ValueError: `fun` is none of these, or a text is not HLO or is cut off. What `fun` itself
        raises while it is traced passes through.
      ValueError: `measure` is negative, or there are no arrays to run it on, or a topology.
      ValueError: there is no such topology (the nearest are listed), or the mesh does not fit it.
      ImportError: the compiler for the topology is not installed; the message has the command.
      DeadlineExceededError: it took longer than ten minutes to compile for the topology.

    Examples:
      >>> import jax, jax.numpy as jnp, numpy as np
      >>> step = data_parallel(lambda w, x: all_reduce("mean", w * x.sum(), "data"))
      >>> report = inspect(step, np.ones(1000, "f"), np.ones(8, "f"))
      >>> [c.kind for c in report.collectives], report.wire_bytes
      (['all-reduce'], 7000)
      >>> report.rows[0].leaves, report.rows[0].changes
      (('',), ())
    """
    runs = _call(fun, args, kwargs, topology) if measure else None
    if measure < 0:
        raise ValueError(f"`inspect`: measure must be at least 0; got {measure}.")
    if isinstance(fun, str):
        if args or kwargs or topology is not None:
            raise ValueError(
                "`inspect` got arguments or a topology for a text, which is compiled already; "
                "pass the function and its arguments, or the text alone."
            )
        return report_of(fun)
    if topology is None:
        texts = texts_of(fun, args, kwargs, "inspect")
    elif callable(fun) and stage_of(fun) is None:
        others = {name: value for name, value in kwargs.items() if name != "mesh"}
        texts = compile_for(fun, args, others, topology, mesh=kwargs.get("mesh"))
    else:
        raise ValueError(
            f"`inspect` compiles functions for a topology, and got {type(fun).__name__}, which is "
            "lowered for devices already, or no program; pass the function and its arguments."
        )
    report = report_of(**vars(texts))
    return measured(report, texts.compiled, runs, measure) if runs else report


def _call(
    fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any], topology: Any
) -> Callable[[], Any]:
    """Return a call of `fun` that can be repeated, also where it donates its arguments."""
    shapes = [x for x in jax.tree.leaves((args, kwargs)) if isinstance(x, jax.ShapeDtypeStruct)]
    if topology is not None or shapes or not callable(fun) or stage_of(fun) is not None:
        raise ValueError(
            "`inspect` with `measure` runs a function: pass it and its arguments, arrays that are "
            "here, without a topology."
        )
    fun, args, kwargs = lowerable(fun, args, kwargs, "inspect")
    donates = True

    def copied(x: Any) -> Any:
        return x.copy() if isinstance(x, jax.Array) else x

    def call() -> Any:
        nonlocal donates
        given = (args, kwargs)
        if donates:
            given = jax.tree.map(copied, given)
        results = fun(*given[0], **given[1])
        donates = any(isinstance(x, jax.Array) and x.is_deleted() for x in jax.tree.leaves(given))
        return results

    return call


def assert_collectives(
    report: Report | Programs,
    *,
    max_count: int | None = None,
    max_wire_bytes: int | None = None,
    max_operands: int | None = None,
    none_in_loops: bool = False,
    dtypes: Iterable[str] | None = None,
    kinds: Iterable[str] | None = None,
) -> Report | Programs:
    """Hold what a program sends to limits, in a test suite.

    It passes only if every limit is known to be kept: where something may send that could not be
    read, every limit fails, and in a loop of unknown length those on counts and bytes.

    Args:
      report: what `inspect` returned, for devices that are here or for a topology; or what
        `inspecting` yielded, of which every program has to keep the limits.
      max_count: collectives that one run of the compiled program carries out, each turn of a
        loop counted; 0 for none at all.
      max_wire_bytes: bytes that leave one device in one run.
      max_operands: arrays that any one collective takes.
      none_in_loops: no collective may stand in a loop.
      dtypes: the element types that may travel, as HLO spells them: f32, bf16, s8, ...
      kinds: the kinds that may occur: all-reduce, all-gather, reduce-scatter, ...

    Returns:
      The report, for what else a test may ask.

    Raises:
      AssertionError: a limit is exceeded; the message lists each such limit, what there is
        instead and in which rows, and then the whole report.
      TypeError: a limit has another name, or there is something else in the report's place.
      ValueError: there is no limit, or one is invalid.

    Examples:
      >>> import numpy as np
      >>> step = data_parallel(lambda w, x: all_reduce("mean", w * x.sum(), "data"))
      >>> report = inspect(step, np.ones(10, "f"), np.ones(8, "f"))
      >>> assert_collectives(report, max_count=1, none_in_loops=True, dtypes=["f32"]).count
      1
    """
    __tracebackhide__ = True  # pytest then shows the test's own line
    if not isinstance(report, Report | Programs):
        raise TypeError(
            "`assert_collectives` expects a report, as in `jc.assert_collectives(jc.inspect(step, "
            f"*args), max_count=1)`; got {type(report).__name__}."
        )
    upper = {
        "max_count": max_count, "max_wire_bytes": max_wire_bytes, "max_operands": max_operands,
    }  # fmt: skip
    for name, limit in upper.items():
        if limit is not None and (type(limit) is not int or limit < 0):
            raise ValueError(f"`{name}` must be None or an integer of at least 0; got {limit!r}.")
    allowed = {
        "dtypes": _checked("dtypes", dtypes, _is_dtype, "element types of HLO such as f32, bf16"),
        "kinds": _checked("kinds", kinds, KINDS.__contains__, ", ".join(KINDS)),
    }
    if not none_in_loops and all(limit is None for limit in (*upper.values(), *allowed.values())):
        names = ", ".join([*upper, "none_in_loops", *allowed])
        raise ValueError(f"`assert_collectives` needs a limit, one or more of {names}; got none.")
    if isinstance(report, Programs) and not report.reports and not report.quiet:
        raise AssertionError(
            "no program was compiled, so no limit was held to anything. A report of `inspecting` "
            "is filled when its block ends, with what was compiled in there for the first time."
        )
    for one in report.reports if isinstance(report, Programs) else [report]:
        if complaints := list(_complaints(one, upper, none_in_loops, allowed)):
            lines = [f"{one.name} exceeds its limits.", *complaints, "", str(one)]
            raise AssertionError("\n".join(lines))
    return report


def _checked(
    name: str, value: Iterable[str] | None, is_valid: Callable[[str], bool], valid: str
) -> set[str] | None:
    if value is None:
        return None
    names = {value} if isinstance(value, str) else set(value)
    for invalid in (x for x in names if not isinstance(x, str) or not is_valid(x)):
        raise ValueError(f"`{name}` may name {valid}; got {invalid!r}.")
    return names


def _is_dtype(name: str) -> bool:
    with contextlib.suppress(ValueError):
        return bytes_of(name, 1) > 0
    return False


def _complaints(
    report: Report,
    upper: Mapping[str, int | None],
    none_in_loops: bool,
    allowed: Mapping[str, set[str] | None],
) -> Iterator[str]:
    """Yield each limit that is not known to be kept, with what there is instead."""
    for name, total in (("max_count", report.runs), ("max_wire_bytes", report.wire_bytes)):
        limit = upper[name]
        if limit is not None and (total > limit or report.unbounded):
            least = "at least " if report.uncounted else ""
            yield f"{name}={limit:,}, found {least}{total:,} in one run."
    # Limits on each collective by itself, and what of one exceeds them.
    single: list[tuple[str, Callable[[Collective], Iterable[str]]]] = []
    if (most := upper["max_operands"]) is not None:
        single.append((
            f"max_operands={most}",
            lambda c: [counted(len(c.operands), "operand")] * (len(c.operands) > most),
        ))  # fmt: skip
    if none_in_loops:
        single.append(("none_in_loops=True", lambda c: [f"loop {name}" for name in c.loops[-1:]]))
    if (dtypes := allowed["dtypes"]) is not None:
        single.append((f"dtypes={sorted(dtypes)}", lambda c: {*c.dtypes} - dtypes))
    if (kinds := allowed["kinds"]) is not None:
        single.append((f"kinds={sorted(kinds)}", lambda c: {c.kind} - kinds))
    for limit, excess_of in single:
        excess = {k: sorted(excess_of(c)) for k, c in enumerate(report.collectives)}
        if places := [f"#{k}" for k in excess if excess[k]]:
            words = ", ".join(dict.fromkeys(itertools.chain(*excess.values())))
            yield f"{limit}, found {words} in {', '.join(some(places, 8))}."
    # What could not be read keeps no limit for certain.
    yield from (f"not counted: {note}" for note in report.unread)
