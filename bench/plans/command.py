# SPDX-License-Identifier: MIT
"""`python -m bench static`: compile the GPU plans with NVRTC and check them, without a GPU.

The exit status is 1 if a plan spills, has a stack frame, does not fit a multiprocessor, or accesses
arrays as large as x in smaller pieces than planned. With --goals it is also 1 if a row norm that
keeps rows in registers loads after its first store, or if a prediction misses a goal.

nvdisasm (`pip install nvidia-cuda-nvdisasm`) shows the SASS of the kernels. From counts of its
instructions a model (model.py) predicts shares of copy speed. Predictions are not measurements.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from bench.plans.compiled import nvrtc_version
from bench.plans.occupancy import ARCHITECTURES
from bench.plans.plan import Plan
from bench.plans.planned import grid
from bench.plans.rows import KEY, PLANNED, Row, measure, planned_columns
from bench.plans.sass import MISSING, disassembler
from bench.plans.summary import goals_table, missed_goals, row_lines
from bench.report.records import read_csv, write_csv
from bench.timing.arguments import count, parsed

# With --check, the columns of _SAME must equal the table's. Others may differ, because one version
# of NVRTC comes in several builds: registers by this number; if they do not, those of _NEAR by 2 %.
_REGISTERS = 8
_NEAR = ("instructions", "prediction", "call_prediction", "microseconds")
_SAME = ("spill_stores", "spill_loads", "stack", "narrowest_bytes", "narrowed", "late_loads")
_SAMPLE, _SEED = 60, 1
_FIELDS = 5  # of a plan in --only


def main(argv: list[str]) -> int:
    """Make a table or check one; return 1 on any fault."""
    options = _arguments(argv)
    plans = [plan for plan in grid(options.arch) if _is_chosen(plan, options.only)]
    if disassembler() is None or not plans:
        print(MISSING if plans else "no such plans", file=sys.stderr)
        return 2
    if options.check:
        checked = [row for row in read_csv(options.check, Row) if _is_chosen(row, options.only)]
        faults = list(differences(checked, plans, options.sample, options.jobs))
        if {row.nvrtc for row in checked} != {nvrtc_version()}:
            print(f"the table is not by NVRTC {nvrtc_version()}: only plans were compared")
        print("\n".join(faults) or f"{options.check}: no difference was found")
        return bool(faults)
    rows = list(_measure_all(plans, options.jobs))
    if options.out:
        write_csv(options.out, Row, rows)
    print(*(row_lines(rows) if options.only else ()), *goals_table(rows), sep="\n")
    return report(rows, goals=options.goals)


def report(rows: list[Row], *, goals: bool = False) -> int:
    """Print the faults of rows, with `goals` also late loads and missed goals; return 1 if any."""
    more = {row: [*row.late(), *missed_goals(row)] if goals else [] for row in rows}
    faulty = {row: found for row in rows if (found := [*row.faults(), *more[row]])}
    if faulty:
        print(f"\n{len(faulty)} launches do not pass:")
    for row, found in faulty.items():
        print(f"{' '.join(filter(None, (row.gpu, *row.key)))}: {'; '.join(found)}")
    return bool(faulty)


def _is_chosen(plan: Plan | Row, only: list[list[str]]) -> bool:
    """Whether `only` selects a plan; an empty list selects all."""
    texts = (plan.operator, plan.direction, plan.dtype, plan.shape, plan.count or "all")
    return not only or any(
        all(wanted in ("", fact) for wanted, fact in zip(one, texts, strict=False)) for one in only
    )


def differences(rows: list[Row], plans: list[Plan], sample: int, jobs: int) -> Iterator[str]:
    """Yield the differences from a table: of all plans, and of a sample that is compiled.

    If another NVRTC made the table, only plans are compared. The sample is the same each time and
    has equally many plans of each architecture.
    """
    architectures = sorted({f"sm_{plan.architecture}" for plan in plans})
    table = {(row.gpu, row.key): row for row in rows if row.arch in architectures}
    keys, now = {row.key for row in table.values()}, {}
    for plan in plans:
        columns = planned_columns(plan)
        now[tuple(str(columns[name]) for name in KEY)] = columns, plan
    for key in keys ^ now.keys():
        source = "the table" if key in keys else "the plans"
        yield f"{' '.join(filter(None, key))}: only in {source}"
    for row in table.values():
        if row.key in now:
            yield from _mismatches(row, {name: now[row.key][0][name] for name in PLANNED})
    if {row.nvrtc for row in table.values()} != {nvrtc_version()}:
        return
    draw, of_each = random.Random(_SEED), -(-sample // len(architectures))
    chosen: list[Plan] = []
    for arch in architectures:
        of_arch = [now[key][1] for key in now if key in keys and key[KEY.index("arch")] == arch]
        chosen += draw.sample(of_arch, min(of_each, len(of_arch)))
    for row in _measure_all(chosen, jobs):
        old, checked = table[row.gpu, row.key], list(_SAME)
        if abs(old.registers - row.registers) > _REGISTERS:
            checked.append("registers")
        for name in _NEAR:
            was, now_is = (float(getattr(one, name) or 0) for one in (old, row))
            if abs(now_is - was) > 0.02 * was and old.registers == row.registers:
                checked.append(name)
        yield from _mismatches(old, {name: getattr(row, name) for name in checked})


def _mismatches(old: Row, same: dict[str, Any]) -> Iterator[str]:
    for column, value in same.items():
        if getattr(old, column) != value:
            name = " ".join(filter(None, old.key))
            yield f"{name}: {column} is {value}, the table has {getattr(old, column)}"


def _measure_all(plans: list[Plan], jobs: int) -> Iterator[Row]:
    """Yield the rows of plans in their order, with progress on stderr."""
    alone = jobs == 1 or len(plans) < 2 * jobs
    # Processes are spawned, because a fork of a process with threads, such as pytest, may hang.
    with nullcontext() if alone else ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        rows = map(measure, plans) if pool is None else pool.map(measure, plans, chunksize=8)
        for number, found in enumerate(rows, start=1):
            print(f"\r{number}/{len(plans)} compiled", end="", file=sys.stderr, flush=True)
            yield from found
    print(file=sys.stderr)


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench static", description=__doc__)
    add, names = parser.add_argument, [f"sm_{number}" for number in ARCHITECTURES]
    add("--arch", default=",".join(names), help=f"of {', '.join(names)}")
    add("--out", type=Path, metavar="FILE.csv", help="write the rows here as well")
    add("--check", type=Path, help="compare all plans and a compiled sample with this CSV instead")
    add(
        "--only",
        type=lambda text: [one.split(":") for one in text.split(",")],
        default=[],
        help="compile only these plans, and print each. A plan is OPERATOR:DIRECTION:DTYPE:SHAPE:"
        "COUNT; fields may be empty, or left out at the end. COUNT is the rows or samples of small "
        "work, or 'all'",
    )
    add("--goals", action="store_true", help="fail on late loads and missed goals, too")
    add("--sample", type=count, default=_SAMPLE, help="plans that --check compiles")
    add("--jobs", type=count, default=2, help="processes that compile")
    options = parsed(parser, argv)
    options.arch = tuple(name.removeprefix("sm_") for name in options.arch.split(","))
    if not ARCHITECTURES.keys() >= set(options.arch):
        parser.error(f"--arch: expected of {', '.join(names)}")
    if max(map(len, options.only), default=0) > _FIELDS:
        parser.error(f"--only: expected at most {_FIELDS} fields of a plan")
    if options.check and not options.check.is_file():
        parser.error(f"--check: there is no file {options.check}")
    return options
