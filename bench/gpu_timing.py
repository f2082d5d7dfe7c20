# SPDX-License-Identifier: MIT
"""Time each operator on a GPU: from CuPy, from torch tensors, torch's own, and a plain copy.

All move the same bytes and take turns in one run; each operator is first checked against the
oracle. The report goes to the standard output.
Usage: ``python -m bench.gpu_timing TIMINGS.csv [--seconds N] [--op NAMES] [--compile]``
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
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
    forward,
    training_forward,
)
from bench.gpu_report import Row, host_cost_table, timing_table, versions, write_csv
from bench.gpu_timer import DRAWN_ELEMENTS, Gpu, Point, rotating

SHAPES = ((16384, 4096), (131072, 256), (65536, 1024), (4096, 16384), (1024, 65536))
DIRECTIONS = ("forward", "backward")
LIVE_ARRAYS = 56  # more row-sized arrays than are alive at once, over all sets and contestants


def points(operators: Iterable[Operator] = OPERATORS) -> Iterator[Point]:
    """Yield every point, the most telling shape first, as time may run out."""
    for rows, width in SHAPES:
        for operator in operators:
            for dtype in ("bfloat16", "float32"):
                for direction in DIRECTIONS:
                    yield Point(operator, direction, dtype, rows, width)


def fitting(point: Point, free_bytes: int) -> Point:
    """Halve the rows until everything at a point fits the memory."""
    rows = point.rows
    while rows > 1 and LIVE_ARRAYS * 4 * rows * point.width > free_bytes:
        rows //= 2
    return replace(point, rows=rows)


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
        functions = {"peer": peers.torch_function(torch, point.operator, point.width)}
        if compiled:
            functions["compiled"] = peers.compiled(torch, functions["peer"])
        for name, function in functions.items():
            calls[name] = [theirs(torch, function, point, operands) for operands in tensors]
    return {name: rotating(found) for name, found in calls.items()}


def check_against_oracle(gpu: Gpu, point: Point, checked: dict[str, float]) -> None:
    """Raise if the operator is wrong in either direction, on as many rows as the oracle can take.

    `checked` holds the errors found before.
    """
    rows = DRAWN_ELEMENTS // 2 // point.width
    both_ways = str(replace(point, direction="both", rows=rows))
    if both_ways not in checked:
        shape = rows, point.width
        cupy = gpu.cupy
        checked[both_ways] = check(point.operator, point.dtype, shape, cupy.asarray, cupy.asnumpy)
    if not checked[both_ways] <= TOLERANCE[point.dtype]:
        raise ArithmeticError(f"wrong by {checked[both_ways]:.1e} of the largest value")


def timed(gpu: Gpu, point: Point, *, compiled: bool) -> Row:
    """Time one point."""
    return Row(
        operator=point.operator.name,
        direction=point.direction,
        dtype=point.dtype,
        rows=point.rows,
        width=point.width,
        bytes=point.bytes,
        seconds=gpu.medians(contestants(gpu, point, compiled=compiled), point.sets),
    )


def host_costs(gpu: Gpu, operators: Iterable[Operator]) -> dict[str, dict[str, float]]:
    """Return what a call on one short row costs the host, in seconds."""
    costs = {}
    for operator in operators:
        for direction in DIRECTIONS:
            calls = contestants(gpu, Point(operator, direction, "float32", 1, 1024))
            del calls["copy"]
            costs[f"{operator.name} {direction}"] = {
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
    by_name = {operator.name: operator for operator in OPERATORS}
    try:
        return [by_name[name] for name in names.split(",")]
    except KeyError as unknown:
        raise argparse.ArgumentTypeError(f"{unknown}, expected some of {[*by_name]}") from None


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
