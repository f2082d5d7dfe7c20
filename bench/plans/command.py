# SPDX-License-Identifier: MIT
"""`python -m bench static`: compile the GPU plans with NVRTC and check them, without a GPU.

The exit status is 1 if a plan spills, has a stack frame, does not fit a multiprocessor, or accesses
arrays as large as x in smaller pieces than planned. With --goals it is also 1 if a row norm that
keeps rows in registers loads after its first store, or if a prediction misses a goal.

Counts of the SASS (static_reads.py, static_packs.py) need nvdisasm:
`pip install nvidia-cuda-nvdisasm`. --check works without it. From the counts a model (model.py)
predicts shares of copy speed. Predictions are not measurements.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from bench.plans.occupancy import ARCHITECTURES
from bench.plans.plan import Plan
from bench.plans.planned import grid
from bench.plans.rows import (
    KEY,
    PLANNED,
    Row,
    measure,
    nvrtc_version,
    planned_columns,
)
from bench.plans.sass import MISSING, disassembler
from bench.plans.summary import changes, goals_table, missed_goals, row_lines, summary
from bench.report.records import read_csv, write_csv

# With --check, registers may differ from the table by this number, because one version of NVRTC
# comes in several builds. The columns of _SAME must be equal.
_REGISTERS = 8
_SAME = ("spill_stores", "spill_loads", "stack", "planned_bytes", "narrowest_bytes", "narrowed")
_SAMPLE, _SEED = 60, 1


def main(argv: list[str]) -> int:
    """Make a table or check one; return 1 on any fault."""
    options = _arguments(argv)
    if options.read:
        rows = read_csv(options.read, Row)
        chosen = [row for row in rows if row.arch.removeprefix("sm_") in options.arch]
        return _print_report([row for row in chosen if is_chosen(row, options.only)], options)
    plans = [plan for plan in grid(options.arch) if is_chosen(plan, options.only)]
    if not options.check and disassembler() is None:
        print(MISSING, file=sys.stderr)
        return 2
    if options.check:
        checked = read_csv(options.check, Row)
        faults = list(differences(checked, plans, options.sample, options.jobs))
        if disassembler() is None:
            print(f"{MISSING}; what the SASS says was not compared")
        if {row.nvrtc for row in checked} != {nvrtc_version()}:
            print(f"the table is not by NVRTC {nvrtc_version()}: only plans were compared")
        print("\n".join(faults) or f"{options.check}: no difference was found")
        return bool(faults)
    rows = list(_measure_all(plans, options.jobs))
    if options.out:
        write_csv(options.out, Row, rows)
    return _print_report(rows, options)


def _print_report(rows: list[Row], options: argparse.Namespace) -> int:
    """Print the rows and their faults; return 1 if there are faults, 2 if there are no rows."""
    if not rows:
        print("no such plans", file=sys.stderr)
        return 2
    print(row_lines(rows) if options.only else summary(rows), goals_table(rows), sep="\n\n")
    if options.before:
        print(f"\n{changes(read_csv(options.before, Row), rows)}")
    return report(rows, goals=options.goals)


def report(rows: list[Row], *, goals: bool = False) -> int:
    """Print the faults of rows; return 1 if there are any."""
    faulty = {
        row: found for row in rows if (found := [*row.faults(), *(missed_goals_of(row, goals))])
    }
    if faulty:
        print(f"\n{len(faulty)} launches do not pass:")
    for row, found in faulty.items():
        print(f"{' '.join(filter(None, (row.gpu, *row.key)))}: {'; '.join(found)}")
    return bool(faulty)


def missed_goals_of(row: Row, goals: bool) -> list[str]:
    """Return the late loads and missed goals of a row; nothing without `goals`."""
    return [*row.late(), *missed_goals(row)] if goals else []


def is_chosen(plan: Plan | Row, only: list[tuple[str, ...]]) -> bool:
    """Whether `only` selects a plan; an empty list selects all."""
    texts = (plan.operator, plan.direction, plan.dtype, plan.shape, plan.count or "all")
    return not only or any(
        all(wanted in ("", fact) for wanted, fact in zip(one, texts, strict=False)) for one in only
    )


def differences(rows: list[Row], plans: list[Plan], sample: int, jobs: int) -> Iterator[str]:
    """Yield the differences from a table: of all plans, and of a sample that is compiled.

    If another NVRTC made the table, only plans are compared.
    """
    architectures = {f"sm_{plan.architecture}" for plan in plans}
    table = {row.key: row for row in rows if row.arch in architectures}
    planned = [(planned_columns(plan), plan) for plan in plans]
    now = {tuple(str(columns[name]) for name in KEY): (columns, plan) for columns, plan in planned}
    for key in table.keys() ^ now.keys():
        source = "the table" if key in table else "the plans"
        yield f"{' '.join(filter(None, key))}: only in {source}"
    common = [key for key in now if key in table]
    for key in common:
        columns, _ = now[key]
        yield from _mismatches(table[key], {name: columns[name] for name in PLANNED}, {})
    if {table[key].nvrtc for key in common} == {nvrtc_version()}:
        chosen = _sampled(common, sample)
        compiled = {row.key: row for row in _measure_all([now[key][1] for key in chosen], jobs)}
        for row in compiled.values():
            same = {name: getattr(row, name) for name in _SAME}
            if disassembler() is not None:
                same["late_loads"] = row.late_loads
            yield from _mismatches(table[row.key], same, {"registers": row.registers})


def _mismatches(old: Row, same: dict[str, int | str], near: dict[str, int]) -> Iterator[str]:
    name = " ".join(filter(None, old.key))
    for column, value in same.items():
        if getattr(old, column) != value:
            yield f"{name}: {column} is {value}, the table has {getattr(old, column)}"
    for column, number in near.items():
        if abs(getattr(old, column) - number) > _REGISTERS:
            yield f"{name}: {column} is {number}, the table has {getattr(old, column)}"


def _sampled(keys: list[tuple[str, ...]], count: int) -> list[tuple[str, ...]]:
    """Draw the same keys each time, equally many of each architecture."""
    draw = random.Random(_SEED)
    by_architecture: dict[str, list[tuple[str, ...]]] = {}
    for key in keys:
        by_architecture.setdefault(key[KEY.index("arch")], []).append(key)
    share = -(-count // max(1, len(by_architecture)))
    return [
        key
        for group in by_architecture.values()
        for key in draw.sample(group, min(share, len(group)))
    ]


def _measure_all(plans: list[Plan], jobs: int) -> Iterator[Row]:
    """Yield the rows of plans in their order, with progress on stderr."""
    if jobs == 1 or len(plans) < 2 * jobs:
        yield from _with_progress(map(measure, plans), len(plans))
        return
    # Processes are spawned, because a fork of a process with threads, such as pytest, may hang.
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        yield from _with_progress(pool.map(measure, plans, chunksize=8), len(plans))


def _with_progress(rows: Iterable[list[Row]], total: int) -> Iterator[Row]:
    for number, found in enumerate(rows, start=1):
        print(f"\r{number}/{total} compiled", end="", file=sys.stderr, flush=True)
        yield from found
    print(file=sys.stderr)


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench static", description=__doc__)
    names = [f"sm_{number}" for number in ARCHITECTURES]
    parser.add_argument(
        "--arch", type=_architectures, default=tuple(ARCHITECTURES), help=f"of {', '.join(names)}"
    )
    parser.add_argument("--out", type=Path, help="write a CSV here as well")
    parser.add_argument(
        "--check", type=Path, help="compare all plans and a compiled sample with this CSV instead"
    )
    parser.add_argument("--read", type=Path, help="read the rows from this CSV, compile nothing")
    parser.add_argument(
        "--only",
        type=lambda text: [tuple(one.split(":")) for one in text.split(",")],
        default=[],
        help="compile only these plans, and print each. A plan is OPERATOR:DIRECTION:DTYPE:SHAPE:"
        "COUNT; fields may be empty, or left out at the end. COUNT is the rows or samples of small "
        "work, or 'all'",
    )
    parser.add_argument(
        "--before", type=Path, help="print the differences from the predictions of this CSV"
    )
    parser.add_argument(
        "--goals", action="store_true", help="fail on late loads and missed goals, too"
    )
    parser.add_argument("--sample", type=int, default=_SAMPLE, help="plans that --check compiles")
    parser.add_argument("--jobs", type=int, default=2, help="processes that compile")
    return parser.parse_args(argv)


def _architectures(text: str) -> tuple[str, ...]:
    given = tuple(name.removeprefix("sm_") for name in text.split(","))
    if unknown := [name for name in given if name not in ARCHITECTURES]:
        raise argparse.ArgumentTypeError(
            f"sm_{unknown[0]}, expected of sm_{', sm_'.join(ARCHITECTURES)}"
        )
    return given


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
