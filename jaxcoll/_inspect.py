"""`jc.inspect` and `jc.assert_collectives`: see what a program will send before it runs."""

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
from jaxcoll._watch.watch import check_measure, measured


def inspect(fun: Any, *args: Any, topology: Any = None, measure: int = 0, **kwargs: Any) -> Report:
    """Report what a program requests, what the compiler makes of it, and what that costs.

    The program does not run, unless `measure` is positive.

    Guarantee: nothing is skipped silently. The report lists every collective of the compiled
    program once, with its element types and the loops that contain it; the start and the end of an
    asynchronous collective are one entry. What cannot be counted is in `Report.uncounted`. Programs
    that do not use jaxcoll work too; for those that do, the report names packs and their leaves.

    Args:
      fun: a function, which is jitted here; a function that `jax.jit`, `jax.pmap`, flax's `nnx.jit`
        or equinox's `filter_jit` returned; a `data_parallel` step; a `functools.partial` or method
        of one of these; or, without arguments, HLO text or the result of `.trace`, `.lower` or
        `.compile`. A compiled program no longer shows what was requested. A function with a
        required `mesh` parameter gets a mesh of all devices on the axis "data".
      *args: arguments of `fun`: arrays or `jax.ShapeDtypeStruct`s. Only shapes are read, so donated
        arrays are accepted.
      topology: a cluster to compile for instead of the local devices, such as "h100:2x8" or
        "v5p:8x8x8" (docs/clusters.md). It needs the vendor's compiler but no device. A
        `data_parallel` step is laid out over the cluster, a function with a `mesh` parameter gets
        a mesh of it, and other functions use the mesh of `jax.set_mesh`.
      measure: number of runs under JAX's profiler, on arrays. They show how long each collective
        took, how long each rank waited, and which rank arrived late. `fun` runs as often again
        without the profiler. Donated arguments are copied. All processes must call. 0: do not run.
      **kwargs: keyword arguments of `fun`, likewise. With a topology, `mesh` arranges its devices:
        `jax.sharding.AbstractMesh(sizes, names)`.

    Returns:
      A `Report`: print it for a table, `plot()` for a picture, `to_json()` for machines. Cost:
      tracing, compiling and the measured runs; reading 100 MB of text takes a few seconds.

    Raises:
      ValueError: `fun` is none of these, or a text is not HLO or is truncated. Errors that `fun`
        raises while it is traced pass through.
      ValueError: `measure` is negative, or comes without arrays or with a topology.
      ValueError: the topology is unknown (the nearest are listed), or the mesh does not fit it.
      ImportError: the compiler for the topology is not installed; the message has the command.
      DeadlineExceededError: compiling for the topology took longer than ten minutes.

    Examples:
      >>> import jax, jax.numpy as jnp, numpy as np
      >>> step = data_parallel(lambda w, x: all_reduce("mean", w * x.sum(), "data"))
      >>> report = inspect(step, np.ones(1000, "f"), np.ones(8, "f"))
      >>> [c.kind for c in report.collectives], report.wire_bytes
      (['all-reduce'], 7000)
      >>> report.rows[0].leaves, report.rows[0].changes
      (('',), ())
    """
    check_measure("inspect", measure)
    runs = _repeatable_call(fun, args, kwargs, topology) if measure else None
    if isinstance(fun, str):
        if args or kwargs or topology is not None:
            raise ValueError(
                "`inspect` got arguments or a topology with HLO text, which is already compiled; "
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
            f"`inspect` compiles functions for a topology; got {type(fun).__name__}, which is "
            "already lowered for devices, or is no program. Pass the function and its arguments."
        )
    report = report_of(**vars(texts))
    return measured(report, texts.compiled, runs, measure) if runs else report


def _repeatable_call(
    fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any], topology: Any
) -> Callable[[], Any]:
    """Return a call of `fun` that can be repeated even if `fun` donates its arguments."""
    shapes = [x for x in jax.tree.leaves((args, kwargs)) if isinstance(x, jax.ShapeDtypeStruct)]
    if topology is not None or shapes or not callable(fun) or stage_of(fun) is not None:
        raise ValueError(
            "`inspect` with `measure` runs a function on the local devices: pass the function and "
            "arrays as its arguments, without a topology."
        )
    fun, args, kwargs = lowerable(fun, args, kwargs, "inspect")
    donates = True

    def copied(x: Any) -> Any:
        return x.copy() if isinstance(x, jax.Array) else x

    def call() -> Any:
        nonlocal donates
        passed = (args, kwargs)
        if donates:
            passed = jax.tree.map(copied, passed)
        results = fun(*passed[0], **passed[1])
        donates = any(isinstance(x, jax.Array) and x.is_deleted() for x in jax.tree.leaves(passed))
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
    """Assert limits on what a program sends, in a test suite.

    It passes only if every limit is known to be kept. If the program may send something that could
    not be read, every limit fails; in a loop of unknown length, those on counts and bytes fail.

    Args:
      report: the result of `inspect`, for local devices or a topology; or the result of
        `inspecting`, in which every program must keep the limits.
      max_count: most collectives that one run of the compiled program executes, counting each
        iteration of a loop; 0 allows none.
      max_wire_bytes: most bytes that leave one device in one run.
      max_operands: most arrays in a single collective.
      none_in_loops: True forbids collectives in loops.
      dtypes: element types that may travel, as HLO spells them: f32, bf16, s8, ...
      kinds: kinds of collective that may occur: all-reduce, all-gather, reduce-scatter, ...

    Returns:
      The report, for further checks.

    Raises:
      AssertionError: a limit is exceeded. The message lists every exceeded limit with the value
        found and its rows, and then the whole report.
      TypeError: there is no limit of that name, or `report` is not a report.
      ValueError: no limit is given, or one is invalid.

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
            "no program was compiled, so there was nothing to check. A report of `inspecting` is "
            "filled when its block ends, with the programs that were first compiled inside it."
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
    """Yield each limit that is not known to be kept, with the value found."""
    for name, total in (("max_count", report.runs), ("max_wire_bytes", report.wire_bytes)):
        limit = upper[name]
        if limit is not None and (total > limit or report.unbounded):
            least = "at least " if report.uncounted else ""
            yield f"{name}={limit:,}, found {least}{total:,} in one run."
    # Limits on single collectives, each with a function that lists how a collective exceeds it
    limits: list[tuple[str, Callable[[Collective], Iterable[str]]]] = []
    if (most := upper["max_operands"]) is not None:
        limits.append((
            f"max_operands={most}",
            lambda c: [counted(len(c.operands), "operand")] * (len(c.operands) > most),
        ))  # fmt: skip
    if none_in_loops:
        limits.append(("none_in_loops=True", lambda c: [f"loop {name}" for name in c.loops[-1:]]))
    if (dtypes := allowed["dtypes"]) is not None:
        limits.append((f"dtypes={sorted(dtypes)}", lambda c: {*c.dtypes} - dtypes))
    if (kinds := allowed["kinds"]) is not None:
        limits.append((f"kinds={sorted(kinds)}", lambda c: {c.kind} - kinds))
    for limit, excess_of in limits:
        excess = {k: sorted(excess_of(c)) for k, c in enumerate(report.collectives)}
        if rows := [f"#{k}" for k in excess if excess[k]]:
            values = ", ".join(dict.fromkeys(itertools.chain(*excess.values())))
            yield f"{limit}, found {values} in {', '.join(some(rows, 8))}."
    # What could not be read may exceed any limit.
    yield from (f"not counted: {note}" for note in report.unread)
