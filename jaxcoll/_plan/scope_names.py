"""Parsers of names that survive compilation: JAX's scope paths, and jaxcoll's packs in them."""

from __future__ import annotations

import re

_OP_NAME = re.compile(r'\bop_name="((?:[^"\\]|\\.)*)"')
_PACK = re.compile(
    r"\b((?:all_reduce|reduce_scatter|all_gather)_[0-9a-f]{6}|all_gather)"
    r"\)*/(?:\w+\()*(pack\d+|rows\d+)\b"
)


def parse_op_name(attributes: str) -> str:
    """Return the `op_name` among an instruction's attributes; "" for none."""
    match = _OP_NAME.search(attributes)
    return match[1] if match else ""


def names(op_name: str) -> tuple[str, ...]:
    """Return the scope paths of an instruction; several if it combines several.

    XLA writes what the paths share once, and the rest as a list: `jit(f)/(a/psum:b/psum)`.

    Examples:
      >>> names("jit(f)/transpose(jvp())/(pack0/psum:pack1/psum)/x")
      ('jit(f)/transpose(jvp())/pack0/psum/x', 'jit(f)/transpose(jvp())/pack1/psum/x')
      >>> names("jit(f)/psum"), names("")
      (('jit(f)/psum',), ())
    """
    if not op_name:
        return ()
    cuts: list[list[int]] = []  # positions of each open bracket and of the colons inside it
    for at, character in enumerate(op_name):
        if character == "(":
            cuts.append([at])
        elif character == ")" and cuts:
            start, *_ = cut = cuts.pop()
            # A list follows a slash; brackets as in jit(...) are no list.
            if len(cut) > 1 and (start == 0 or op_name[start - 1] == "/"):
                head, tail = op_name[:start], op_name[at + 1 :]
                inner = [op_name[a + 1 : b] for a, b in zip(cut, [*cut[1:], at], strict=True)]
                return tuple(n for part in inner for n in names(head + part + tail))
        elif character == ":" and cuts:
            cuts[-1].append(at)
    return (op_name,)


def parse_pack(name: str) -> str:
    """Return the jaxcoll pack in a scope path, as reduction/pack; "" for none.

    Examples:
      >>> parse_pack("jit(f)/transpose(jvp(all_reduce_5f3a1c/pack3))/psum")
      'all_reduce_5f3a1c/pack3'
    """
    match = _PACK.search(name)
    return f"{match[1]}/{match[2]}" if match else ""
