# SPDX-License-Identifier: MIT
"""`python -m cunorm demo`: every operator on real input, checked against the float64 oracle."""

import sysconfig
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

import cunorm
from cunorm import _info
from cunorm._backends.cpu import waiting
from cunorm._backends.cpu.compiler import compiler
from cunorm._backends.cpu.threads import available_cores, thread_count
from cunorm._core.dtypes import DTYPES, numpy_dtype
from cunorm._demo.operators import Operands, Operator, operators_of
from cunorm.reference import round_to

Array = NDArray[Any]
Case = tuple[Operator, Operands]  # with operands in host memory

_HEADER = (
    f"{'operator':30} {'shape':>12} {'dtype':8} {'device':6} {'time, us':>9} {'GB/s':>6} "
    "worst error / tolerance"
)
_REPEATS = 10  # of a time
_CUDA_CALLS = 20  # timed together, or the GPU would wait for the host
_ROWS = 4096  # of the text
_TEXTS = ("pydoc_data/topics.py", "LICENSE.txt", "typing.py", "os.py")
_MOST_ELEMENTS = 1 << 22  # of a user's array: the float64 reference is slow
_LARGEST_GATE = 4.0
# Of the input, by dtype, so that sums of x * dy * weight do not overflow.
LARGEST = {"float32": 1e10, "bfloat16": 1e10, "float16": 1e4}


class DemoError(Exception):
    """The demo cannot run with these options; the text says why."""


def run(path: Path | None, device_name: str | None) -> int:
    """Print the table; return 1 if an error is above its tolerance, else 0."""
    device = _chosen_device(device_name)
    if path is None:
        name, content = text()
        rows = embedded(content)
        source = f"{name}, {len(content)} bytes, the first {len(rows)} embedded by their bigrams"
    else:
        rows = load(path)
        source = f"{path}, {rows.shape[0]} rows of {rows.shape[1]}"
    print(f"input: {source}\ndevice: {device.title}")
    cases = list(_cases(rows))
    if device.name == "cuda" or compiler() is not None:
        print("compiling, which takes a while the first time", flush=True)
        waiting.is_announced.set()
        with ThreadPoolExecutor(available_cores()) as pool:  # several at once
            list(pool.map(lambda case: case[0].run(device.put_all(case[1])), cases))
    print(f"\n{_HEADER}", flush=True)
    errors = [error for case in cases for error in _both_directions(*case, device)]
    if wrong := sum(not error <= 1 for error in errors):
        print(f"\n{wrong} of {len(errors)} results are further off than their tolerance")
    else:
        print(f"\nall {len(errors)} results are within their tolerance")
    return 1 if wrong else 0


def _cases(rows: Array) -> Iterator[Case]:
    """Yield the operators, with operands of each dtype that can hold the input."""
    for dtype, largest in LARGEST.items():
        if not np.abs(rows).max() <= largest:
            print(f"{dtype} is left out: the input has values beyond {largest:g}")
            continue
        try:
            storage = numpy_dtype(DTYPES[dtype])
        except TypeError:
            print(f"{dtype} is left out: pip install ml_dtypes")
            continue
        operands = row_operands(rows, storage)
        for operator in operators_of(dtype, rows.shape[-1]):
            yield operator, operator.operands(operands)


def _both_directions(operator: Operator, host: Operands, device: "Device") -> Iterator[float]:
    """Run, check and time an operator; print and yield the errors of forward and backward."""
    x, shape = host["x"], "x".join(map(str, host["x"].shape))
    operands = device.put_all(host)
    results = operator.run(operands)
    moved = operator.moved_bytes(operands, results)
    errors = operator.errors(host, _fetched(results, device))
    calls = (
        (str(operator), lambda: operator.forward(cunorm, operands, operator.name)),
        (f"{operator}, backward", lambda: operator.backward(cunorm, operands, results.saved)),
    )
    for (label, call), size, error in zip(calls, moved, errors, strict=True):
        seconds = _seconds(call, device)
        print(
            f"{label:30} {shape:>12} {x.dtype!s:8} {device.name:6} {1e6 * seconds:9.1f} "
            f"{size / seconds / 1e9:6.1f} {error:.3f}{'' if error <= 1 else '  WRONG'}",
            flush=True,
        )
        yield error


