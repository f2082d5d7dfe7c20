# SPDX-License-Identifier: MIT
"""`python -m cunorm demo`: every operator on real input, checked against the float64 oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import cunorm
from cunorm._demo import _data
from cunorm._demo._cases import Case, Inputs, cases_of
from cunorm._demo._data import Array, DemoError
from cunorm._demo._devices import Device, chosen_device
from cunorm._core.dtypes import BFLOAT16, FLOAT16, FLOAT32, DType, numpy_dtype

__all__ = ["DemoError", "run"]


@dataclass(frozen=True)
class _Row:
    """A line of the table."""

    operator: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    seconds: float
    bytes: int
    error: float  # 1 is the tolerance

    HEADER = (
        f"{'operator':30} {'shape':>12} {'dtype':8} {'device':6} {'time, us':>9} {'GB/s':>6} "
        "worst error / tolerance"
    )

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape))
        return (
            f"{self.operator:30} {shape:>12} {self.dtype:8} {self.device:6} "
            f"{1e6 * self.seconds:9.1f} {self.bytes / self.seconds / 1e9:6.1f} "
            f"{self.error:.3f}{'' if self.error <= 1 else '  WRONG'}"
        )


def run(path: Path | None, device_name: str | None) -> int:
    """Print the table, and return 1 if a result is further off than its tolerance, else 0."""
    device = chosen_device(device_name)
    if path is None:
        name, content = _data.text()
        rows = _data.embedded(content)
        source = f"{name}, {len(content)} bytes, the first {len(rows)} embedded by their bigrams"
    else:
        rows = _data.load(path)
        source = f"{path}, {rows.shape[0]} rows of {rows.shape[1]}"
    print(f"input: {source}\ndevice: {device}")
    inputs = _inputs(rows)
    if device.can_compile():
        print("compiling, which takes a while the first time", flush=True)
    device.prepare(inputs)
    print(f"\n{_Row.HEADER}", flush=True)
    wrong = count = 0
    for row in _table(device, inputs):
        print(row, flush=True)
        count += 1
        wrong += not row.error <= 1
    if wrong:
        print(f"\n{wrong} of {count} results are further off than their tolerance")
    else:
        print(f"\nall {count} results are within their tolerance")
    return 1 if wrong else 0


def _inputs(rows: Array) -> Inputs:
    """Return the operands for every dtype that can hold the input."""
    inputs = {}
    for dtype in (FLOAT32, BFLOAT16, FLOAT16):
        largest = _data.LARGEST[dtype.name]
        if not np.abs(rows).max() <= largest:
            print(f"{dtype} is left out: the input has values beyond {largest:g}")
        elif dtype is BFLOAT16 and not _has_bfloat16():
            print("bfloat16 is left out: pip install ml_dtypes")
        else:
            inputs[dtype] = _data.operands(rows, numpy_dtype(dtype))
    return inputs


def _has_bfloat16() -> bool:
    try:
        numpy_dtype(BFLOAT16)
    except TypeError:
        return False
    return True


def _table(device: Device, inputs: Inputs) -> Iterator[_Row]:
    for dtype, rows in inputs.items():
        for case in cases_of(dtype, rows):
            yield from _both_ways(case, dtype, device)


def _both_ways(case: Case, dtype: DType, device: Device) -> Iterator[_Row]:
    """Run, check and time an operator forward and backward."""
    operator, host = case
    operands = {name: device.put(array) for name, array in host.items()}

    def fetched(result: Any) -> Any:
        arrays = (None if array is None else device.get(array) for array in result)
        return type(result)(*arrays)

    def row(label: str, call: Callable[[], Any], moved: int, error: float) -> _Row:
        seconds = device.seconds(call)
        return _Row(label, host["x"].shape, dtype.name, device.name, seconds, moved, error)

    y, saved, grads = operator.run(operands)
    on_host = fetched(y) if isinstance(y, tuple) else device.get(y)
    oracle = operator.oracle(host)
    yield row(
        str(operator),
        lambda: operator.apply(operands),
        operator.forward_bytes(operands, y),
        oracle.forward_error(on_host, fetched(saved)),
    )
    yield row(
        f"{operator}, backward",
        lambda: operator.backward(cunorm, operands, saved),
        operator.backward_bytes(operands, saved, grads),
        oracle.backward_error(fetched(grads)),
    )
