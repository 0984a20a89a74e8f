"""Change `_plan` and the reductions at random points, one by one; list what no test notices.

    python tests/mutants.py --count 20 --seed 1            # points of all these rooms
    python tests/mutants.py --only _plan/packs/packing.py  # as many points of one file

Works on a copy of the repository in .pytest_cache, which keeps what it compiled. First the tests of
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
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COPY = ROOT / ".pytest_cache" / "mutants" / "copy"
ROOMS = ("_plan", "_collectives", "_gradients")
TESTS = ("tests/plan", "tests/collectives", "tests/gradients", "tests/proof")
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


def run_tests(tests, *flags, seconds=None, **variables):
    """The exit status and what was printed; None: they took longer."""
    own = {**os.environ, "PYTHONPATH": str(COPY), **variables}
    with subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-n", "2", *flags, *tests], cwd=COPY, env=own,
        start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as run:  # fmt: skip
        try:
            output, _ = run.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(run.pid, signal.SIGTERM)
            return None, run.communicate()[0]
    return run.returncode, output


def recorded():
    """Which tests execute each line, the quickest first, and the seconds of each.

    What was recorded stays, as long as neither the package nor the tests change.
    """
    sources = sorted([*COPY.glob("jaxcoll/**/*.py"), *COPY.glob("tests/**/*.py")])
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    tests, seconds = collections.defaultdict(set), collections.Counter()
    for folder in TESTS:
        record = f"lines-{Path(folder).name}-{digest}"
        if not any(COPY.glob(f"{record}-*")):
            record_to = {"RECORD_LINES": str(COPY / record)}
            status, output = run_tests([folder], "-p", "mutants", **record_to)
            if status:
                sys.exit(f"Without any change the tests fail:\n{output}")
        for path in COPY.glob(f"{record}-gw*"):
            kept = json.loads(path.read_text())
            seconds.update(kept["seconds"])
            for line, names in kept["tests"].items():
                tests[line].update(names)
    return {line: sorted(names, key=seconds.get) for line, names in tests.items()}, seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="paths under jaxcoll/ that contain this")
    args = parser.parse_args()
    for name in ("jaxcoll", "tests", "docs", "benchmarks"):
        shutil.rmtree(COPY / name, ignore_errors=True)
        shutil.copytree(ROOT / name, COPY / name)
    shutil.copy(ROOT / "pyproject.toml", COPY)
    files = [p for room in ROOMS for p in sorted((COPY / "jaxcoll" / room).rglob("*.py"))]
    everything = [
        (path, number)
        for path in files
        if args.only in str(path)
        for number in range(len(list(points(ast.parse(path.read_text("utf8"))))))
    ]
    tests, seconds = recorded()
    chosen = random.Random(args.seed).sample(everything, min(args.count, len(everything)))
    survived = 0
    for path, number in chosen:
        source = path.read_text("utf8")
        text, line, what = mutated(source, number)
        place = f"{path.relative_to(COPY / 'jaxcoll')}:{line}"
        names = tests.get(place) or sorted(seconds, key=seconds.get)
        path.write_text(text, "utf8")
        status, _ = run_tests(names, "-x", seconds=60 + 5 * sum(map(seconds.get, names)))
        path.write_text(source, "utf8")
        outcome = {0: "SURVIVED", None: "hangs   "}.get(status, "noticed ")
        print(f"{outcome} {place}: {what} ({len(names)} tests)", flush=True)
        survived += status == 0
    print(f"{len(chosen) - survived} of {len(chosen)} were noticed")
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main())
