# SPDX-License-Identifier: MIT
"""What the CPU timings are written as: a table with geometric means, and a CSV."""

from __future__ import annotations

import csv
import datetime
import platform
import statistics
from collections.abc import Iterable
from pathlib import Path

import torch

import cunorm
from bench.cpu import Result


def table(results: Iterable[Result], threads: int, calls_in_turn: int) -> str:
    """Return the points as a table, and geometric means by operator, direction and dtype."""
    results = list(results)
    width = max(len(f"{result.point}") for result in results)
    lines = [
        f"cunorm {cunorm.__version__}, torch {torch.__version__}, {threads} threads, memory warm,"
        f" turns of {calls_in_turn},",
        "medians in ms; × torch: speed relative to it; / copy: time over a copy of as many bytes;",
        "/ ungated: time over cunorm's without the gate; NHWC: channels last in memory",
        f"{'point':{width}} {'cunorm':>8} {'torch':>8} {'copy':>8} {'ungated':>8} "
        f"{'× torch':>8} {'/ copy':>7} {'/ ungated':>9}",
    ]
    lines += [_line(result, width) for result in results]
    for names, group in _groups(results).items():
        speedup = statistics.geometric_mean(result.speedup for result in group)
        over_copy = statistics.geometric_mean(result.over_copy for result in group)
        worst = min(result.speedup for result in group)
        lines.append(
            f"{' '.join(names):{width}} geometric mean × torch {speedup:5.2f}, worst {worst:5.2f}, "
            f"/ copy {over_copy:5.2f}{_over_ungated(group)}"
        )
    return "\n".join(lines)


def _line(result: Result, width: int) -> str:
    times = [result.cunorm, result.torch, result.copy, result.ungated]
    cells = " ".join(f"{'' if t is None else f'{1e3 * t:.3f}':>8}" for t in times)
    ratio = "" if result.over_ungated is None else f"{result.over_ungated:9.2f}"
    line = f"{result.point:{width}} {cells} {result.speedup:8.2f} {result.over_copy:7.2f} {ratio}"
    return line.rstrip()


def _over_ungated(group: Iterable[Result]) -> str:
    """Return the end of a line of means, where all its points have a gate."""
    ratios = [result.over_ungated for result in group]
    if None in ratios:
        return ""
    known = [ratio for ratio in ratios if ratio is not None]
    return f", / ungated {statistics.geometric_mean(known):5.2f}, worst {max(known):5.2f}"


def _groups(results: Iterable[Result]) -> dict[tuple[str, str, str], list[Result]]:
    """Return the points of each operator, direction and dtype, then those of all operators.

    Those with a gate are taken by themselves, as their goals are others, and so is each group norm,
    in both orders of its axes in memory.
    """
    groups: dict[tuple[str, str, str], list[Result]] = {}
    of_all: dict[tuple[str, str, str], list[Result]] = {}
    for result in results:
        point = result.point
        groups.setdefault((point.operator.label, point.direction, point.dtype), []).append(result)
        if point.operator.of_channels:
            which = f"{point.operator.name} both"
        else:
            which = "all gated" if point.operator.gate_position else "all ungated"
        of_all.setdefault((which, point.direction, point.dtype), []).append(result)
    return groups | of_all


def write_csv(path: Path, results: Iterable[Result]) -> None:
    """Write one line for each point, with what it was measured on."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        what = ["operator", "memory", "direction", "dtype", "shape"]
        times = ["cunorm_ms", "torch_ms", "copy_ms", "ungated_ms"]
        writer.writerow(["date", "machine", "cunorm", "torch", *what, *times])
        machine = [datetime.date.today().isoformat(), platform.machine()]
        for result in results:
            point = result.point
            what = [point.operator.name, point.operator.memory, point.direction, point.dtype]
            what.append(point.shape_text)
            seconds = (result.cunorm, result.torch, result.copy, result.ungated)
            times = ["" if t is None else f"{1e3 * t:.4f}" for t in seconds]
            writer.writerow([*machine, cunorm.__version__, torch.__version__, *what, *times])
