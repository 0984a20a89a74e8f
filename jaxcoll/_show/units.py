"""Text for numbers, counts, sizes and times, and lines cut or folded to a width."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

WIDTH = 118
"""Characters in a line of a report."""


def pluralize(n: int, noun: str, many: str = "") -> str:
    """Put a number before its noun, in the plural unless it is 1.

    Examples:
      >>> pluralize(1, "device"), pluralize(1200, "op"), pluralize(0, "leaf", "leaves")
      ('1 device', '1,200 ops', '0 leaves')
    """
    return f"{n:,} {noun if n == 1 else many or noun + 's'}"


def size(nbytes: int) -> str:
    """Format bytes in decimal units.

    Examples:
      >>> size(28), size(178_900_000), size(7_340_036)
      ('28 B', '178.9 MB', '7.34 MB')
    """
    return f"{scale(nbytes)}B"


def binary_size(nbytes: int) -> str:
    """Format bytes in the largest binary unit that divides them.

    Examples:
      >>> binary_size(16 << 20), binary_size(64 << 10), binary_size(100)
      ('16 MiB', '64 KiB', '100 bytes')
    """
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit and nbytes % unit == 0:
            return f"{nbytes // unit:,} {name}"
    return f"{nbytes:,} bytes"


def scale(number: int) -> str:
    """Format a number with a space and the decimal prefix of its unit.

    Examples:
      >>> scale(999), scale(1000), scale(17_179_869_184)
      ('999 ', '1.00 k', '17.2 G')
    """
    if number < 1000:
        return f"{number} "
    value, prefixes = float(number), iter("kMGTPE")
    prefix = ""
    while value >= 999.95:
        value, prefix = value / 1000, next(prefixes)
    return f"{value:.2f} {prefix}" if value < 10 else f"{value:.1f} {prefix}"


def milliseconds(seconds: float) -> str:
    """Format a time in milliseconds, to three digits.

    Examples:
      >>> milliseconds(0.00256), milliseconds(0.1534), milliseconds(0.0000312)
      ('2.56 ms', '153 ms', '0.0312 ms')
    """
    return f"{seconds * 1e3:,.3g} ms" if seconds < 1 else f"{seconds * 1e3:,.0f} ms"


def percent(part: float, whole: float) -> str:
    """Format a percentage; 0 % and 100 % are never the result of rounding.

    Examples:
      >>> percent(486, 604), percent(0, 5), percent(1, 5000), percent(4999, 5000), percent(5, 5)
      ('80 %', '0 %', 'under 1 %', 'over 99 %', '100 %')
    """
    share = 100 * part / whole if whole else 0.0
    if 0 < share < 1 or 99 < share < 100:
        return "under 1 %" if share < 1 else "over 99 %"
    return f"{share:.0f} %"


def some(items: Sequence[str], most: int) -> list[str]:
    """List the first `most` items, and then how many more there are."""
    return [*items[:most], *([f"{len(items) - most} more"] if len(items) > most else [])]


def shorten(line: str, width: int) -> str:
    """Cut `line` to `width` characters, with a final "…" if it is longer."""
    return line if len(line) <= width else line[: width - 1] + "…"


def fold(line: str, width: int = WIDTH) -> str:
    """Fold `line` into lines of at most `width` characters."""
    wrapper = textwrap.TextWrapper(width, subsequent_indent="  ")
    wrapper.break_long_words = wrapper.break_on_hyphens = False
    return wrapper.fill(" ".join(line.split()))
