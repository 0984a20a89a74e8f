"""Fingerprints of compiled programs: lines that processes compare and a person can read."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jaxlib

from jaxcoll._plan.scope_names import names, op_name_of, pack_of

_COLLECTIVE = re.compile(
    r"^ *(?:ROOT )?%?\S+ = (?P<type>\(.*?\)|\S+) (?P<kind>(?:all-reduce|all-gather|reduce-scatter"
    r"|all-to-all|ragged-all-to-all|collective-permute|collective-broadcast|send|recv)(?:-start)?)"
    r"\((?P<rest>.*)$"
)
_HEAD = re.compile(r"(ENTRY\s+)?%?([\w.\-]+)\s*(?:\(.*)?\{\s*$")  # %body (x: f32[4]) -> f32[4] {
_CALLED = re.compile(r"(?:condition|body|calls|to_apply|computations?)=(\{[^}]*\}|\S+)")
_NAME = re.compile(r"[\w.\-]+")
_WHO = re.compile(
    r"(?:replica_groups|source_target_pairs)=(\{\{.*?\}\}|\{\}"
    r"|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?"  # counted off: [2,4]<=[4,2]T(1,0)
    r"|mesh\[[^\]]*\](?:, device_ids=\(.*?\))? \{[^}]*\})"  # mesh['a'=2,'b'=4] {'b'}
)
_CHANNEL = re.compile(r"channel_id=(\d+)")
_ASKED = re.compile(r'op_name="[^"]*?(\w+)[:)]*"')
_LAYOUT = re.compile(r"\{[\d,]*(?::[^}]*)?\}|/\*index=\d+\*/")  # {1,0:T(8,128)}, /*index=5*/


def collectives(compiled: str) -> tuple[str, ...]:
    """The collectives of a compiled program in the order in which it comes to them, a line each.

    A line has all that two processes must have in common: the kind, the element types and shapes,
    the groups, the channel, and the pack of jaxcoll that travels.

    Examples:
      >>> collectives("%a.1 = f32[8]{0} all-reduce(%x), channel_id=1, replica_groups={{0,1}}")
      ('all-reduce f32[8] among {{0,1}}, channel 1',)
      >>> collectives("%a.1 = f32[] all-reduce(%x), replica_groups=mesh['a'=2,'b'=2] {'b'}, x=1")
      ("all-reduce f32[] among mesh['a'=2,'b'=2] {'b'}",)
    """
    return tuple(map(_line, _in_order(compiled)))


def _in_order(compiled: str) -> Iterator[re.Match[str]]:
    """Every line that communicates; the text has those of a loop before those ahead of it."""
    bodies: dict[str, list[str | re.Match[str]]] = {"": []}
    entry, body = "", bodies[""]
    for line in compiled.splitlines():
        if line.endswith("{") and (head := _HEAD.match(line)):
            body = bodies[head[2]] = []
            entry = head[2] if head[1] else entry
        elif found := _COLLECTIVE.match(line):
            body.append(found)
        else:
            body += [name for called in _CALLED.findall(line) for name in _NAME.findall(called)]

    def run(name: str) -> Iterator[re.Match[str]]:
        for step in bodies.pop(name, ()):
            if isinstance(step, str):
                yield from run(step)
            else:
                yield step

    for name in (entry, *bodies):  # after the entry what no call was found of
        yield from run(name)


def _line(found: re.Match[str]) -> str:
    rest = found["rest"]
    who, channel, asked = _WHO.search(rest), _CHANNEL.search(rest), _ASKED.search(rest)
    packs = dict.fromkeys(filter(None, map(pack_of, names(op_name_of(rest)))))
    return (
        f"{found['kind'].removesuffix('-start')} {_LAYOUT.sub('', found['type'])}"
        + (f" among {who[1]}" if who else "")
        + (f", channel {channel[1]}" if channel else "")
        + (f", asked for as {asked[1]}" if asked else "")
        + (f", carrying {' and '.join(packs)}" if packs else "")
    )


def fingerprint(
    name: str,
    environment: Sequence[str],
    options: str,
    devices: str,
    lowered: jax.stages.Lowered,
    moved: Sequence[str],
) -> tuple[str, ...]:
    """All that processes must agree upon before they run a program; the most telling lines first.

    `devices` are in the order of the mesh, and `moved` are the program's `collectives`.
    """
    args, kwargs = lowered.args_info
    # Constants are left out, because a process may bake in its rank.
    return (
        f"JAX {jax.__version__} with jaxlib {jaxlib.__version__}",
        f"program {name}",
        *environment,
        *([f"options {options}"] if options else []),
        *([f"devices {devices}"] if devices else []),
        *(f"argument {line}" for line in _arrays((args, kwargs), ("args", "kwargs"))),
        *(f"result {line}" for line in _arrays((lowered.out_info,), ("",))),
        *(f"collective {k + 1}: {line}" for k, line in enumerate(moved)),
    )


def _arrays(trees: tuple[Any, ...], names: tuple[str, ...]) -> Iterator[str]:
    for name, tree in zip(names, trees, strict=True):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            sizes = ",".join(map(str, leaf.shape))
            yield f"{name}{jax.tree_util.keystr(path)}: {leaf.dtype}[{sizes}]"


def mark(lines: Sequence[str]) -> str:
    """A short name that two programs share if their lines are the same."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def first_difference(sides: Mapping[int, Sequence[str]]) -> str:
    """The lines of two processes where they first differ, in words."""
    pairs = itertools.zip_longest(*sides.values(), fillvalue="(nothing more)")
    lines = next((pair for pair in pairs if len(set(pair)) > 1), ("(no difference)",) * len(sides))
    return "\n".join(f"process {p}: {line}" for p, line in zip(sides, lines, strict=True))
