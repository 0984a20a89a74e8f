"""How algorithms, packs and sizes are spelled on the command line, and in results."""

from __future__ import annotations

import math
import re
from typing import Any

from jaxcoll._plan.algorithms import DESCRIPTIONS, canonical
from jaxcoll._plan.options import CommunicationOptions

BASELINE = "per-leaf"
AGAIN = " again"
TWIN = BASELINE + AGAIN
"""The same program as the baseline: what differs between the two is the noise of the run."""

FEEDBACK = "+feedback"
"""Behind a wire format: a residual goes from call to call."""

PEERS = ("torch", "tensorflow")
"""Libraries that can be measured in the same run."""

_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_EVERYTHING = 1 << 60


def options_of(name: str) -> CommunicationOptions:
    """The options that an algorithm's name stands for; "auto" leaves all of them unset.

    A name is "auto", "reproducible", or an algorithm with - or _ in it ("halving-doubling"), or
    "inner/outer" for two axes; then perhaps "+" and a wire format ("auto+int8"), `FEEDBACK`
    behind that, and "@" and the largest pack ("ring@4MiB"), or "@all" for one pack.

    Raises:
      ValueError: there is no such algorithm, format or pack.
    """
    algorithm, at, pack = name.partition("@")
    algorithm, plus, format = algorithm.partition("+")
    format = format.removesuffix(FEEDBACK)
    given: dict[str, Any] = {"compression": format} if plus else {}
    if at:
        given["bytes_per_pack"] = _EVERYTHING if pack == "all" else bytes_of(pack)
    if algorithm == "reproducible":
        given["reproducible"] = True
    elif algorithm != "auto":
        try:
            given["algorithm"] = canonical(algorithm.replace("-", "_"))
        except ValueError:
            known = ", ".join(
                [BASELINE, "auto", "reproducible", *(a.replace("_", "-") for a in DESCRIPTIONS)]
            )
            raise ValueError(
                f"no algorithm {name!r}: choose {known}, or inner/outer made of two; +bf16, "
                "+int8 or +int4 behind it says what travels, +feedback behind that keeps what is "
                "lost, @4MiB or @all how large packs are."
            ) from None
    return CommunicationOptions(**given)


def bytes_of(text: str) -> int:
    """Bytes of a size with a unit ("1.5KiB"), or of a plain number."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(B|KiB|MiB|GiB)?", text.strip())
    size = int(float(found[1]) * _UNITS[found[2] or "B"]) if found else 0
    if not size:
        raise ValueError(f"expected a size such as 1KiB, 4MiB or 1GiB; got {text!r}.")
    return size


def sizes_of(text: str) -> list[int]:
    """The sizes of "first:last" or "first:last:factor" (2 without it), or of one alone."""
    first, *more = text.split(":")
    low = bytes_of(first)
    high = bytes_of(more[0]) if more else low
    factor = int(more[1]) if len(more) == 2 and more[1].isdigit() else 2
    if high < low or factor < 2 or len(more) > 2 or (len(more) == 2 and not more[1].isdigit()):
        raise ValueError(
            "--sizes: expected SIZE, FIRST:LAST or FIRST:LAST:FACTOR, rising, with a whole factor "
            f"of at least 2, as in 1KiB:256MiB; got {text!r}."
        )
    count = math.floor(math.log(high / low, factor) + 1e-9) + 1
    return [low * factor**k for k in range(count)]


def spelled(nbytes: int) -> str:
    """A size in the largest unit that leaves at most one decimal: "1.5KiB"."""
    for unit, size in reversed(_UNITS.items()):
        if nbytes >= size and (10 * nbytes) % size == 0:
            return f"{nbytes / size:g}{unit}"
    return f"{nbytes}B"


def duration(seconds: float) -> str:
    """Seconds in the unit that suits them: "12.3 ms"."""
    unit, size = "µs", 1e-6
    if seconds >= 1e-3:
        unit, size = ("s", 1.0) if seconds >= 1 else ("ms", 1e-3)
    return f"{significant(seconds / size)} {unit}"


def significant(value: float) -> str:
    """Three digits, or all those before the point."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:#.3g}".rstrip(".") if value else "0"
