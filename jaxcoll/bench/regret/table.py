"""The table that `jaxcoll bench --regret` prints."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from jaxcoll.bench.regret.measure import Regret, summary
from jaxcoll.bench.table import wide_console
from jaxcoll.bench.terminal import new_table

LEGEND = """\
ratio: seconds of the automatic choice over those of the best by hand, which is picked in other
rounds than it is compared in · twin: the automatic choice over itself"""


def show(found: Sequence[Regret], *, to_stderr: bool) -> None:
    """Print a row for each case, the worst last, and what they come to together."""
    console = wide_console(to_stderr=to_stderr)
    table = new_table(("case", "", "best by hand", "ratio", "twin"), "><<>>")
    for each in sorted(found, key=lambda each: each.ratio):
        figures = f"{each.ratio:.2f}", f"{each.twin:.2f}"
        table.add_row(str(each.case.number), Text(str(each.case)), Text(each.best), *figures)
    console.print(table)
    total = summary(found)
    console.print(
        Text(
            f"{total['cases']} cases: the automatic choice takes {total['mean']:.3f} times as long "
            f"as the best by hand (geometric mean), {total['worst']:.2f} times in the worst case; "
            f"its own twin differs by a factor of {total['twin_mean']:.3f} (geometric mean), "
            f"{total['twin_worst']:.2f} in the worst case."
        )
    )
    console.print(Text(LEGEND, "dim"))
