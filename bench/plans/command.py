# SPDX-License-Identifier: MIT
"""`python -m bench static`: compile the GPU plans with NVRTC and check them, without a GPU.

The exit status is 1 if a plan spills, has a stack frame, does not fit a multiprocessor, accesses
arrays as large as x in smaller pieces than planned, or, if it is a row norm's and keeps rows in
registers, loads after its first store.

nvdisasm (`pip install nvidia-cuda-nvdisasm`) shows the SASS of the kernels. From counts of its
instructions, bench/plans/model.py predicts shares of copy speed. Predictions are not measurements.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from fnmatch import fnmatchcase
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from bench.plans.compiled import nvrtc_version
from bench.plans.model import ARCHITECTURES
from bench.plans.plan import Plan
from bench.plans.planned import grid
from bench.plans.rows import KEY, PLANNED, Row, measure, planned_columns
from bench.plans.sass import MISSING, disassembler
from bench.report.records import read_csv, write_csv
from bench.timing.arguments import count, list_of, parsed

# With --check, the columns of _SAME must equal the table's. Others may differ, because one version
# of NVRTC comes in several builds: registers by this number; if they do not, those of _NEAR by 2 %.
_REGISTERS = 8
_NEAR = ("instructions", "prediction", "call_prediction", "microseconds")
_SAME = ("spill_stores", "spill_loads", "stack", "narrowest_bytes", "late_loads")


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
    if options.only != ["*"]:
        print(*rows, sep="\n")
    return report(rows)


def report(rows: list[Row]) -> int:
    """Print the faults of rows; return 1 if there are any."""
    faulty = [row for row in rows if row.faults()]
    print(f"{len(faulty)} of {len(rows)} launches do not pass")
    for row in faulty:
        print(f"{_name((row.gpu, *row.key))}: {'; '.join(row.faults())}")
    return bool(faulty)


def _is_chosen(plan: Plan | Row, patterns: list[str]) -> bool:
    """Whether one of the patterns matches a plan's name."""
    texts = (plan.operator, plan.direction, plan.dtype, plan.shape, plan.count or "all")
    return any(fnmatchcase(":".join(texts), pattern) for pattern in patterns)


def differences(rows: list[Row], plans: list[Plan], sample: int, jobs: int) -> Iterator[str]:
    """Yield the differences from a table: of all plans, and of a sample that is compiled.

    If another NVRTC made the table, only plans are compared.
    """
    architectures = {f"sm_{plan.architecture}" for plan in plans}
    table = {(row.gpu, row.key): row for row in rows if row.arch in architectures}
    keys, now = {row.key for row in table.values()}, {}
    for plan in plans:
        columns = planned_columns(plan)
        now[tuple(str(columns[name]) for name in KEY)] = columns, plan
    for key in keys ^ now.keys():
        yield f"{_name(key)}: only in {'the table' if key in keys else 'the plans'}"
    for row in table.values():
        if row.key in now:
            yield from _mismatches(row, {name: now[row.key][0][name] for name in PLANNED})
    if {row.nvrtc for row in table.values()} != {nvrtc_version()}:
        return
    shared = [plan for key, (_, plan) in now.items() if key in keys]
    for row in _measure_all(shared[:: max(1, len(shared) // sample)], jobs):
        old, checked = table[row.gpu, row.key], list(_SAME)
        if abs(old.registers - row.registers) > _REGISTERS:
            checked.append("registers")
        for name in _NEAR if old.registers == row.registers else ():
            numbers = (float(getattr(one, name) or 0) for one in (old, row))
            if not math.isclose(*numbers, rel_tol=0.02):
                checked.append(name)
        yield from _mismatches(old, {name: getattr(row, name) for name in checked})


def _mismatches(old: Row, same: dict[str, Any]) -> Iterator[str]:
    for column, value in same.items():
        if getattr(old, column) != value:
            yield f"{_name(old.key)}: {column} is {value}, the table has {getattr(old, column)}"


def _name(parts: Iterable[str]) -> str:
    return " ".join(filter(None, parts))


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
    add, names = parser.add_argument, list(ARCHITECTURES)
    add("--arch", type=list_of(names), default=names, help=f"some of {', '.join(names)}")
    add("--out", type=Path, metavar="FILE.csv", help="write the rows here as well")
    add("--check", type=Path, help="compare all plans and a compiled sample with this CSV instead")
    add(
        "--only",
        type=lambda text: text.split(","),
        default=["*"],
        help="compile only these plans, and print each: patterns, between commas, of OPERATOR:"
        "DIRECTION:DTYPE:SHAPE:COUNT, such as 'rms_norm:*:*:4096:all'; COUNT is the rows or "
        "samples of small work, or all",
    )
    add("--sample", type=count, default=60, help="about how many plans --check compiles")
    add("--jobs", type=count, default=2, help="processes that compile")
    options = parsed(parser, argv)
    if options.check and not options.check.is_file():
        parser.error(f"--check: there is no file {options.check}")
    return options
