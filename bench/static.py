# SPDX-License-Identifier: MIT
"""`python -m bench static`: what NVRTC makes of the GPU plans, and a gate for it, without a GPU.

The exit status is 1 where a plan spills, has a stack frame, or accesses arrays as large as x by
less at a time than alignment and the plan's pack allow; with --goals, also where loads of a row
norm stand behind its stores, or a prediction misses a goal.

The SASS is read too (static_reads.py and static_packs.py say what is counted), which takes
nvdisasm: `pip install nvidia-cuda-nvdisasm`. --check does without it. From what it says a model
predicts shares of copy speed (model.py); those are not measurements.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from bench.records import read_csv, write_csv
from bench.static_occupancy import ARCHITECTURES
from bench.static_plan import Plan
from bench.static_plans import grid
from bench.static_rows import (
    KEY,
    PLANNED,
    Row,
    measured,
    nvrtc_version,
    planned,
)
from bench.static_sass import MISSING, disassembler
from bench.static_small import table
from bench.static_summary import goals_table, listed, missed, summary

# Of a plan that is checked against a table: how far its registers may be from those there, as the
# same version of NVRTC comes in several builds; all else must be the same.
_REGISTERS = 8
_SAME = ("spill_stores", "spill_loads", "stack", "planned_bytes", "narrowest_bytes", "narrowed")
_SAMPLE, _SEED = 60, 1


def main(argv: list[str]) -> int:
    """Make the table or check one; return 1 if something is wrong."""
    options = _arguments(argv)
    if options.read:
        rows = read_csv(options.read, Row)
        chosen = [row for row in rows if row.arch.removeprefix("sm_") in options.arch]
        return _told([row for row in chosen if is_chosen(row, options.only)], options)
    plans = [plan for plan in grid(options.arch) if is_chosen(plan, options.only)]
    if not options.check and disassembler() is None:
        print(MISSING, file=sys.stderr)
        return 2
    if options.small:
        print(*table(options.arch), sep="\n")
        return 0
    if options.check:
        checked = read_csv(options.check, Row)
        faults = list(differences(checked, plans, options.sample, options.jobs))
        if disassembler() is None:
            print(f"{MISSING}; what the SASS says was not compared")
        print(
            "\n".join(faults) or f"{options.check}: {options.sample} lines compiled, as they were"
        )
        return bool(faults)
    rows = list(_measured(plans, options.jobs))
    if options.out:
        write_csv(options.out, Row, rows)
    return _told(rows, options)


def _told(rows: list[Row], options: argparse.Namespace) -> int:
    """Print what rows say; return 1 if something is held against them."""
    if not rows:
        print("no such plans", file=sys.stderr)
        return 2
    print(listed(rows) if options.only else summary(rows), goals_table(rows), sep="\n\n")
    return report(rows, goals=options.goals)


def report(rows: list[Row], *, goals: bool = False) -> int:
    """Print what the gate holds against the rows; return 1 if there is anything."""
    faulty = {row: found for row in rows if (found := [*row.faults(), *(late_or_slow(row, goals))])}
    if faulty:
        print(f"\n{len(faulty)} launches do not pass:")
    for row, found in faulty.items():
        print(f"{' '.join(filter(None, row.key))}: {'; '.join(found)}")
    return bool(faulty)


def late_or_slow(row: Row, goals: bool) -> list[str]:
    """Return what is held against a row if the goals are."""
    return [*row.late(), *missed(row)] if goals else []


def is_chosen(plan: Plan | Row, only: list[tuple[str, ...]]) -> bool:
    """Whether a plan is one of those that are asked for; nothing asks for all."""
    facts = (plan.operator, plan.direction, plan.dtype, plan.shape)
    return not only or any(
        all(wanted in ("", fact) for wanted, fact in zip(one, facts, strict=False)) for one in only
    )


def differences(rows: list[Row], plans: list[Plan], sample: int, jobs: int) -> Iterator[str]:
    """Yield what is not as a table says: any plan, and what NVRTC makes of some of them.

    Where the table is another NVRTC's, plans alone are compared.
    """
    table = {row.key: row for row in rows if row.arch in {f"sm_{p.architecture}" for p in plans}}
    now = {tuple(str(planned(plan)[name]) for name in KEY): plan for plan in plans}
    for key in table.keys() ^ now.keys():
        where = "the table" if key in table else "the plans"
        yield f"{' '.join(filter(None, key))}: only in {where}"
    known = [key for key in now if key in table]
    for key in known:
        columns = planned(now[key])
        yield from _unlike(table[key], {name: columns[name] for name in PLANNED}, {})
    if {table[key].nvrtc for key in known} == {nvrtc_version()}:
        chosen = _chosen(known, sample)
        for row in _measured([now[key] for key in chosen], jobs):
            same = {name: getattr(row, name) for name in _SAME}
            if disassembler() is not None:
                same["late_loads"] = row.late_loads
            yield from _unlike(table[row.key], same, {"registers": row.registers})


def _unlike(old: Row, same: dict[str, int | str], near: dict[str, int]) -> Iterator[str]:
    name = " ".join(filter(None, old.key))
    for column, value in same.items():
        if getattr(old, column) != value:
            yield f"{name}: {column} is {value}, the table has {getattr(old, column)}"
    for column, number in near.items():
        if abs(getattr(old, column) - number) > _REGISTERS:
            yield f"{name}: {column} is {number}, the table has {getattr(old, column)}"


def _chosen(keys: list[tuple[str, ...]], count: int) -> list[tuple[str, ...]]:
    """Draw keys, as many of each architecture; always the same."""
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


def _measured(plans: list[Plan], jobs: int) -> Iterator[Row]:
    """Yield the rows of plans in their order, and say on stderr how far that is."""
    if jobs == 1 or len(plans) < 2 * jobs:
        yield from _counted(map(measured, plans), len(plans))
        return
    # Spawned, as a fork of a process with threads, such as those of tests, may hang.
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        yield from _counted(pool.map(measured, plans, chunksize=8), len(plans))


def _counted(rows: Iterable[Row], total: int) -> Iterator[Row]:
    for number, row in enumerate(rows, start=1):
        print(f"\r{number}/{total} compiled", end="", file=sys.stderr, flush=True)
        yield row
    print(file=sys.stderr)


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench static", description=__doc__)
    names = [f"sm_{number}" for number in ARCHITECTURES]
    parser.add_argument(
        "--arch", type=_architectures, default=tuple(ARCHITECTURES), help=f"of {', '.join(names)}"
    )
    parser.add_argument("--out", type=Path, help="write a CSV here as well")
    parser.add_argument(
        "--check", type=Path, help="compare plans, and a sample compiled, with such a CSV instead"
    )
    parser.add_argument(
        "--read", type=Path, help="tell what such a CSV says instead, and compile nothing"
    )
    parser.add_argument(
        "--only",
        type=lambda text: [tuple(one.split(":")) for one in text.split(",")],
        default=[],
        help="plans to compile, each as OPERATOR:DIRECTION:DTYPE:SHAPE, any of which may be empty "
        "or left out at the end; those are printed one by one",
    )
    parser.add_argument(
        "--goals",
        action="store_true",
        help="hold late loads and goals that are missed against them",
    )
    parser.add_argument(
        "--small", action="store_true", help="predict times of group norms of few samples instead"
    )
    parser.add_argument("--sample", type=int, default=_SAMPLE, help="lines that --check compiles")
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
