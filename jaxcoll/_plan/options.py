"""Communication options: frozen values, validated once, merged explicitly."""

from __future__ import annotations

import difflib
import enum
from collections.abc import Callable
from typing import Any, Literal, Never, final

import jax

from jaxcoll._compression.format import WireFormat, find_format
from jaxcoll._compression.format import check_format as checked_format
from jaxcoll._plan.algorithms import canonical
from jaxcoll._plan.checks import count, is_number, refuse


class ReduceOp(enum.Enum):
    """The operation that combines the replicas' values; its name, in any case, works everywhere.

    Examples:
      >>> ReduceOp.of("Mean") is ReduceOp.MEAN
      True
    """

    SUM = "SUM"
    MEAN = "MEAN"

    @classmethod
    def of(cls, value: ReduceOp | str) -> ReduceOp:
        """Return `value`, or the member that a string names, in any case.

        Raises:
          ValueError: for anything else; the message names the value.
        """
        return _member(cls, "reduce_op", value)


class CommunicationImplementation(enum.Enum):
    """The implementation that carries the reduction.

    AUTO leaves the choice to jaxcoll and the compiler. RING asks for a ring of neighbour exchanges
    written out in the program. NCCL asks for the backend's own all-reduce, which is NCCL on
    NVIDIA GPUs; a plan for another backend says what it uses instead.
    """

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


CollectiveCommunication = CommunicationImplementation


def _member(kind: type[enum.Enum], argument: str, value: Any) -> Any:
    if isinstance(value, kind):
        return value
    if isinstance(value, str) and value.upper() in kind.__members__:
        return kind[value.upper()]
    names = ", ".join(kind.__members__)
    what = f"a {kind.__name__} or one of the strings {names} (in any case)"
    refuse(argument, what, value)


@final
class _Unset:
    """A sentinel for "not given", so that passing a default explicitly can override."""

    def __repr__(self) -> str:
        return "UNSET"

    def __reduce__(self) -> str:
        return "UNSET"


UNSET: Any = _Unset()

# Both choose the algorithm, so an override that gives either replaces both.
_ALGORITHM_OPTIONS = ("implementation", "algorithm")

_ALGORITHM_OF = {
    CommunicationImplementation.RING: "ring",
    CommunicationImplementation.NCCL: "native",
}


def _timeout_seconds(value: Any) -> float | None:
    if value is None:
        return None
    if is_number(value) and value >= 0:
        return float(value)
    what = "None or a finite, non-negative number of seconds (None and 0: no deadline)"
    refuse("timeout_seconds", what, value)


def _algorithm(value: Any) -> str | None:
    if value is None:
        return None
    if isinstance(value, str):
        return canonical(value)
    refuse("algorithm", "None or the name of an algorithm", value)


def _switch(argument: str, value: Any, or_none: str = "") -> bool | None:
    """Return a bool, or None if `or_none` describes all three values for the message."""
    if isinstance(value, bool) or (value is None and or_none):
        return value
    refuse(argument, or_none or "True or False", value)


_OPTIONS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "bytes_per_pack": (
        0,
        lambda v: count("bytes_per_pack", " number of bytes (0: decided automatically)", v),
    ),
    "timeout_seconds": (None, _timeout_seconds),
    "implementation": (
        CommunicationImplementation.AUTO,
        lambda v: _member(CommunicationImplementation, "implementation", v),
    ),
    "algorithm": (None, _algorithm),
    "shards": (0, lambda v: count("shards", " (0: the algorithm's default)", v)),
    "reproducible": (False, lambda v: _switch("reproducible", v)),
    "overlap": (
        None,
        lambda v: _switch("overlap", v, "True, False or None (decided automatically)"),
    ),
    "compression": (None, checked_format),
}
"""Each option's default, and the function that checks a value."""


