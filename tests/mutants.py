"""Change `_plan` and the reductions at random points, one by one; list what no test notices.

    python tests/mutants.py --count 20 --seed 1            # points of all these rooms
    python tests/mutants.py --only _plan/packs/packing.py  # as many points of one file

Works on copies of the repository in .pytest_cache, which keep what they compiled. First the tests of
these rooms run once, to record which lines each executes. A change is tried on the tests that
execute its line, the quickest first. One that survives needs a test, or changes nothing.
"""

import argparse
import ast
import collections
import hashlib
import inspect
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("_plan", "_collectives", "_gradients")
TESTS = ("tests/plan", "tests/collectives", "tests/gradients")
SWAPS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


class LineRecorder:
    """A pytest plugin that writes which lines of jaxcoll each test executes, and its seconds."""

    def __init__(self, path):
        self.path, self.folder = Path(path), f"{Path.cwd() / 'jaxcoll'}{os.sep}"
        self.lines, self.seconds = set(), collections.Counter()
        self.tests = collections.defaultdict(set)
        monitoring, line = sys.monitoring, sys.monitoring.events.LINE
        monitoring.use_tool_id(monitoring.COVERAGE_ID, "mutants")
        monitoring.register_callback(monitoring.COVERAGE_ID, line, self.record)
        monitoring.set_events(monitoring.COVERAGE_ID, line)

    def record(self, code, line):
        # What a module or a class does is done once, whichever test comes first.
        if code.co_flags & inspect.CO_OPTIMIZED and code.co_filename.startswith(self.folder):
            self.lines.add(f"{code.co_filename.removeprefix(self.folder)}:{line}")
        return sys.monitoring.DISABLE  # once a test is enough

    def pytest_runtest_logreport(self, report):
        name = report.nodeid.split("[")[0]
        self.seconds[name] += report.duration
        if report.when == "teardown":
            for line in self.lines:
                self.tests[line].add(name)
            self.lines.clear()
            sys.monitoring.restart_events()

    def pytest_sessionfinish(self, exitstatus):
        sys.monitoring.set_events(sys.monitoring.COVERAGE_ID, 0)
        if exitstatus:
            return
        tests = {line: sorted(names) for line, names in self.tests.items()}
        self.path.write_text(json.dumps({"seconds": self.seconds, "tests": tests}))


def pytest_configure(config):
    if path := os.environ.get("RECORD_LINES"):
        worker = os.environ.get("PYTEST_XDIST_WORKER", "")
        config.pluginmanager.register(LineRecorder(f"{path}-{worker}.json"))


def points(tree):
    """Where the tree can be changed: (node, what, a function that changes it)."""
    for node in ast.walk(tree):
        match node:
            case ast.Compare(ops=ops):
                for k, op in enumerate(ops):
                    yield node, op, lambda ops=ops, k=k, op=op: swap(ops, k, op)
            case ast.BinOp(op=op, right=right) if type(op) in SWAPS:
                # `X | None` is a type, and "%" or "+" of texts would only raise.
                if not isinstance(right, ast.JoinedStr):
                    yield node, op, lambda node=node, op=op: swap(vars(node), "op", op)
            case ast.BoolOp(op=op):
                yield node, op, lambda node=node, op=op: swap(vars(node), "op", op)
            case ast.Constant(value=int(value)) if not isinstance(value, bool):
                yield node, node, lambda node=node: setattr(node, "value", node.value + 1)


def swap(holder, key, op):
    holder[key] = SWAPS[type(op)]()


def mutated(source, number):
    """The source with the change of that number, the line, and what was changed.

    The other lines stay where they are: compiled programs are kept under the lines of their source.
    """
    node, what, change = list(points(ast.parse(source)))[number]
    change()
    text = source.encode()
    lines = text.splitlines(keepends=True)
    first, last = (
        sum(map(len, lines[: line - 1])) + column
        for line, column in [
            (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)]
    )  # fmt: skip
    ends = "\n" * (node.end_lineno - node.lineno)
    text = text[:first] + f"({ast.unparse(node)}{ends})".encode() + text[last:]
    return text.decode(), node.lineno, type(what).__name__


