"""Options of communication: frozen values, validated once, merged explicitly."""

from __future__ import annotations

import difflib
import enum
from collections.abc import Callable
from typing import Any, Literal, Never, final

import jax

from jaxcoll._plan.algorithms import canonical
from jaxcoll._plan.checks import count, is_number, refuse
from jaxcoll._wire.format import WireFormat, named
from jaxcoll._wire.format import checked as checked_format


class ReduceOp(enum.Enum):
    """The operation that combines replicas' values. Strings in any case stand for it everywhere.

    Examples:
      >>> ReduceOp.of("Mean") is ReduceOp.MEAN
      True
    """

    SUM = "SUM"
    MEAN = "MEAN"

    @classmethod
    def of(cls, value: ReduceOp | str) -> ReduceOp:
        """`value` itself, or the member a string names, in any case.

        Raises:
          ValueError: for anything else; the message names the value.
        """
        return _member(cls, "reduce_op", value)


class CommunicationImplementation(enum.Enum):
    """The implementation that carries the reduction.

    AUTO leaves it to jaxcoll and the compiler. RING asks for a ring of neighbour exchanges
    written out in the program. NCCL asks for the backend's own all-reduce, which is NCCL on
    NVIDIA GPUs; a plan made for another backend says what carries it there.
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
    known = ", ".join(kind.__members__)
    what = f"a {kind.__name__} or one of the strings {known} (in any case)"
    refuse(argument, what, value)


@final
class _Unset:
    """The one value that means "not given", so that giving the default can override."""

    def __repr__(self) -> str:
        return "UNSET"

    def __reduce__(self) -> str:
        return "UNSET"


UNSET: Any = _Unset()

# Both name what carries a reduction, so an override that gives either replaces both.
_CARRIER = ("implementation", "algorithm")

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
    refuse("algorithm", "None or the name of one", value)


def _switch(argument: str, value: Any, or_none: str = "") -> bool | None:
    """True or False; or None, which the message then lists as `or_none` says."""
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
    "shards": (0, lambda v: count("shards", " (0: as many as the algorithm has by itself)", v)),
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
    """Options of an exchange of tensors: a frozen, hashable value.

    Guarantee: options are honoured or refused. What they ask is visible in the plan and in the
    compiled program; where a backend cannot do it the plan says what happens instead.

    An option that is not given is *unset*: it reads as its default, and in `merge` it yields to
    the other side. An option given as its default overrides, which `CommunicationOptions()`
    and `CommunicationOptions(bytes_per_pack=0)` show by being different values.

    Args:
      bytes_per_pack: a pack is closed before it would exceed this many bytes; a larger leaf
        travels alone, unsplit. 0: the planner decides.
      timeout_seconds: seconds after which a host-level call or a wrapped step gives up. Given to
        a reduction inside `jc.data_parallel` or `strategy.run`, it bounds the call that this is
        a part of; in a program that is called without them it is refused. None and 0: no
        deadline.
      implementation: a `CommunicationImplementation`, or its name in any case.
      algorithm: "native", "ring", "halving_doubling" or "shuffle"; or "inner/outer" made of two
        of them, for a reduction over a tuple of axes (outer, inner): a reduce-scatter within,
        an all-reduce of each shard between, an all-gather within. TensorFlow's names are taken
        too: "nccl" is native, "xring" ring, "rechd" halving_doubling, "pscpu" and "psgpu"
        shuffle. None: what `implementation` says.
      shards: how many parts a pack is cut in, which travel in as many reductions side by side.
        With a shuffle (of "inner/outer": an outer one), how many replicas own a part and sum
        it: at most all of them. 0: one part; with a shuffle, one for each replica.
      reproducible: every sum has the same bits for every packing, order of leaves, placement of
        the same replicas on processes and devices, and algorithm. Each element is then summed
        over the replicas as ((0+1)+(2+3))+((4+5)+(6+7)); where `algorithm` and `implementation`
        leave the choice, by halving_doubling for a power of two of replicas, else by shuffle. An
        algorithm that has another order is refused where it meets more than one replica.
        docs/sharp_bits.md lists what this cannot promise.
      overlap: the exchange is to run while the backward pass still computes. Leaves are packed in
        the order in which their gradients become ready, which `jc.value_and_grad` and `jc.grad`
        read from the backward pass (`jc.all_reduce` takes leaves from last to first); packs get
        smaller towards the end, and the compiler is kept from combining them; in
        `jc.sync_in_backward` they travel as they appear. None: where that pays, which is on GPUs
        in these three.
      compression: what the elements of a sum travel as: "bf16", "int8" or "int4", or a class of
        `jc.compression` with its arguments. Every replica sends each other one its share as
        codes, these are added in float32, and the sum is coded once more: two roundings for any
        number of replicas. Coded are floats of 16 and 32 bits in leaves that fill a block (64 of
        bf16); other leaves travel exactly. Of "inner/outer" only the outer part is coded. Refused
        with `shards`, and an outermost ring or halving_doubling. "auto": bf16 for float32 leaves
        of 64 KiB or more over Gloo, and exact sums elsewhere and beside these options. None:
        exact sums; bfloat16 leaves still travel as 16 bits over Gloo, where XLA would widen them.
        See docs/compression.md.

    Raises:
      ValueError: an argument has an impossible value, which the message names with it; or
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
                f"`algorithm` asks for {self.algorithm!r}: give one of the two."
            )

    def replace(self, **changes: Any) -> CommunicationOptions:
        """These options with some changed; `UNSET` takes an option back to "not given"."""
        given = dict(self._given)
        if all(given.get(name, UNSET) is value for name, value in changes.items()):
            return self
        return CommunicationOptions(**{**given, **changes})

    __replace__ = replace  # for `copy.replace` of Python 3.13

    def merge(self, override: CommunicationOptions | None) -> CommunicationOptions:
        """These options, with everything `override` has set taken from it.

        `implementation` and `algorithm` answer one question: an override that gives either
        takes the place of both.
        """
        if override is None or not override._given:
            return self
        given = dict(override._given)
        replaced = _CARRIER if any(name in given for name in _CARRIER) else ()
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


def checked(options: Any, exactly: str = "") -> CommunicationOptions:
    """`options`, or those of which none is given; `exactly` names a caller without wire formats."""
    if options is None:
        return _NOTHING_GIVEN
    if isinstance(options, CommunicationOptions):
        if exactly and named(options.compression) is not None:
            raise ValueError(
                f"`{exactly}` sends every value exactly, and `compression` "
                f"{str(options.compression)!r} is for sums: leave `compression` unset here."
            )
        return options
    what = "a CommunicationOptions, as in `jc.CommunicationOptions(timeout_seconds=60)`, or None"
    refuse("options", what, options)
