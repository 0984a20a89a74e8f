"""Numbers with their nouns, for every message and table."""

from __future__ import annotations


def counted(n: int, noun: str, many: str = "") -> str:
    """A number with its noun.

    Args:
      n: how many.
      noun: what one is called.
      many: what several are called; "": the noun with an s.

    Examples:
      >>> counted(1, "device"), counted(1200, "op"), counted(0, "leaf", "leaves")
      ('1 device', '1,200 ops', '0 leaves')
    """
    return f"{n:,} {noun if n == 1 else many or noun + 's'}"
