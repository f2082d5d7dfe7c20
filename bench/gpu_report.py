# SPDX-License-Identifier: MIT
"""What the GPU timings are written as: a CSV, and a text that names the machine."""

from __future__ import annotations

import csv
import datetime
import math
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import cunorm

COLUMNS = ("copy", "cupy", "torch", "peer", "compiled")


@dataclass(frozen=True)
class Row:
    """The medians of one point, in seconds a call, by contestant; a contestant may be missing."""

    operator: str
    direction: str
    dtype: str
    shape: str
    bytes: int
    seconds: dict[str, float]

    @property
    def best(self) -> float:
        """The time of cunorm: the GPU's work is the same from CuPy and from torch."""
        return min(self.seconds[name] for name in ("cupy", "torch") if name in self.seconds)

    @property
    def of_copy(self) -> float:
        """The speed as a fraction of that of a copy of the same bytes."""
        return self.seconds["copy"] / self.best

    @property
    def speedup(self) -> float:
        """How many times faster than the faster of torch's own; NaN where torch did not run."""
        peers = [self.seconds[name] for name in ("peer", "compiled") if name in self.seconds]
        return min(peers, default=math.nan) / self.best


def write_csv(path: Path, rows: Iterable[Row]) -> None:
    """Write one line for each point, times in microseconds."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        header = ["operator", "direction", "dtype", "shape", "bytes"]
        header += [f"{name}_us" for name in COLUMNS]
        writer.writerow([*header, "GB_per_s", "fraction_of_copy", "speedup_over_torch"])
        for row in rows:
            point = [row.operator, row.direction, row.dtype, row.shape, row.bytes]
            times = [f"{1e6 * row.seconds.get(name, math.nan):.2f}" for name in COLUMNS]
            rate = f"{row.bytes / row.best / 1e9:.0f}"
            writer.writerow([*point, *times, rate, f"{row.of_copy:.3f}", f"{row.speedup:.3f}"])


def timing_table(rows: Sequence[Row]) -> str:
    """Return the points as a table, and geometric means by direction and dtype."""
    lines = [
        "µs a call on the GPU: copy = device-to-device copy of the same bytes; cupy, torch =",
        "cunorm on such arrays; peer = torch's own operations; compiled = torch.compile of them.",
        "The last three columns are of cunorm's better time, × peer against the faster of the two.",
        "NHWC: channels last in memory, where shapes are samples×channels×height×width.",
        "",
        f"{'operator':20} {'direction':9} {'dtype':9} {'shape':>14} "
        + " ".join(f"{name:>8}" for name in COLUMNS)
        + f" {'GB/s':>6} {'% copy':>7} {'× peer':>7}",
    ]
    for row in rows:
        times = " ".join(f"{1e6 * row.seconds.get(name, math.nan):8.1f}" for name in COLUMNS)
        lines.append(
            f"{row.operator:20} {row.direction:9} {row.dtype:9} {row.shape:>14} {times}"
            f" {row.bytes / row.best / 1e9:6.0f} {100 * row.of_copy:7.1f} {row.speedup:7.2f}"
        )
    lines += ["", "Geometric means:"]
    for direction, dtype in sorted({(row.direction, row.dtype) for row in rows}):
        chosen = [row for row in rows if (row.direction, row.dtype) == (direction, dtype)]
        of_copy = geometric_mean([row.of_copy for row in chosen])
        speedup = geometric_mean([row.speedup for row in chosen])
        means = f"{100 * of_copy:6.1f} % of copy, {speedup:5.2f} × peer"
        lines.append(f"{direction:9} {dtype:9} {means}")
    return "\n".join(lines)


def geometric_mean(values: Sequence[float]) -> float:
    """Return the geometric mean of positive values."""
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def host_cost_table(costs: dict[str, dict[str, float]]) -> str:
    """Return what a call costs the host, in µs, by operation and contestant."""
    lines = ["Host cost of a call on 1×1024 float32, of a group norm's on 1×64×4×4, µs:"]
    for operation, by_name in costs.items():
        cells = "  ".join(f"{name} {1e6 * seconds:6.1f}" for name, seconds in by_name.items())
        lines.append(f"{operation:29} {cells}")
    return "\n".join(lines)


def versions(cupy: Any, torch: Any | None) -> str:
    """Name the machine and the software, one line each."""
    from cunorm import _cuda

    properties = cupy.cuda.runtime.getDeviceProperties(0)
    runtime = cupy.cuda.runtime
    facts = {
        "device": properties["name"].decode(),
        "L2": f"{properties['l2CacheSize'] / 2**20:.0f} MiB",
        "driver": driver(),
        "CUDA driver API": runtime.driverGetVersion(),
        "NVRTC": ".".join(map(str, _cuda.nvrtc_version())),
        "cunorm": cunorm.__version__,
        "CuPy": cupy.__version__,
        "torch": getattr(torch, "__version__", "not with CUDA"),
        "NumPy": np.__version__,
        "Python": platform.python_version(),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }
    return "\n".join(f"{name}: {value}" for name, value in facts.items())


def driver() -> str:
    """Return the version of the NVIDIA driver."""
    return _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def commit() -> str:
    """Return the source tree's commit, $CUNORM_COMMIT where it came without its history."""
    return os.environ.get("CUNORM_COMMIT") or _output("git", "describe", "--always", "--dirty")


def _output(program: str, *arguments: str) -> str:
    found = shutil.which(program)
    if found is None:
        return "unknown"
    run = subprocess.run([found, *arguments], capture_output=True, text=True, check=False)
    return run.stdout.strip() if run.returncode == 0 else "unknown"
