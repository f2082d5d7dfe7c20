# SPDX-License-Identifier: MIT
"""`python -m cunorm demo`: every operator on real input, checked against the float64 oracle."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

import cunorm
from cunorm._core.dtypes import DTYPES, numpy_dtype
from cunorm._demo import data
from cunorm._demo.data import Array, DemoError
from cunorm._demo.devices import Case, Device, chosen_device
from cunorm._demo.operators import Results, operators_of

__all__ = ["DemoError", "run"]

_HEADER = (
    f"{'operator':30} {'shape':>12} {'dtype':8} {'device':6} {'time, us':>9} {'GB/s':>6} "
    "worst error / tolerance"
)


def run(path: Path | None, device_name: str | None) -> int:
    """Print the table; return 1 if an error is above its tolerance, else 0."""
    device = chosen_device(device_name)
    if path is None:
        name, content = data.text()
        rows = data.embedded(content)
        source = f"{name}, {len(content)} bytes, the first {len(rows)} embedded by their bigrams"
    else:
        rows = data.load(path)
        source = f"{path}, {rows.shape[0]} rows of {rows.shape[1]}"
    print(f"input: {source}\ndevice: {device}")
    cases = list(_cases(rows))
    if device.can_compile():
        print("compiling, which takes a while the first time", flush=True)
        device.prepare(cases)
    print(f"\n{_HEADER}", flush=True)
    wrong = count = 0
    for case in cases:
        for line, error in _both_directions(case, device):
            print(line, flush=True)
            count += 1
            wrong += not error <= 1
    if wrong:
        print(f"\n{wrong} of {count} results are further off than their tolerance")
    else:
        print(f"\nall {count} results are within their tolerance")
    return 1 if wrong else 0


def _cases(rows: Array) -> Iterator[Case]:
    """Yield the operators, with operands of each dtype that can hold the input."""
    for dtype, largest in data.LARGEST.items():
        if not np.abs(rows).max() <= largest:
            print(f"{dtype} is left out: the input has values beyond {largest:g}")
            continue
        try:
            storage = numpy_dtype(DTYPES[dtype])
        except TypeError:
            print(f"{dtype} is left out: pip install ml_dtypes")
            continue
        operands = data.operands(rows, storage)
        for operator in operators_of(dtype, rows.shape[-1]):
            yield operator, operator.operands(operands)


def _both_directions(case: Case, device: Device) -> Iterator[tuple[str, float]]:
    """Run, check and time an operator; yield line and error of its forward and its backward."""
    operator, host = case
    x, shape = host["x"], "x".join(map(str, host["x"].shape))
    operands = {name: device.put(array) for name, array in host.items()}
    results = operator.run(operands)
    moved = operator.moved_bytes(operands, results)
    errors = operator.errors(host, Results(*map(device.get_all, results)))
    calls = (
        (str(operator), lambda: operator.apply(operands)),
        (f"{operator}, backward", lambda: operator.backward(cunorm, operands, results.saved)),
    )
    for (label, call), size, error in zip(calls, moved, errors, strict=True):
        seconds = device.seconds(call)
        yield (
            f"{label:30} {shape:>12} {x.dtype!s:8} {device.name:6} {1e6 * seconds:9.1f} "
            f"{size / seconds / 1e9:6.1f} {error:.3f}{'' if error <= 1 else '  WRONG'}",
            error,
        )