# --- real input: a user's array, or a text that every Python installation has ---------------------


def load(path: Path) -> Array:
    """Read the rows of a .npy file, as a float32 or float64 matrix."""
    try:
        with path.open("rb") as file:
            array = np.lib.format.read_array(file, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DemoError(f"{path} cannot be read as a .npy file: {error}") from error
    what = f"{path} has an array of shape {array.shape} and dtype {array.dtype}"
    if array.dtype.kind != "f" or array.ndim == 0 or array.size == 0:
        raise DemoError(f"{what}, expected floats in rows along the last axis")
    rows = array.reshape(-1, array.shape[-1])[: max(1, _MOST_ELEMENTS // array.shape[-1])]
    largest = np.abs(rows).max()
    if not largest <= LARGEST["float32"]:
        raise DemoError(
            f"{what} with a largest magnitude of {largest}, expected finite values of at most "
            f"{LARGEST['float32']:g}"
        )
    return np.ascontiguousarray(rows, np.float32 if rows.dtype.itemsize < 8 else np.float64)


def text() -> tuple[str, bytes]:
    """Return the name and the bytes of a text of this Python installation."""
    folder = Path(sysconfig.get_path("stdlib"))
    for name in _TEXTS:
        if (folder / name).is_file():
            return name, (folder / name).read_bytes()
    raise DemoError(f"{folder} has none of {', '.join(_TEXTS)}: name an array by --input")


def embedded(content: bytes, rows: int = _ROWS) -> Array:
    """Return the rows of the log-bigram-count matrix of a text, for each of its first bytes.

    Row a has log(1 + count) for each byte b, where count is how often b follows a in the text.
    """
    codes = np.frombuffer(content, np.uint8).astype(np.intp)
    pairs = 256 * codes[:-1] + codes[1:]
    bigrams = np.log1p(np.bincount(pairs, minlength=256 * 256)).reshape(256, 256)
    return bigrams[codes[:rows]].astype(np.float32)


def row_operands(rows: Array, dtype: DTypeLike) -> dict[str, Array]:
    """Return the operands of a row norm, made of the rows and their neighbours.

    The residual stream is the row before, the gate the one before that, scaled down to a gate's
    range if need be. The gradients are the two rows after. The parameters are float32, as in
    training: the bias is the mean row, and the weight is 1 more, so that it has no zeros.
    """
    x = round_to(rows, dtype)
    mean_row = rows.mean(axis=0, dtype=np.float64)
    scale = min(1.0, _LARGEST_GATE / max(float(np.abs(rows).max()), 1.0))
    return {
        "x": x,
        "residual": np.roll(x, 1, axis=0),
        "gate": round_to(scale * np.roll(rows, 2, axis=0), dtype),
        "dy": np.roll(x, -1, axis=0),
        "d_residual": np.roll(x, -2, axis=0),
        "weight": (1.0 + mean_row).astype(np.float32),
        "bias": mean_row.astype(np.float32),
    }


# --- devices --------------------------------------------------------------------------------------


class Device(NamedTuple):
    """Where the operators run."""

    name: str
    title: str
    put: Callable[[Array], Any]  # copies an array to it
    get: Callable[[Any], Array]  # and from it
    wait: Callable[[], object]  # returns when it is idle
    calls: int  # timed together

    def put_all(self, operands: Operands) -> dict[str, Any]:
        return {name: self.put(array) for name, array in operands.items()}


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
    loops = "NumPy's loops as there is no C++ compiler"
    title = f"cpu, {_info.cpu_name()}, {f'{thread_count()} threads' if compiler() else loops}"
    return Device("cpu", title, np.asarray, np.asarray, lambda: None, calls=1)


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
