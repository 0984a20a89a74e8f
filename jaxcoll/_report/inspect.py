"""`jc.inspect`: see what a program will send before it runs."""

from __future__ import annotations

import inspect as signatures
from collections.abc import Callable
from typing import Any

import jax

from jaxcoll._report.aot import compile_for
from jaxcoll._report.lowering import compile_texts, find_stage, make_lowerable
from jaxcoll._report.profile.measure import check_measure, measure_calls
from jaxcoll._report.report import Report, make_report


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
      TypeError: `fun` needs arguments, and there are none.
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
    if callable(fun) and find_stage(fun) is None and not args and not kwargs:
        _check_no_arguments(fun)
    runs = _repeatable_call(fun, args, kwargs, topology) if measure else None
    if isinstance(fun, str):
        if args or kwargs or topology is not None:
            raise ValueError(
                "`inspect` got arguments or a topology with HLO text, which is already compiled; "
                "pass the function and its arguments, or the text alone."
            )
        return make_report(fun)
    if topology is None:
        texts = compile_texts(fun, args, kwargs)
    elif callable(fun) and find_stage(fun) is None:
        others = {name: value for name, value in kwargs.items() if name != "mesh"}
        texts = compile_for(fun, args, others, topology, mesh=kwargs.get("mesh"))
    else:
        raise ValueError(
            f"`inspect` compiles functions for a topology; got {type(fun).__name__}, which is "
            "already lowered for devices, or is no program. Pass the function and its arguments."
        )
    report = make_report(**vars(texts))
    return measure_calls(report, texts.compiled, runs, measure) if runs else report


def _check_no_arguments(fun: Callable[..., Any]) -> None:
    try:
        parameters = signatures.signature(fun).parameters.values()
    except (TypeError, ValueError):
        return  # it has no signature; JAX says what is wrong
    kinds = (signatures.Parameter.POSITIONAL_ONLY, signatures.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [p.name for p in parameters if p.kind in kinds and p.default is p.empty]
    if needed and needed != ["mesh"]:
        name = getattr(fun, "__name__", "step")
        example = ", ".join(
            ['jax.ShapeDtypeStruct((8, 3), "float32")'] + ["..."] * (len(needed) > 1)
        )
        raise TypeError(
            f"`inspect` needs the arguments of {name}({', '.join(needed)}), or their shapes, as in "
            f"jc.inspect({name}, {example})."
        )


def _repeatable_call(
    fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any], topology: Any
) -> Callable[[], Any]:
    """Make a call of `fun` that can be repeated even if `fun` donates its arguments."""
    shapes = [x for x in jax.tree.leaves((args, kwargs)) if isinstance(x, jax.ShapeDtypeStruct)]
    if topology is not None or shapes or not callable(fun) or find_stage(fun) is not None:
        raise ValueError(
            "`inspect` with `measure` runs a function on the local devices: pass the function and "
            "arrays as its arguments, without a topology."
        )
    fun, args, kwargs = make_lowerable(fun, args, kwargs)
    donates = True  # whether the arguments survive a call shows after the first one

    def call() -> Any:
        nonlocal donates
        passed = args, kwargs
        if donates:
            passed = jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array) else x, passed)
        results = fun(*passed[0], **passed[1])
        donates = any(isinstance(x, jax.Array) and x.is_deleted() for x in jax.tree.leaves(passed))
        return results

    return call
