"""Which workers an elastic run drops where pairs of them cannot connect to each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from jaxcoll._elastic.generation import rank_of


def broken(cut_from: Mapping[str, Iterable[str]]) -> set[frozenset[str]]:
    """The links that at least one end cannot use, by the workers that each one cannot reach."""
    return {frozenset((name, other)) for name, others in cut_from.items() for other in others}


def to_leave_out(links: Iterable[frozenset[str]], newcomers: Iterable[str]) -> set[str]:
    """A small set of workers without which all others reach each other.

    The worker with the most broken links is dropped, again and again: of several a newcomer, else
    the one with the highest number. (The smallest such set is a vertex cover, which is NP-hard.)
    """
    rest, out, new = set(links), set(), set(newcomers)
    while rest:
        times = Counter(name for link in rest for name in link)
        worst = max(times, key=lambda name: (times[name], name in new, rank_of(name)))
        out.add(worst)
        rest = {link for link in rest if worst not in link}
    return out


def named_links(links: Iterable[frozenset[str]]) -> str:
    """The links, for a message."""
    pairs = sorted(sorted(map(rank_of, link)) for link in links)
    each = [f"workers {one} and {other}" for one, other in pairs[:3]]
    more = f", nor {len(pairs) - 3} more pairs" if len(pairs) > 3 else ""
    return f"{', and '.join(each)} cannot connect to each other{more}"
