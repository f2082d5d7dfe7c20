# SPDX-License-Identifier: MIT
"""`python -m bench table`: cunorm and other providers as a Markdown table, from a CSV of timings.

With --page, all tables of a page are rewritten, also those of accuracy and of predictions.
"""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

from bench.accuracy import errors as accuracy_errors
from bench.plans import rows as static_rows
from bench.report import static_tables
from bench.report.ratios import (
    Ratio,
    geometric_mean,
    grouped,
    large,
    load,
    measured,
    points_without,
    ratios,
)
from bench.report.records import read_csv
from bench.timing.rows import Row

_BLOCK = re.compile(r"(<!-- (cpu|accuracy|prediction)-table: (\S+) -->\n).*?(<!-- end -->)", re.S)
_DIRECTIONS = ("forward", "backward")
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
    """Print a table or write a page's."""
    parser = argparse.ArgumentParser(prog="python -m bench table", description=__doc__)
    parser.add_argument("csv", type=Path, nargs="?", metavar="CSV", help="from `python -m bench`")
    page_help = (
        "instead of printing, rewrite the tables between <!-- cpu-table: CSV --> (or "
        "accuracy-table, prediction-table) and <!-- end --> in this file; the CSV's path is "
        "relative to the file's folder"
    )
    parser.add_argument("--page", type=Path, help=page_help)
    options = parser.parse_args(argv)
    if (options.csv is None) == (options.page is None):
        parser.error("expected either a CSV or --page, whose markers name one")
    try:
        if options.page:
            options.page.write_text(rewritten(options.page), encoding="utf-8")
        else:
            print(markdown(load(options.csv)))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return 0


def rewritten(path: Path) -> str:
    """Return a page with its tables as the CSVs have them."""
    old = path.read_text(encoding="utf-8")
    if not old.count("-table: ") == len(_BLOCK.findall(old)) > 0:
        raise ValueError(
            "expected <!-- cpu-table: CSV --> or the like on a line, and <!-- end --> after it"
        )
    return _BLOCK.sub(lambda found: f"{found[1]}{_table(path.parent, found)}\n{found[4]}", old)


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
    columns = {"× torch": speeds, "/ copy": ratios(rows, "cunorm", "copy")}
    if ungated:
        columns["/ ungated"] = ungated
    there = dict.fromkeys(row.dtype for row in rows)
    dtypes = [name for name in there if name != "float16" or "bfloat16" not in there]
    lines = _lines(list(product(columns, dtypes)), columns, named=True)
    notes = [f"{_LEGEND}{_UNGATED if ungated else ''}{_AUTOGRAD}"]
    if halves := large(_halves(rows)):
        notes.append(f"The time on float16 is {_cell('/', halves)} of that on bfloat16.")
    notes.append(measured(rows))
    if left_out := points_without(rows, "cunorm"):
        notes.append(f"Without cunorm: {', '.join(left_out)}.")
    lines += ["", *textwrap.wrap(" ".join(notes), width=120)]
    peers = [name for name in _PEERS if any(row.provider == name for row in rows)]
    if len(peers) > 1:
        of_peers = {f"× {name}": large(ratios(rows, name, "cunorm")) for name in peers}
        late = any(row.by_host_clock for row in rows if row.provider in peers)
        note = _OF_PEERS + (" The times of jax include host time." if late else "")
        heads = [(name, dtype) for dtype in dtypes for name in of_peers]
        lines += ["", *textwrap.wrap(note, width=120), "", *_lines(heads, of_peers)]
    return "\n".join(lines)


def _halves(rows: Iterable[Row]) -> list[Ratio]:
    """Return cunorm's time on float16 over that on bfloat16."""
    ours = [row for row in rows if row.provider == "cunorm"]
    by_dtype = [replace(row, provider=row.dtype, dtype="float16") for row in ours]
    return ratios(by_dtype, "float16", "bfloat16")


def _lines(
    heads: Sequence[tuple[str, str]], columns: dict[str, list[Ratio]], *, named: bool = False
) -> list[str]:
    """Return the lines of a table whose columns each have a name of ratios and a dtype."""
    lines = [f"| | {' | '.join(map(', '.join, heads))} |", f"|---|{'---|' * len(heads)}"]
    groups = {name: grouped(found) for name, found in columns.items()}
    there = [(one.label, one.direction) for found in columns.values() for one in found]
    for label, direction in product(dict.fromkeys(name for name, _ in there), _DIRECTIONS):
        if (label, direction) in there:
            found = ((name, groups[name].get((label, direction, dtype))) for name, dtype in heads)
            cells = (_cell(name, chosen, named=named and name[0] == "×") for name, chosen in found)
            lines.append(f"| {label} {direction} | {' | '.join(cells)} |")
    return lines


def _cell(name: str, chosen: Sequence[Ratio] | None, *, named: bool = False) -> str:
    """Return the mean of ratios and the worst: of speeds, "×", the smallest, else the largest."""
    if not chosen:
        return "–"
    worst = (min if name[0] == "×" else max)(chosen, key=lambda ratio: ratio.value)
    at = f" at {worst.shape}" if named else ""
    return f"{geometric_mean(chosen):.2f} ({worst.value:.2f}{at})"
