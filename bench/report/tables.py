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
from collections.abc import Iterable, Sequence
from pathlib import Path

from bench.accuracy import errors as accuracy_errors
from bench.plans import rows as static_rows
from bench.report import goals, static_tables
from bench.report.ratios import Ratio, geometric_mean, label, load, measured, points_without, ratios
from bench.report.records import read_csv
from bench.timing.rows import Row

_BLOCK = re.compile(r"(<!-- (cpu|accuracy|prediction)-table: (\S+) -->\n).*?(<!-- end -->)", re.S)
_PEERS = ("torch", "torch.compile", "jax")  # of the table of peers
_UNDER_AUTOGRAD = ("torch", "torch.compile", "liger", "fla", "quack")


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table or write a page's; return 1 on a missed goal or, with --check, a difference."""
    parser = _parser()
    options = parser.parse_args(argv)
    if (options.csv is None) == (options.page is None):
        parser.error("expected either a CSV or --page, whose markers name one")
    if options.page and options.goals:
        parser.error("--goals is for a CSV")
    if options.check and not options.page:
        parser.error("--check is for --page")
    try:
        if options.page:
            return _write(options.page, options.peer, only_compare=options.check)
        return _print(options.csv, options.peer, with_goals=options.goals)
    except (OSError, ValueError) as error:
        parser.error(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench table", description=__doc__)
    parser.add_argument("csv", type=Path, nargs="?", metavar="CSV", help="from `python -m bench`")
    parser.add_argument("--peer", default="torch", help="the provider to compare with")
    parser.add_argument(
        "--goals", action="store_true", help="also compare with the goals for a CPU"
    )
    parser.add_argument(
        "--page",
        type=Path,
        help="instead of printing, rewrite the tables between <!-- cpu-table: CSV --> (or "
        "accuracy-table, prediction-table) and <!-- end --> in this file; the CSV's path is "
        "relative to the file's folder",
    )
    parser.add_argument(
        "--check", action="store_true", help="with --page: only print the differences"
    )
    return parser


def _print(path: Path, peer: str, *, with_goals: bool) -> int:
    rows = load(path)
    print(markdown(rows, peer))
    if not with_goals:
        return 0
    checked = goals.goals(rows)
    print(f"\n{goals.table(checked)}")
    return 0 if all(goal.met for goal in checked) else 1


def _write(path: Path, peer: str, *, only_compare: bool) -> int:
    old = path.read_text(encoding="utf-8")
    new = rewritten(old, path.parent, peer)
    if only_compare:
        lines = old.splitlines(keepends=True), new.splitlines(keepends=True)
        sys.stdout.writelines(difflib.unified_diff(*lines, "what is there", "of the CSV"))
        return 0 if old == new else 1
    path.write_text(new, encoding="utf-8")
    return 0


def rewritten(text: str, folder: Path, peer: str = "torch") -> str:
    """Return a page's text with new tables; the paths of their CSVs are relative to `folder`."""
    if not text.count("-table: ") == len(_BLOCK.findall(text)) > 0:
        raise ValueError(
            "expected <!-- cpu-table: CSV --> or the like on a line, and <!-- end --> after it"
        )
    return _BLOCK.sub(lambda found: f"{found[1]}{_table(folder, found, peer)}\n{found[4]}", text)


def _table(folder: Path, found: re.Match[str], peer: str) -> str:
    path = folder / found[3]
    if found[2] == "cpu":
        return markdown(load(path), peer)
    if found[2] == "accuracy":
        return "\n".join(accuracy_errors.table(read_csv(path, accuracy_errors.Row)))
    return static_tables.page(read_csv(path, static_rows.Row))


def markdown(rows: Sequence[Row], peer: str = "torch") -> str:
    """Return a table of means and worst points, its legend, and the facts of the measurement."""
    speeds = ratios(rows, peer, "cunorm")
    if not speeds:
        providers = sorted({row.provider for row in rows})
        raise ValueError(f"no point has both cunorm and {peer}; there are {', '.join(providers)}")
    over_copy = ratios(rows, "cunorm", "copy")
    over_ungated = ratios(rows, "cunorm", "cunorm-ungated")
    dtypes = _dtypes(rows)
    columns = [(f"× {peer}", speeds, _speed_cell), ("/ copy", over_copy, _time_cell)]
    if over_ungated:
        columns.append(("/ ungated", over_ungated, _time_cell))
    heads = [f"{name}, {dtype}" for name, _, _ in columns for dtype in dtypes]
    lines = [f"| | {' | '.join(heads)} |", f"|---|{'---|' * len(heads)}"]
    for name, direction in _norms(rows):
        cells = [
            cell(_chosen(found, name, direction, dtype))
            for _, found, cell in columns
            for dtype in dtypes
        ]
        lines.append(f"| {name} {direction} | {' | '.join(cells)} |")
    notes = [_legend(peer, with_gates=bool(over_ungated))]
    if any(row.provider == peer and row.by_host_clock for row in rows):
        notes.append(f"The times of {peer} include host time, those of cunorm do not.")
    if over := goals.halves(rows):
        notes.append(f"The time on float16 is {_time_cell(over)} of that on bfloat16.")
    notes.append(measured(rows))
    if left_out := points_without(rows, "cunorm"):
        notes.append(f"Without cunorm: {', '.join(left_out)}.")
    return "\n".join([*lines, "", *textwrap.wrap(" ".join(notes), width=120), *_peers(rows)])


def _peers(rows: Sequence[Row]) -> list[str]:
    """Return the lines of a table of peers; none if there are fewer than two peers."""
    peers = [name for name in _PEERS if any(row.provider == name for row in rows)]
    if len(peers) < 2:
        return []
    columns = [
        (f"× {peer}, {dtype}", goals.large(ratios(rows, peer, "cunorm")), dtype)
        for dtype in _dtypes(rows)
        for peer in peers
    ]
    lines = [f"| | {' | '.join(head for head, *_ in columns)} |", f"|---|{'---|' * len(columns)}"]
    for name, direction in _norms(rows):
        chosen = (_chosen(found, name, direction, dtype) for _, found, dtype in columns)
        lines.append(f"| {name} {direction} | {' | '.join(map(_least_cell, chosen))} |")
    note = (
        "The next table has the points whose x has 1 MiB or more, with the smallest ratio in "
        "brackets. It also has compilers of these formulas: torch.compile (fullgraph, compiled "
        "for each shape, its backward through autograd) and XLA (jax.numpy under jit, its "
        "backward the pullback under jit)."
    )
    return ["", *textwrap.wrap(note, width=120), "", *lines]


def _dtypes(rows: Iterable[Row]) -> list[str]:
    """Return the dtypes that have columns: if bfloat16 is there, float16 has none."""
    there = list(dict.fromkeys(row.dtype for row in rows))
    return [name for name in there if name != "float16" or "bfloat16" not in there]


def _norms(rows: Iterable[Row]) -> list[tuple[str, str]]:
    """Return operators and directions in the order of the table."""
    names = dict.fromkeys(label(row.operator, row.memory) for row in rows)
    there = {(label(row.operator, row.memory), row.direction) for row in rows}
    both = ((name, direction) for name in names for direction in ("forward", "backward"))
    return [norm for norm in both if norm in there]


def _chosen(found: Iterable[Ratio], name: str, direction: str, dtype: str) -> list[Ratio]:
    wanted = (name, direction, dtype)
    return [ratio for ratio in found if (ratio.label, ratio.direction, ratio.dtype) == wanted]


def _speed_cell(chosen: Sequence[Ratio]) -> str:
    if not chosen:
        return "–"
    worst = min(chosen, key=lambda ratio: ratio.value)
    return f"{geometric_mean(chosen):.2f} ({worst.value:.2f} at {worst.shape})"


def _least_cell(chosen: Sequence[Ratio]) -> str:
    if not chosen:
        return "–"
    return f"{geometric_mean(chosen):.2f} ({min(ratio.value for ratio in chosen):.2f})"


def _time_cell(chosen: Sequence[Ratio]) -> str:
    if not chosen:
        return "–"
    return f"{geometric_mean(chosen):.2f} ({max(ratio.value for ratio in chosen):.2f})"


def _legend(peer: str, *, with_gates: bool) -> str:
    ungated = " / ungated: the same for the norm without its gate." if with_gates else ""
    text = (
        f"× {peer}: {peer}'s time divided by cunorm's, as a geometric mean over the points, with "
        "the smallest ratio in brackets. / copy: cunorm's time divided by that of a plain copy of "
        f"as many bytes, as a geometric mean, with the largest ratio in brackets.{ungated}"
    )
    if peer in _UNDER_AUTOGRAD:
        text += (
            f" A backward of {peer} goes through autograd, as its users call it; cunorm's is the "
            "plain function."
        )
    return text


if __name__ == "__main__":
    sys.exit(main())
