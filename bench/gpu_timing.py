# SPDX-License-Identifier: MIT
"""Time each operator on a GPU: from CuPy, from torch tensors, torch's own, and a plain copy.

All move the same bytes and take turns in one run; each operator is first checked against the
oracle. The report goes to the standard output.
Usage: ``python -m bench.gpu_timing TIMINGS.csv [--seconds N] [--op NAMES] [--compile]``
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import cunorm
from bench import peers
from bench.cases import (
    OPERATORS,
    TOLERANCE,
    Operands,
    Operator,
    backward,
    check,
    fewer,
    forward,
    training_forward,
)
from bench.gpu_report import Row, host_cost_table, timing_table, versions, write_csv
from bench.gpu_timer import DRAWN_ELEMENTS, Gpu, Point, rotating, upload

SHAPES = ((16384, 4096), (131072, 256), (65536, 1024), (4096, 16384), (1024, 65536))
OF_CHANNELS = ((20, 128, 256, 256), (2, 320, 64, 64), (2, 128, 128, 128), (4, 128, 97, 31))
BFLOAT16_ALONE = OF_CHANNELS[:1]
DIRECTIONS = ("forward", "backward")
CHECKED_ELEMENTS = DRAWN_ELEMENTS // 2
LIVE_ARRAYS = 56  # more row-sized arrays than are alive at once, over all sets and contestants


def points(operators: Iterable[Operator] = OPERATORS) -> Iterator[Point]:
    """Yield every point, the most telling shape first, as time may run out."""
    for of_rows, of_channels in zip_longest(SHAPES, OF_CHANNELS):
        for operator in operators:
            shape = of_channels if operator.of_channels else of_rows
            for dtype in ("bfloat16", "float32"):
                if shape is None or (dtype == "float32" and shape in BFLOAT16_ALONE):
                    continue
                for direction in DIRECTIONS:
                    yield Point(operator, direction, dtype, shape)


def fitting(point: Point, free_bytes: int) -> Point:
    """Halve the rows or samples until everything at a point fits the memory."""
    rows, *row = point.shape
    while rows > 1 and LIVE_ARRAYS * 4 * rows * math.prod(row) > free_bytes:
        rows //= 2
    return replace(point, shape=(rows, *row))


def ours(point: Point, operands: Operands) -> Callable[[], Any]:
    """Return cunorm's call on one set of operands."""
    operator = point.operator
    if point.direction == "forward":
        return forward(cunorm, operator, operands)
    saved = training_forward(cunorm, operator, operands)()
    return backward(cunorm, operator, operands, saved)


def theirs(
    torch: Any, function: peers.Function, point: Point, tensors: Operands
) -> Callable[[], Any]:
    """Return the call of a function of torch's on one set of operands."""
    if point.direction == "backward":
        return peers.torch_backward(torch, function, point.operator, tensors)
    return peers.torch_forward(function, point.operator, tensors)


def contestants(
    gpu: Gpu, point: Point, *, compiled: bool = False
) -> dict[str, Callable[[int], None]]:
    """Return what takes turns at a point, by the name of its column: a call of its index."""
    sets, torch = gpu.operands(point), gpu.torch
    calls = {"copy": gpu.copies(point), "cupy": [ours(point, operands) for operands in sets]}
    if torch is not None:
        tensors = [gpu.tensors(operands) for operands in sets]
        calls["torch"] = [ours(point, operands) for operands in tensors]
        functions = {"peer": peers.torch_function(torch, point.operator, point.shape[1])}
        if compiled:
            functions["compiled"] = peers.compiled(torch, functions["peer"])
        for name, function in functions.items():
            calls[name] = [theirs(torch, function, point, operands) for operands in tensors]
    return {name: rotating(found) for name, found in calls.items()}


