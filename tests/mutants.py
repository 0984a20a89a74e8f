"""Change `_plan` and the reductions at random points, one by one; list what their tests do not notice.

    python tests/mutants.py --count 20 --seed 1            # tests of the changed room
    python tests/mutants.py --only _plan/packs/packing.py  # as many points of one file

Works on a copy of the repository. A change that survives needs a test, or changes nothing.
"""

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = {
    "_plan": ["tests/plan"],
    "_collectives": ["tests/collectives", "tests/gradients"],
    "_gradients": ["tests/collectives", "tests/gradients"],
}
SWAPS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


def points(tree):
    """Where the tree can be changed: (line, what, a function that changes it)."""
    for node in ast.walk(tree):
        match node:
            case ast.Compare(ops=ops):
                for k, op in enumerate(ops):
                    yield node.lineno, op, lambda ops=ops, k=k, op=op: swap(ops, k, op)
            case ast.BinOp(op=op, right=right) if type(op) in SWAPS:
                # `X | None` is a type, and "%" or "+" of texts would only raise.
                if not isinstance(right, ast.JoinedStr):
                    yield node.lineno, op, lambda node=node, op=op: swap(vars(node), "op", op)
            case ast.BoolOp(op=op):
                yield node.lineno, op, lambda node=node, op=op: swap(vars(node), "op", op)
            case ast.Constant(value=int(value)) if not isinstance(value, bool):
                yield node.lineno, node, lambda node=node: setattr(node, "value", node.value + 1)


def swap(holder, key, op):
    holder[key] = SWAPS[type(op)]()


def mutated(source, number):
    """The source with the change of that number, and what was changed."""
    tree = ast.parse(source)
    line, what, change = list(points(tree))[number]
    change()
    return ast.unparse(ast.fix_missing_locations(tree)), f"{line}: {type(what).__name__}"


def passes(copy, tests, few):
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    command += ["--few", str(few)] if few else []
    run = subprocess.run(
        command, cwd=copy, env={**os.environ, "PYTHONPATH": str(copy)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    return run.returncode == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="paths under jaxcoll/ that contain this")
    parser.add_argument("--few", type=int, default=1, help="cases per test in the first attempt")
    args = parser.parse_args()
    files = [p for room in TESTS for p in sorted((ROOT / "jaxcoll" / room).rglob("*.py"))]
    sources = {p.relative_to(ROOT): p.read_text("utf8") for p in files if args.only in str(p)}
    everything = [
        (path, number)
        for path, source in sources.items()
        for number in range(len(list(points(ast.parse(source)))))
    ]
    chosen = random.Random(args.seed).sample(everything, min(args.count, len(everything)))
    survived = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("jaxcoll", "tests", "docs"):
            shutil.copytree(ROOT / name, copy / name)
        shutil.copy(ROOT / "pyproject.toml", copy)
        for path, number in chosen:
            text, what = mutated(sources[path], number)
            (copy / path).write_text(text, "utf8")
            tests = TESTS[path.parts[1]]
            alive = passes(copy, tests, args.few) and (not args.few or passes(copy, tests, 0))
            (copy / path).write_text(sources[path], "utf8")
            survived += alive
            print("SURVIVED" if alive else "caught  ", f"{path}:{what}", flush=True)
    print(f"{len(chosen) - survived} of {len(chosen)} were noticed")
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main())
