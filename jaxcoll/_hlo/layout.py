"""Lay out HLO text as compilers print it, an instruction on each line, where it is not so.

XLA's parser ignores white space, takes comments, and lets an attribute define a computation in its
place. The value of an attribute may contain line breaks.
"""

from __future__ import annotations

import re

_STRING = r'"(?:[^"\\]|\\.)*"' + r"|'(?:[^'\\]|\\.)*'"
_COMMENT = r"/\*.*?\*/|//[^\n]*"
_SPACE = rf"(?:\s|{_COMMENT})*"
_DEFINES = (
    rf"(?<![\w.\-%])(ROOT\s{_SPACE})?(?:%([\w.\-]+)|([A-Za-z_][\w.\-]*)(?=[\s/])){_SPACE}=\s*"
)
_TOKEN = re.compile(rf"{_STRING}|{_COMMENT}|[(){{}}\[\]]|{_DEFINES}", re.DOTALL)
_HEAD = re.compile(rf"{_SPACE}(ENTRY\s)?{_SPACE}%?([A-Za-z_][\w.\-]*){_SPACE}(?=[({{])", re.DOTALL)
_BODY = re.compile(rf"\{{{_SPACE}(?={_DEFINES})", re.DOTALL)
_SPACES = re.compile(rf"({_STRING})|(?<=[(\[{{])\s+|\s+(?=[)\]}},])|(\s+)", re.DOTALL)
_CALLS = re.compile(
    r"\b(body|condition|calls|to_apply|(?:branch|called)_computations|"
    r"(?:true|false)_computation|select|scatter)=\s*$"
)
_AFTER = re.compile(r'(?:\s*,\s*execution_thread="[^"]*")?[ \t\r]*')
_SPACED = re.compile(r" ([a-z][\w\-]*)\s+\(")
_NEAR = 40  # more characters than an attribute's name has


def find_header_end(text: str, start: int) -> int:
    end = text.find("\n", start)
    while end >= 0:
        bare = re.sub(_STRING, "", text[start:end]).rstrip()
        if bare[-1:] != "," and all(bare.count(x) == bare.count(y) for x, y in ("()", "[]", "{}")):
            return end
        end = text.find("\n", end + 1)
    return len(text)


LaidOut = tuple[str, str, str]
"""A computation's name, its text, and the one that defines it in an instruction, or ""."""


def lay_out(text: str, start: int) -> tuple[list[LaidOut], int]:
    """Lay out the computation at `start`; return it and the position after it.

    Computations that its instructions define stand before it, with names of their own, and those
    that begin on its last line after it.

    Raises:
      ValueError: no computation begins there, or it does not end.
    """
    laid_out: list[LaidOut] = []
    while not laid_out or (not text.startswith("\n", start) and start < len(text)):
        head = _HEAD.match(text, start)
        body = head and _find_body(text, head.end())
        if not head or not body:
            raise ValueError(
                f"expected a computation of HLO, `name (parameters) -> type {{`; got "
                f"{text[start:].lstrip()[:80]!r}: the text looks truncated or damaged."
            )
        start = _read_body(text, body, head[2], bool(head[1]), laid_out, "")
    return laid_out, start


def _find_body(text: str, at: int) -> int:
    """Find the position after the brace that opens a body; 0 if there is none."""
    depth = 0
    for token in _TOKEN.finditer(text, at):
        if depth == 0 and (body := _BODY.match(text, token.start())):
            return body.end()
        depth += (token[0] in "([{") - (token[0] in ")]}")
    return 0


def _read_body(
    text: str, at: int, name: str, is_entry: bool, laid_out: list[LaidOut], parent: str
) -> int:
    """Add the computation whose first instruction is at `at`; return the position after it."""
    lines: list[str] = []
    parts: list[str] = []  # of the instruction, before `copied`
    depth, copied, callee, instruction, before = 0, at, None, "", len(laid_out)
    while token := _TOKEN.search(text, at):
        mark, start, at = token[0], token.start(), token.end()
        if mark in "([{":
            if not depth:
                callee = _CALLS.search(text, max(0, start - _NEAR), start)
            body = _BODY.match(text, start)
            if body and not callee:
                raise ValueError(
                    f"{instruction!r} in {name!r} defines a computation in an unknown way: the "
                    "notation is newer than this version of jaxcoll, or the text is damaged."
                )
            if body and callee:
                if callee[1] == "calls":  # the others are then those of what it calls
                    del laid_out[before:]
                inner = f"{name}.{instruction}.{len(laid_out)}"
                parts += [text[copied:start].rstrip(), f"%{inner}"]
                at = copied = _read_body(text, body.end(), inner, False, laid_out, name)
            else:
                depth += 1
        elif mark in ")]}" and depth:
            depth -= 1
        elif mark.startswith("/"):
            parts += [text[copied:start], " "]
            copied = at
        elif mark == "}" or (
            (token[2] or token[3]) and not depth and text[copied:start].rstrip()[-1:] != ","
        ):
            if instruction:
                written = "".join([*parts, text[copied:start]]).strip()
                rest = _SPACES.sub(
                    lambda x: x[1].replace("\n", " ") if x[1] else " " * bool(x[2]), written
                )
                lines[-1] += _SPACED.sub(r" \1(", rest, count=1)
            if mark == "}":
                title = f"\n{'ENTRY ' * is_entry}%{name} {{\n"
                written = "".join([title, "\n".join(lines), "\n}\n"])
                laid_out.append((name, written, parent))
                after = _AFTER.match(text, at)
                return after.end() if after else at
            instruction, parts, copied = token[2] or token[3], [], at
            before = len(laid_out)
            lines.append(f"  {'ROOT ' * bool(token[1])}%{instruction} = ")
    raise ValueError(f"the HLO text looks truncated: it ends inside the computation {name!r}.")
