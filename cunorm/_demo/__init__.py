# SPDX-License-Identifier: MIT
"""`python -m cunorm demo`: every operator on real input, checked against the float64 oracle."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import cunorm
from cunorm import _info
from cunorm._backends.cpu.compiler import compiler
from cunorm._backends.cpu.threads import available_cores, thread_count
from cunorm._core.dtypes import DTYPES, numpy_dtype
from cunorm._demo import data
from cunorm._demo.data import Array, DemoError
from cunorm._demo.operators import Operands, Operator, operators_of

__all__ = ["DemoError", "run"]

Case = tuple[Operator, Operands]  # with operands in host memory

_HEADER = (
    f"{'operator':30} {'shape':>12} {'dtype':8} {'device':6} {'time, us':>9} {'GB/s':>6} "
    "worst error / tolerance"
)
_REPEATS = 10  # of a time
_CUDA_CALLS = 20  # timed together, or the GPU would wait for the host


class Device(NamedTuple):
    """Where the operators run."""

    name: str
    title: str
    put: Callable[[Array], Any]  # copies an array to it
    get: Callable[[Any], Array]  # and from it
    wait: Callable[[], object]  # returns when it is idle
    calls: int  # timed together


def run(path: Path | None, device_name: str | None) -> int:
    """Print the table; return 1 if an error is above its tolerance, else 0."""
    device = _chosen_device(device_name)
    if path is None:
        name, content = data.text()
        rows = data.embedded(content)
        source = f"{name}, {len(content)} bytes, the first {len(rows)} embedded by their bigrams"
    else:
        rows = data.load(path)
        source = f"{path}, {rows.shape[0]} rows of {rows.shape[1]}"
    print(f"input: {source}\ndevice: {device.title}")
    cases = list(_cases(rows))
    if device.name == "cuda" or compiler() is not None:
        print("compiling, which takes a while the first time", flush=True)
        with ThreadPoolExecutor(available_cores()) as pool:  # several at once
            list(pool.map(lambda case: case[0].run(_put(case[1], device)), cases))
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


def _chosen_device(name: str | None) -> Device:
    """Return the device of a name; by default CUDA's current one where there is one."""
    count, reason = (0, "") if name == "cpu" else _info.cuda_devices()
    if count:
        import cupy

        runtime = cupy.cuda.runtime
        title = f"cuda, {_info.cuda_name(runtime.getDevice())}"
        copies = (cupy.asarray, cupy.asnumpy)
        return Device("cuda", title, *copies, runtime.deviceSynchronize, _CUDA_CALLS)
    if name == "cuda":
        raise DemoError(f"--device cuda: {reason}")
    means = f"{thread_count()} threads"
    if compiler() is None:
        means = "NumPy's loops as there is no C++ compiler"
    title = f"cpu, {_info.cpu_name()}, {means}"
    return Device("cpu", title, np.asarray, np.asarray, lambda: None, calls=1)


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
    operands = _put(host, device)
    results = operator.run(operands)
    moved = operator.moved_bytes(operands, results)
    errors = operator.errors(host, _fetched(results, device))
    calls = (
        (str(operator), lambda: operator.forward(cunorm, operands, operator.name)),
        (f"{operator}, backward", lambda: operator.backward(cunorm, operands, results.saved)),
    )
    for (label, call), size, error in zip(calls, moved, errors, strict=True):
        seconds = _seconds(call, device)
        yield (
            f"{label:30} {shape:>12} {x.dtype!s:8} {device.name:6} {1e6 * seconds:9.1f} "
            f"{size / seconds / 1e9:6.1f} {error:.3f}{'' if error <= 1 else '  WRONG'}",
            error,
        )


def _put(operands: Operands, device: Device) -> dict[str, Any]:
    return {name: device.put(array) for name, array in operands.items()}


def _fetched(result: Any, device: Device) -> Any:
    """Copy an array, or the arrays of a named tuple, from a device."""
    if isinstance(result, tuple):
        return type(result)(*(_fetched(one, device) for one in result))
    return None if result is None else device.get(result)


def _seconds(call: Callable[[], Any], device: Device) -> float:
    """Return the shortest of several times of a call, with the host's part."""
    times = []
    for _ in range(_REPEATS):
        device.wait()
        start = time.perf_counter()
        for _ in range(device.calls):
            call()
        device.wait()
        times.append((time.perf_counter() - start) / device.calls)
    return min(times)
