# SPDX-License-Identifier: MIT
"""`python -m bench table`: cunorm and other providers as a Markdown table, from a CSV of timings.

With --page, all tables of a page are rewritten, also those of accuracy and of predictions. The exit
status is 1 if --goals finds a missed goal, or --check a difference.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from bench.accuracy import errors as accuracy_errors
from bench.plans import rows as static_rows
from bench.report import goals, static_tables
from bench.report.ratios import (
    Ratio,
    geometric_mean,
    grouped,
    load,
    measured,
    points_without,
    ratios,
)
from bench.report.records import read_csv
from bench.timing.rows import Row

_BLOCK = re.compile(r"(<!-- (cpu|accuracy|prediction)-table: (\S+) -->\n).*?(<!-- end -->)", re.S)
_PEERS = ("torch", "torch.compile", "jax")  # of the table of peers
_LEGEND = (
    "× torch: torch's time divided by cunorm's, as a geometric mean over the points, with the "
    "smallest ratio in brackets. / copy: cunorm's time divided by that of a plain copy of as many "
    "bytes, as a geometric mean, with the largest ratio in brackets."
)
_UNGATED = " / ungated: the same for the norm without its gate."
_AUTOGRAD = (
    " A backward of torch goes through autograd, as its users call it; cunorm's is the plain "
    "function."
)
_OF_PEERS = (
    "The next table has the points whose x has 1 MiB or more, with the smallest ratio in brackets. "
    "It also has compilers of these formulas: torch.compile (fullgraph, compiled for each shape, "
    "its backward through autograd) and XLA (jax.numpy under jit, its backward the pullback under "
    "jit)."
)


def main(argv: Sequence[str]) -> int:
    """Print a table or write a page's; return 1 on a missed goal or, with --check, a difference."""
    parser = argparse.ArgumentParser(prog="python -m bench table", description=__doc__)
    add = parser.add_argument
    add("csv", type=Path, nargs="?", metavar="CSV", help="from `python -m bench`")
    add("--goals", action="store_true", help="also compare with the goals for a CPU")
    page_help = (
        "instead of printing, rewrite the tables between <!-- cpu-table: CSV --> (or "
        "accuracy-table, prediction-table) and <!-- end --> in this file; the CSV's path is "
        "relative to the file's folder"
    )
    add("--page", type=Path, help=page_help)
    add("--check", action="store_true", help="with --page: only print the differences")
    options = parser.parse_args(argv)
    if (options.csv is None) == (options.page is None):
        parser.error("expected either a CSV or --page, whose markers name one")
    if (options.check and not options.page) or (options.goals and options.page):
        parser.error("--check is for --page, --goals for a CSV")
    try:
        if options.page:
            return _write(options.page, only_compare=options.check)
        rows = load(options.csv)
        print(markdown(rows))
        checked = goals.goals(rows) if options.goals else []
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if checked:
        print(f"\n{goals.table(checked)}")
    return 0 if all(goal.met for goal in checked) else 1


def _write(path: Path, *, only_compare: bool) -> int:
    old = path.read_text(encoding="utf-8")
    if not old.count("-table: ") == len(_BLOCK.findall(old)) > 0:
        raise ValueError(
            "expected <!-- cpu-table: CSV --> or the like on a line, and <!-- end --> after it"
        )
    new = _BLOCK.sub(lambda found: f"{found[1]}{_table(path.parent, found)}\n{found[4]}", old)
    if only_compare:
        lines = old.splitlines(keepends=True), new.splitlines(keepends=True)
        sys.stdout.writelines(difflib.unified_diff(*lines, "what is there", "of the CSV"))
        return 0 if old == new else 1
    path.write_text(new, encoding="utf-8")
    return 0


def _table(folder: Path, found: re.Match[str]) -> str:
    path = folder / found[3]
    if found[2] == "cpu":
        return markdown(load(path))
    if found[2] == "accuracy":
        return "\n".join(accuracy_errors.table(read_csv(path, accuracy_errors.Row)))
    return static_tables.page(read_csv(path, static_rows.Row))


def markdown(rows: Sequence[Row]) -> str:
    """Return a table of means and worst points, its legend, and the facts of the measurement."""
    speeds = ratios(rows, "torch", "cunorm")
    if not speeds:
        providers = sorted({row.provider for row in rows})
        raise ValueError(f"no point has both cunorm and torch; there are {', '.join(providers)}")
    ungated = ratios(rows, "cunorm", "cunorm-ungated")
    columns = [("× torch", speeds), ("/ copy", ratios(rows, "cunorm", "copy"))]
    columns += [("/ ungated", ungated)] if ungated else []
    dtypes = _dtypes(rows)
    lines = _lines(rows, [(*column, dtype) for column in columns for dtype in dtypes], named=True)
    notes = [f"{_LEGEND}{_UNGATED if ungated else ''}{_AUTOGRAD}"]
    if over := goals.halves(rows):
        notes.append(f"The time on float16 is {_cell(over, max)} of that on bfloat16.")
    notes.append(measured(rows))
    if left_out := points_without(rows, "cunorm"):
        notes.append(f"Without cunorm: {', '.join(left_out)}.")
    lines += ["", *textwrap.wrap(" ".join(notes), width=120)]
    peers = [name for name in _PEERS if any(row.provider == name for row in rows)]
    if len(peers) > 1:
        of_peers = {name: goals.large(ratios(rows, name, "cunorm")) for name in peers}
        late = any(row.by_host_clock for row in rows if row.provider in peers)
        note = _OF_PEERS + (" The times of jax include host time." if late else "")
        found = [(f"× {name}", of_peers[name], dtype) for dtype in dtypes for name in peers]
        lines += ["", *textwrap.wrap(note, width=120), "", *_lines(rows, found)]
    return "\n".join(lines)


def _lines(
    rows: Iterable[Row], columns: Sequence[tuple[str, list[Ratio], str]], *, named: bool = False
) -> list[str]:
    """Return the lines of a table whose columns each have a name, ratios and a dtype.

    The worst ratio of a speed is the smallest, that of a time the largest. With `named`, the
    shapes of the worst speeds are named.
    """
    heads = [f"{name}, {dtype}" for name, _, dtype in columns]
    lines = [f"| | {' | '.join(heads)} |", f"|---|{'---|' * len(heads)}"]
    by_norm = [(name[0] == "×", grouped(found), dtype) for name, found, dtype in columns]
    rows = list(rows)
    there = {(f"{row.operator} {row.memory}".rstrip(), row.direction): None for row in rows}
    for label in dict.fromkeys(label for label, _ in there):
        for direction in ("forward", "backward"):
            if (label, direction) in there:
                cells = (
                    _cell(found.get((label, direction, dtype)), min, named=named)
                    if is_speed
                    else _cell(found.get((label, direction, dtype)), max)
                    for is_speed, found, dtype in by_norm
                )
                lines.append(f"| {label} {direction} | {' | '.join(cells)} |")
    return lines


def _cell(
    chosen: Sequence[Ratio] | None, worst: Callable[..., Ratio], *, named: bool = False
) -> str:
    """Return the mean of ratios and the worst of them, which `worst` chooses."""
    if not chosen:
        return "–"
    one = worst(chosen, key=lambda ratio: ratio.value)
    at = f" at {one.shape}" if named else ""
    return f"{geometric_mean(chosen):.2f} ({one.value:.2f}{at})"


def _dtypes(rows: Iterable[Row]) -> list[str]:
    """Return the dtypes that have columns: if bfloat16 is there, float16 has none."""
    there = list(dict.fromkeys(row.dtype for row in rows))
    return [name for name in there if name != "float16" or "bfloat16" not in there]