def check_against_oracle(gpu: Gpu, point: Point, checked: dict[str, float]) -> None:
    """Raise if the operator is wrong in either direction, on as many rows as the oracle can take.

    `checked` holds the errors found before.
    """
    shape = fewer(point.shape, CHECKED_ELEMENTS)
    both_ways = str(replace(point, direction="both", shape=shape))
    if both_ways not in checked:
        to_gpu = partial(upload, gpu.cupy)
        checked[both_ways] = check(point.operator, point.dtype, shape, to_gpu, gpu.cupy.asnumpy)
    if not checked[both_ways] <= TOLERANCE[point.dtype]:
        raise ArithmeticError(f"wrong by {checked[both_ways]:.1e} of the largest value")


def timed(gpu: Gpu, point: Point, *, compiled: bool) -> Row:
    """Time one point."""
    return Row(
        operator=point.operator.label,
        direction=point.direction,
        dtype=point.dtype,
        shape="×".join(map(str, point.shape)),
        bytes=point.bytes,
        seconds=gpu.medians(contestants(gpu, point, compiled=compiled), point.sets),
    )


def host_costs(gpu: Gpu, operators: Iterable[Operator]) -> dict[str, dict[str, float]]:
    """Return what a call on one short row, or small sample, costs the host, in seconds."""
    costs = {}
    for operator in operators:
        for direction in DIRECTIONS:
            shape = (1, 64, 4, 4) if operator.of_channels else (1, 1024)
            calls = contestants(gpu, Point(operator, direction, "float32", shape))
            del calls["copy"]
            costs[f"{operator.label} {direction}"] = {
                name: gpu.host_seconds(call) for name, call in calls.items()
            }
    return costs


def run(gpu: Gpu, options: argparse.Namespace) -> int:
    """Time every point that the time allows, write and print the results; how many failed."""
    deadline = time.monotonic() + options.seconds
    rows: list[Row] = []
    failures: list[str] = []
    checked: dict[str, float] = {}
    left_out = 0
    costs = host_costs(gpu, options.op)
    for point in points(options.op):
        if time.monotonic() > deadline:
            left_out += 1
            continue
        try:
            check_against_oracle(gpu, point, checked)
            fitted = fitting(point, gpu.free_memory())
            rows.append(timed(gpu, fitted, compiled=options.compile))
        except Exception as error:  # one wrong point is reported; the others are still wanted
            failures.append(f"FAILED {point}: {type(error).__name__}: {error}")
            print(failures[-1], file=sys.stderr, flush=True)
    write_csv(options.table, rows)
    sections = [versions(gpu.cupy, gpu.torch), host_cost_table(costs)]
    if rows:
        sections.append(timing_table(rows))
    if left_out:
        sections.append(f"{left_out} points were left out: {options.seconds:.0f} s were over.")
    print("\n\n".join([*sections, *failures]))
    return len(failures)


def torch_with_cuda() -> Any | None:
    """Return torch where it is installed and sees a GPU."""
    try:
        import torch
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


def operators(names: str) -> list[Operator]:
    """Return the operators of names with commas between them."""
    asked = names.split(",")
    known = list(dict.fromkeys(operator.name for operator in OPERATORS))
    if unknown := [name for name in asked if name not in known]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r}, expected some of {known}")
    return [operator for operator in OPERATORS if operator.name in asked]


def main() -> int:
    """Parse the command line; the exit status is 0 if nothing failed."""
    description = (__doc__ or "").partition("The report")[0]
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_timing", description=description)
    parser.add_argument("table", type=Path, metavar="TIMINGS.csv", help="where the figures go")
    parser.add_argument("--seconds", type=float, default=120.0, help="time for the points")
    parser.add_argument("--op", type=operators, default=OPERATORS, help="names, by default all")
    parser.add_argument("--compile", action="store_true", help="time torch.compile, too: slow")
    parser.add_argument("--list", action="store_true", help="print the points and stop")
    options = parser.parse_args()
    if options.list:
        for point in points(options.op):
            print(point, point.bytes)
        return 0
    import cupy

    return 1 if run(Gpu(cupy, torch_with_cuda()), options) else 0


if __name__ == "__main__":
    sys.exit(main())