def copied(number):
    """A copy of what tests need, at a place that stays."""
    copy = ROOT / ".pytest_cache" / "mutants" / str(number)
    for name in ("jaxcoll", "tests", "docs", "benchmarks"):
        shutil.rmtree(copy / name, ignore_errors=True)
        shutil.copytree(ROOT / name, copy / name)
    shutil.copy(ROOT / "pyproject.toml", copy)
    return copy


def run_tests(python, copy, tests, *flags, seconds=None, **variables):
    """The exit status and what was printed; None: they took longer."""
    with subprocess.Popen(
        [*python.split(), "-m", "pytest", "-q", *flags, *tests], cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy), **variables}, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as run:  # fmt: skip
        try:
            output, _ = run.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(run.pid, signal.SIGTERM)
            return None, run.communicate()[0]
    return run.returncode, output


def recorded(python, copy, at_once):
    """Which tests execute each line, the quickest first, and the seconds of each.

    What was recorded stays, as long as neither the package nor the tests change.
    """
    sources = sorted([*copy.glob("jaxcoll/**/*.py"), *copy.glob("tests/**/*.py")])
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    tests, seconds = collections.defaultdict(set), collections.Counter()
    for folder in TESTS:
        record = f"lines-{Path(folder).name}-{digest}"
        if not any(copy.glob(f"{record}-*")):
            flags = ("-p", "mutants", "-n", str(max(2, at_once)))
            status, output = run_tests(
                python, copy, [folder], *flags, RECORD_LINES=str(copy / record)
            )
            if status:
                sys.exit(f"Without any change the tests fail:\n{output}")
        for path in copy.glob(f"{record}-gw*"):
            kept = json.loads(path.read_text())
            seconds.update(kept["seconds"])
            for line, names in kept["tests"].items():
                tests[line].update(names)
    return {line: sorted(names, key=seconds.get) for line, names in tests.items()}, seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--from", type=int, default=0, dest="first", help="leave out so many points"
    )
    parser.add_argument("--only", default="", help="paths under jaxcoll/ that contain this")
    parser.add_argument("--at-once", type=int, default=2, help="copies that are tried")
    parser.add_argument("--python", default=sys.executable, help="runs the tests; 3.12 or newer")
    args = parser.parse_args()
    package = ROOT / "jaxcoll"
    files = [p for room in ROOMS for p in sorted((package / room).rglob("*.py"))]
    sources = {
        str(p.relative_to(package)): p.read_text("utf8") for p in files if args.only in str(p)
    }
    everything = [
        (path, number)
        for path, source in sources.items()
        for number in range(len(list(points(ast.parse(source)))))
    ]
    chosen = random.Random(args.seed).sample(everything, min(args.count, len(everything)))[
        args.first :
    ]
    copies = SimpleQueue()
    for number in range(args.at_once):
        copies.put(copied(number))
    first = copies.get()
    tests, seconds = recorded(args.python, first, args.at_once)
    copies.put(first)

    def is_noticed(point):
        path, number = point
        text, line, what = mutated(sources[path], number)
        names = tests.get(f"{path}:{line}") or sorted(seconds, key=seconds.get)
        limit = 60 + 5 * sum(seconds[name] for name in names)
        copy = copies.get()
        changed = copy / "jaxcoll" / path
        changed.write_text(text, "utf8")
        status, _ = run_tests(args.python, copy, names, "-x", seconds=limit)
        changed.write_text(sources[path], "utf8")
        copies.put(copy)
        outcome = {0: "SURVIVED", None: "hangs   "}.get(status, "noticed ")
        print(f"{outcome} {path}:{line}: {what} ({len(names)} tests)", flush=True)
        return status != 0

    with ThreadPoolExecutor(args.at_once) as pool:
        noticed = sum(pool.map(is_noticed, chosen))
    print(f"{noticed} of {len(chosen)} were noticed")
    return int(noticed < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
