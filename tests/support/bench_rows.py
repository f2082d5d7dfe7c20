# SPDX-License-Identifier: MIT
"""Rows of timings made by hand, for the tests of what is drawn from them."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

from bench import grid
from bench.rows import Row, write_csv

PLAIN = ("rms_norm", "layer_norm")
GATED = ("rms_norm+post_gate", "rms_norm+pre_gate")
DIRECTIONS = ("forward", "backward")
DTYPES = ("float32", "bfloat16")


def row(
    provider: str,
    p50_us: float,
    operator: str = "rms_norm",
    direction: str = "forward",
    dtype: str = "float32",
    shape: str = "4096x4096",
    memory: str = "",
    **others: object,
) -> Row:
    bytes_moved = 2 * math.prod(map(int, shape.split("x"))) * (4 if dtype == "float32" else 2)
    values = {
        "date": "2026-11-20",
        "commit": "abc1234",
        "device": "A CPU, 2 cores",
        "driver": "",
        "versions": "cunorm 0.1.0; torch 2.13.0",
        "threads": 2,
        "p20_us": p50_us,
        "p80_us": p50_us,
        "gb_per_s": bytes_moved / p50_us / 1e3,
        "of_copy": 1.0,
        "host_us": None,
        "error": None,
    }
    point = {"operator": operator, "memory": memory, "direction": direction, "dtype": dtype}
    time = {"shape": shape, "provider": provider, "bytes": bytes_moved, "p50_us": p50_us}
    return Row(**(values | point | time | others))


def rows_of_a_run(torch: float, copy: float, ungated: float) -> list[Row]:
    """Return every operator of the goals at two shapes, cunorm at 100 µs and the others as given.

    Those of group norms have both orders of axes and no ungated time.
    """
    rows = []
    for operator, direction, dtype in itertools.product(
        [*PLAIN, *GATED, "group_norm+silu"], DIRECTIONS, DTYPES
    ):
        norm = operator.startswith("group_norm")
        shapes = ("2x320x64x64", "4x128x97x63") if norm else ("4096x4096", "65536x256")
        for memory, shape in itertools.product(("NHWC", "NCHW") if norm else ("",), shapes):
            times = {"cunorm": 100.0, "torch": torch, "copy": copy}
            if operator in GATED:
                times["cunorm-ungated"] = ungated
            rows += [
                row(provider, time, operator, direction, dtype, shape, memory)
                for provider, time in times.items()
            ]
    return rows


def rows_of_the_grid(torch: float, copy: float, ungated: float) -> list[Row]:
    """Return the whole default grid of a CPU, with such times."""
    rows = []
    for point in grid.default_points("cpu", grid.DEFAULT_OPERATORS):
        times = {"cunorm": 100.0, "torch": torch, "copy": copy}
        if point.operator.gate_position:
            times["cunorm-ungated"] = ungated
        what = point.operator.name, point.direction, point.dtype, point.shape_text
        rows += [row(name, time, *what, point.operator.memory) for name, time in times.items()]
    return rows


def written(path: Path, rows: list[Row]) -> Path:
    """Write rows into a file, and return where that is."""
    write_csv(path, rows)
    return path