@jax.tree_util.register_static
class CommunicationOptions:
    """Options for collectives: a frozen, hashable value.

    Guarantee: an option is honoured or refused. Its effect is visible in the plan and in the
    compiled program; if a backend cannot do it, the plan says what happens instead.

    An option that is not given is *unset*: it reads as its default, and in `merge` the other side
    wins. An option that is given overrides, even with its default value:
    `CommunicationOptions()` and `CommunicationOptions(bytes_per_pack=0)` are different values.

    Args:
      bytes_per_pack: the most bytes in a pack; a larger leaf travels alone and whole. 0: the
        planner decides.
      timeout_seconds: seconds before a host-level call or a wrapped step gives up. On a reduction
        inside `jc.data_parallel` or `strategy.run`, it bounds the enclosing call; in any other
        compiled program it is refused. None and 0: no deadline.
      implementation: a `CommunicationImplementation`, or its name in any case.
      algorithm: "native", "ring", "halving_doubling" or "shuffle"; or "inner/outer" made of two
        of them, for a reduction over a tuple of axes (outer, inner): a reduce-scatter along the
        inner axis, an all-reduce of each shard along the outer one, and an all-gather along the
        inner one. TensorFlow's names work too: "nccl" is native, "xring" ring, "rechd"
        halving_doubling, "pscpu" and "psgpu" shuffle. None: `implementation` decides.
      shards: the number of parts that each pack is cut into, and of reductions that carry them
        side by side. With a shuffle (in "inner/outer": an outer one), the number of replicas that
        own a part and sum it, at most all. 0: one part; with a shuffle, one for each replica.
      reproducible: every sum has the same bits, whatever the packing, the order of leaves, the
        algorithm, and the placement of the same replicas on processes and devices. Each element
        is summed over the replicas as ((0+1)+(2+3))+((4+5)+(6+7)). If `algorithm` and
        `implementation` leave the choice, halving_doubling does this for a power of two of
        replicas, and shuffle for any other number. An algorithm with another order is refused
        for more than one replica. docs/sharp_bits.md lists the limits of this promise.
      overlap: run collectives while the backward pass still computes. Leaves are packed in the
        order in which their gradients become ready: `jc.value_and_grad` and `jc.grad` read it
        from the backward pass, `jc.all_reduce` assumes last to first, and `jc.sync_in_backward`
        sends gradients as they appear. Packs get smaller towards the end, and the compiler is
        kept from combining them. None: where that pays, which is on GPUs in
        `jc.value_and_grad`, `jc.grad` and `jc.sync_in_backward`.
      compression: the wire format of sums: "bf16", "int8" or "int4", or an instance of a class of
        `jc.compression`. Replicas send each other their shards as codes; the owner of a shard
        adds these in float32, and codes the sum again: two roundings for any number of replicas.
        Only 16- and 32-bit floats are coded, in leaves of at least one block (64 elements for
        bf16); other leaves travel exactly. In "inner/outer" only the outer part is coded. Refused
        with `shards`, and with an outermost ring or halving_doubling. "auto": bf16 for float32
        leaves of 64 KiB or more over Gloo; exact sums elsewhere, and if `algorithm`,
        `implementation`, `shards` or `reproducible` is set. None: exact sums; bfloat16 leaves
        still travel as 16 bits over Gloo, where XLA would widen them. See docs/compression.md.

    Raises:
      ValueError: an argument has an impossible value (the message names both), or
        `implementation` and `algorithm` ask for different things.

    Examples:
      >>> strategy = CommunicationOptions(bytes_per_pack=4 << 20, implementation="ring")
      >>> strategy.merge(CommunicationOptions(bytes_per_pack=0))
      CommunicationOptions(bytes_per_pack=0, implementation=RING)
      >>> strategy.timeout_seconds is None
      True
    """

    bytes_per_pack: int
    timeout_seconds: float | None
    implementation: CommunicationImplementation
    algorithm: str | None
    shards: int
    reproducible: bool
    overlap: bool | None
    compression: WireFormat | Literal["auto"] | None
    _given: tuple[tuple[str, Any], ...]  # the options that are set, in the order above

    def __init__(
        self,
        bytes_per_pack: int = UNSET,
        timeout_seconds: float | None = UNSET,
        implementation: CommunicationImplementation | str = UNSET,
        *,
        algorithm: str | None = UNSET,
        shards: int = UNSET,
        reproducible: bool = UNSET,
        overlap: bool | None = UNSET,
        compression: WireFormat | str | None = UNSET,
        **unknown: Never,
    ) -> None:
        for name in unknown:
            near = difflib.get_close_matches(name, _OPTIONS, n=1, cutoff=0.5)
            raise TypeError(
                f"`CommunicationOptions` has no option {name!r}"
                + (f"; did you mean {near[0]!r}?" if near else ".")
                + f" The options are {', '.join(_OPTIONS)}."
            )
        values = (bytes_per_pack, timeout_seconds, implementation, algorithm, shards)
        values += (reproducible, overlap, compression)
        given: dict[str, Any] = {}
        for (name, (default, check)), value in zip(_OPTIONS.items(), values, strict=True):
            if value is not UNSET:
                given[name] = check(value)
            vars(self)[name] = given.get(name, default)
        vars(self)["_given"] = tuple(given.items())
        means = _ALGORITHM_OF.get(self.implementation)
        if means and self.algorithm not in (None, means):
            raise ValueError(
                f"`implementation` {self.implementation.name} means the algorithm {means!r}, but "
                f"`algorithm` asks for {self.algorithm!r}: pass only one of them."
            )

    def replace(self, **changes: Any) -> CommunicationOptions:
        """Return these options with some changed; `UNSET` makes an option unset again."""
        given = dict(self._given)
        if all(given.get(name, UNSET) is value for name, value in changes.items()):
            return self
        return CommunicationOptions(**{**given, **changes})

    __replace__ = replace  # for `copy.replace` of Python 3.13

    def merge(self, override: CommunicationOptions | None) -> CommunicationOptions:
        """Return these options, overridden by all options that are set in `override`.

        `implementation` and `algorithm` both choose the algorithm: an override that sets either
        replaces both.
        """
        if override is None or not override._given:
            return self
        given = dict(override._given)
        replaced = _ALGORITHM_OPTIONS if any(x in given for x in _ALGORITHM_OPTIONS) else ()
        return self.replace(**{**dict.fromkeys(replaced, UNSET), **given})

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"CommunicationOptions is frozen; use options.replace({name}={value!r})."
        )

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"CommunicationOptions is frozen; make options without `{name}`.")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CommunicationOptions):
            return NotImplemented
        return self._given == other._given

    def __hash__(self) -> int:
        return hash(self._given)

    def __repr__(self) -> str:
        given = (f"{k}={v.name if isinstance(v, enum.Enum) else repr(v)}" for k, v in self._given)
        return f"CommunicationOptions({', '.join(given)})"


_NOTHING_GIVEN = CommunicationOptions()


def check_options(options: Any, exactly: str = "") -> CommunicationOptions:
    """Return `options`, all unset for None; `exactly` names a caller without compression."""
    if options is None:
        return _NOTHING_GIVEN
    if isinstance(options, CommunicationOptions):
        if exactly and find_format(options.compression) is not None:
            raise ValueError(
                f"`{exactly}` sends every value exactly, and `compression` "
                f"{str(options.compression)!r} is for sums: leave `compression` unset here."
            )
        return options
    what = "a CommunicationOptions, as in `jc.CommunicationOptions(timeout_seconds=60)`, or None"
    refuse("options", what, options)
