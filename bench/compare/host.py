# SPDX-License-Identifier: MIT
"""The host cost of small calls on a CPU and of `import cunorm`: tables and a CSV.

`host_calls` has the calls; `host_against` also times another checkout.
"""

from __future__ import annotations

import csv
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch

import cunorm
from bench.compare import host_calls
from bench.compare.host_calls import EMPTY, OURS, SHAPE, Key, Timer
from bench.timing import machine
from bench.timing.cases import Operator
from bench.timing.cpu import Cpu
from bench.timing.machine import Environment
from bench.timing.providers import autograd

RUNS = 15
IMPORTS = 9  # processes that each import cunorm
CHECKOUT = Path(cunorm.__file__).parents[1]
IMPORT: Key = ("import cunorm, after numpy", "", "process")

_COLUMNS = ("date", "commit", "device", "versions", "call", "shape", "kind")
COLUMNS = (*_COLUMNS, "median_us", "minimum_us")

_TIME_IMPORT = """
import sys, time
sys.path.insert(0, sys.argv[1])
import numpy
start = time.perf_counter()
import cunorm
print(time.perf_counter() - start)
"""

Times = dict[Key, list[float]]  # µs, of each run


def run(operators: Sequence[Operator], device: Cpu, out: Path | None) -> int:
    """Time the calls, print the tables, and write a CSV."""
    found = times(host_calls.timers(operators))
    under_autograd = {key: spent for key, spent in found.items() if "," in key[2]}
    others = {key: spent for key, spent in found.items() if key not in under_autograd}
    print(table("on float32", figures(others)))
    if under_autograd:
        print("\n" + table("under autograd, float32", with_difference(figures(under_autograd))))
    found[IMPORT] = import_times([CHECKOUT])[0]
    median, minimum = (us / 1000 for us in _median_and_minimum(found[IMPORT]))
    print(f"\n{IMPORT[0]}: {median:.1f} ms (minimum {minimum:.1f}) in {IMPORTS} processes")
    if out is not None:
        write_csv(out, [(environment(device), found)])
    return 0


def environment(device: Cpu) -> Environment:
    """Return the environment of the measurement."""
    return machine.environment(device, [autograd.Torch()])


def write_csv(path: Path, measurements: Iterable[tuple[Environment, Times]]) -> None:
    """Write a line for each call, shape and kind of arrays."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for shared, found in measurements:
            start = (shared.date, shared.commit, shared.device, shared.versions)
            for key, pair in figures(found).items():
                writer.writerow([*start, *key, *(f"{us:.2f}" for us in pair)])


def times(timers: dict[Key, Timer], runs: int = RUNS) -> Times:
    """Time runs of all calls, in a new random order each round; the first round warms up."""
    found: Times = {key: [] for key in timers}
    contestants = list(timers.items())
    order = random.Random(0)
    for _ in range(runs + 1):
        order.shuffle(contestants)
        for key, timer in contestants:
            found[key].append(timer())
    return {key: spent[1:] for key, spent in found.items()}


def import_times(checkouts: Sequence[Path]) -> list[list[float]]:
    """Return the times of `import cunorm` in new processes, in µs, by checkout.

    The first process of each checkout compiles and caches the bytecode, and is not counted.
    """
    found: list[list[float]] = [[] for _ in checkouts]
    with tempfile.TemporaryDirectory() as bytecode:
        env = {**os.environ, "PYTHONPYCACHEPREFIX": bytecode}
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        for _ in range(IMPORTS + 1):
            for checkout, spent in zip(checkouts, found, strict=True):
                command = [sys.executable, "-c", _TIME_IMPORT, str(checkout)]
                spent.append(1e6 * float(subprocess.check_output(command, env=env)))
    return [spent[1:] for spent in found]


# --- tables ---------------------------------------------------------------------------------------

Figures = dict[Key, tuple[float, float]]  # median and minimum


def figures(found: Times) -> Figures:
    """Return the medians and minima."""
    return {key: _median_and_minimum(spent) for key, spent in found.items()}


def with_difference(found: Figures) -> Figures:
    """Add the difference between `cunorm.torch.rms_norm` and an empty autograd.Function."""
    more: Figures = {}
    for kind in dict.fromkeys(key[2] for key in found):
        ours, empty = (found[call, SHAPE, kind] for call in (OURS, EMPTY))
        more[f"{OURS}, more than empty", SHAPE, kind] = (ours[0] - empty[0], ours[1] - empty[1])
    return found | more


def table(what: str, found: Figures) -> str:
    """Return a table with two columns for each kind of arrays."""
    kinds = list(dict.fromkeys(key[2] for key in found))
    lines = [
        f"host cost of a call {what}, µs: {RUNS} runs of {host_calls.CALLS} calls; cunorm "
        f"{cunorm.__version__}, NumPy {np.__version__}, torch {torch.__version__}",
        f"{'':50} {'':>13}" + "".join(f" {kind.removeprefix('torch, '):>17}" for kind in kinds),
        f"{'call':50} {'shape':>13}" + f" {'median':>8} {'minimum':>8}" * len(kinds),
    ]
    for call, shape in dict.fromkeys(key[:2] for key in found):
        cells = (found.get((call, shape, kind)) for kind in kinds)
        lines.append(f"{call:50} {shape:>13}{''.join(map(_cells, cells))}".rstrip())
    return "\n".join(lines)


def _cells(pair: tuple[float, float] | None) -> str:
    return f"{'':18}" if pair is None else "".join(f" {us:8.1f}" for us in pair)


def _median_and_minimum(spent: list[float]) -> tuple[float, float]:
    return statistics.median(spent), min(spent)
