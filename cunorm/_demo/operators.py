# SPDX-License-Identifier: MIT
"""The demo's device and input, and its operators: their calls, and the bytes that these move."""

import math
import pydoc
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

import cunorm
from cunorm import _info, reference
from cunorm._backends.cpu.compiler import has_compiler, search
from cunorm._backends.cpu.threads import thread_count
from cunorm._demo.quantized import dequantized, error_of
from cunorm._row_norm.spec import MODELS
from cunorm.reference.tolerance import Tolerance, bound, exact_of_stream

Array = NDArray[Any]
Operands = Mapping[str, Any]
CUDA_CALLS = 20  # timed together: after a single call the GPU would wait for the host
INPUTS = ("x", "residual", "weight", "bias", "gate")  # of a forward
# The largest magnitude of an input for each dtype: no sum of x * dy * weight overflows.
LARGEST = {"float32": 1e10, "bfloat16": 1e10, "float16": 1e4}
_MAX_ELEMENTS = 1 << 20  # of a user's array: the float64 reference is slow and takes memory
_MEAN = "1e4"  # added to x of one operator
# Operators whose samples each have a row of the parameters, and of the gate.
_MODULATED = ("layer_norm, adaLN", "add_layer_norm, adaLN-Zero", "group_norm, AdaGN")
# The operators shown for a dtype and `is_quick`; a pair that is not listed shows all operators.
_SHOWN = {
    ("float32", True): (
        *("rms_norm", "layer_norm", "add_rms_norm", "group_norm, silu"),
        "rms_norm_quantized",
    ),
    ("bfloat16", True): ("rms_norm",),
    ("float16", True): (),
    ("bfloat16", False): (
        *("rms_norm", "add_rms_norm", "rms_norm, Llama", "group_norm, silu"),
        "rms_norm_quantized",
    ),
    ("float16", False): ("rms_norm", "group_norm, silu"),
}


class DemoError(Exception):
    """The demo cannot run with these options; the text says why."""


class Device(NamedTuple):
    title: str
    library: Any  # NumPy or CuPy
    has_kernels: bool = True  # else NumPy computes all results
    wait: Callable[[], object] = lambda: None  # returns when the device is idle
    calls: int = 1  # timed together

    def placed(self, operands: Operands) -> dict[str, Any]:
        return {name: self.library.asarray(array) for name, array in operands.items()}

    def seconds(self, call: Callable[[], Any]) -> float:
        self.wait()
        start = time.perf_counter()
        for _ in range(self.calls):
            call()
        self.wait()
        return (time.perf_counter() - start) / self.calls


def chosen_device(name: str | None) -> Device:
    """Return the device of a name; by default the current CUDA device if there is one."""
    count, reason = (0, "") if name == "cpu" else _info.cuda_devices()
    if count:
        import cupy

        runtime = cupy.cuda.runtime
        title = f"cuda, {_info.cuda_name(runtime.getDevice())}"
        return Device(title, cupy, wait=runtime.deviceSynchronize, calls=CUDA_CALLS)
    if name == "cuda":
        raise DemoError(f"--device cuda: {reason}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the title says the same
            has_kernels, cxx_problem = has_compiler(), search().cxx_problem
    except ValueError as error:  # CXX is no command
        raise DemoError(str(error)) from error
    threads = f"{thread_count()} thread{'s' if thread_count() > 1 else ''}"
    runs = threads if has_kernels else "NumPy's loops as there is no C++ compiler"
    remark = f" ({cxx_problem})" if cxx_problem else ""
    return Device(f"cpu, {_info.cpu_name()}, {runs}{remark}", np, has_kernels)


def load(path: Path) -> tuple[Array, str]:
    """Read the rows of a .npy file as a float32 or float64 matrix, and describe them."""
    try:
        with path.open("rb") as file:
            array = np.lib.format.read_array(file, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DemoError(f"{path} cannot be read as a .npy file: {error}") from error
    what = f"{path} has an array of shape {array.shape} and dtype {array.dtype}"
    if array.dtype.kind != "f" or array.ndim == 0 or array.size == 0:
        hint = "; if it is bfloat16, save it as float32" if array.dtype.str[1:] == "V2" else ""
        raise DemoError(f"{what}, expected floats in rows along the last axis{hint}")
    rows = array.reshape(-1, array.shape[-1])[: max(1, _MAX_ELEMENTS // array.shape[-1])]
    largest = float(np.abs(rows).max())
    if not largest <= LARGEST["float32"]:
        expected = f"expected finite values of at most {LARGEST['float32']:g}"
        raise DemoError(f"{what} with a largest magnitude of {largest}, {expected}")
    rows = np.ascontiguousarray(rows, np.float32 if rows.dtype.itemsize < 8 else np.float64)
    return rows, f"{path}, {rows.shape[0]} rows of {rows.shape[1]}"


def text(count: int = 2048) -> tuple[Array, str]:
    """Return a row for each of the first `count` bytes of pydoc.py, and what the rows are."""
    path = Path(pydoc.__file__)
    codes = np.frombuffer(path.read_bytes(), np.uint8).astype(np.intp)
    pairs = 256 * codes[:-1] + codes[1:]
    bigrams = np.log1p(np.bincount(pairs, minlength=256 * 256)).reshape(256, 256)
    source = f"Python's {path.name}, its first {count} bytes, each as a row of 256 numbers:\n"
    source += "        how often each byte follows it in the file, as log(1 + count)"
    return bigrams[codes[:count]].astype(np.float32), source


def row_operands(rows: Array, dtype: DTypeLike) -> dict[str, Array]:
    """Return the operands of a row norm: the rows, shifted copies of them, float32 parameters."""
    x, mean_row = reference.round_to(rows, dtype), rows.mean(axis=0, dtype=np.float64)
    gate_scale = min(1.0, 4.0 / max(float(np.abs(rows).max()), 1.0))
    return {
        "x": x,
        "residual": np.roll(x, 1, axis=0),
        "gate": reference.round_to(gate_scale * np.roll(rows, 2, axis=0), dtype),
        "dy": np.roll(x, -1, axis=0),
        "d_residual": np.roll(x, -2, axis=0),
        "weight": (1.0 + mean_row).astype(np.float32),  # not 0 for a column of zeros
        "bias": mean_row.astype(np.float32),
    }


class Operator:
    """A norm with its label in the table and the options of both directions."""

    needs_float8 = False  # dtypes of ml_dtypes

    def __init__(self, label: str, options: Mapping[str, Any]) -> None:
        self.label, self.name, self.options = label, label.partition(",")[0], options
        # The name before `_forward` and `_backward`.
        name = self.name.removeprefix("add_").removesuffix("_quantized")
        self.base = "group_norm" if "num_groups" in options else name
        self.is_gated_branch = options.get("gate_position") == "branch"
        self.eps: float = signature(getattr(cunorm, self.name)).parameters["eps"].default

    def operands(self, rows: Operands) -> dict[str, Any]:
        names = {"dy", *signature(getattr(cunorm, self.name)).parameters}
        names |= {"d_residual"} if "residual" in names else set()
        names -= {"bias"} if "rms_norm" in self.name else set()
        names -= {"gate"} if "gate_position" not in self.options else set()
        operands = {name: array for name, array in rows.items() if name in names}
        is_modulated = self.label in _MODULATED
        if self.base == "group_norm" or is_modulated:
            for name in operands.keys() - {"weight", "bias"}:
                operands[name] = _in_samples(operands[name])
        if is_modulated:
            operands |= self._of_samples(operands)
        if self.base == "group_norm":
            for name in ("x", "dy"):
                samples = np.moveaxis(operands[name], -1, self.options["channel_axis"])
                operands[name] = np.ascontiguousarray(samples)
        if self.label.endswith(_MEAN):  # its deviations from the mean are now in its last digits
            operands["x"] = operands["x"] + operands["x"].dtype.type(_MEAN)
        return operands

    def _of_samples(self, operands: Operands) -> dict[str, Array]:
        """Return parameters, and a gate if there is one, with a row for each sample."""
        is_row, means = self.base != "group_norm", {}
        for name in ("x", "gate") if "gate" in operands else ("x",):
            means[name] = operands[name].mean(axis=1, keepdims=is_row, dtype=np.float64)
        bias = means.pop("x")
        found = means | {"weight": 1.0 + bias, "bias": bias}
        return {name: array.astype(np.float32) for name, array in found.items()}

    def forward(self, module: ModuleType, operands: Operands, name: str = "") -> partial[Any]:
        """Return the forward for training, or the function `name`, as a partial with arguments."""
        name, arguments = name or f"{self.base}_forward", dict(self.options)
        if name == "instance_norm":
            del arguments["num_groups"]
        if module is cunorm:  # with round_before_weight, y would have weight's float32
            arguments["dtype"] = str(operands["x"].dtype)
        arguments |= {name: operands[name] for name in INPUTS if name in operands}
        return partial(getattr(module, name), **arguments)

    def backward(self, module: ModuleType, operands: Operands, saved: Any) -> partial[Any]:
        arguments = {**operands, **self.options, "rstd": saved.rstd}
        if arguments.pop("residual", None) is not None:
            arguments["x"] = saved.residual
        if self.is_gated_branch:
            arguments["branch"] = operands["x"]
        if saved.mean is not None:
            arguments["mean"] = saved.mean
        return partial(getattr(module, f"{self.base}_backward"), **arguments)

    def calls(self, operands: Operands, saved: Any) -> dict[str, partial[Any]]:
        """Return the call of each direction that is timed and checked."""
        forward = self.forward(cunorm, operands, self.name)
        return {"forward": forward, "backward": self.backward(cunorm, operands, saved)}

    def checked(self, direction: str, result: Any, saved: Any) -> list[Any]:
        """Return the results that are compared with the exact ones."""
        return [result, saved] if direction == "forward" else [result]

    def expected(
        self, operands: Operands, stream: Array | None = None
    ) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Yield the exact results of each direction and the errors that kernels may make.

        With a gate on the branch, `stream` is what the call returned.
        """
        options, eps = self.options, self.eps
        if self.base == "l2_norm":  # its eps is added to the sum of squares
            options, eps = {"c": 1.0}, eps / operands["x"].shape[-1]
        if stream is None:
            exact = saved = self._exact(operands)
        else:
            activation = options["gate_activation"]
            exact = exact_of_stream(self._exact, operands, activation, stream)
            saved = exact._replace(residual=stream)
        tolerance = Tolerance(operands, options, eps, exact, stream)
        yield exact, tolerance.forward()
        errors = tolerance.backward(operands["dy"], operands.get("d_residual"))
        yield self.backward(reference, operands, saved)(), errors

    def _exact(self, operands: Operands) -> Any:
        return self.forward(reference, operands)()


class QuantizedOperator(Operator):
    """A norm of x and weight with a quantised result, which has no backward."""

    needs_float8 = True

    def operands(self, rows: Operands) -> dict[str, Any]:
        return {name: rows[name] for name in ("x", "weight")}

    def calls(self, operands: Operands, saved: Any) -> dict[str, partial[Any]]:
        return {"forward": partial(getattr(cunorm, self.name), **operands, **self.options)}

    def checked(self, direction: str, result: Any, saved: Any) -> list[Any]:
        return [dequantized(result)]

    def expected(
        self, operands: Operands, stream: Array | None = None
    ) -> Iterator[tuple[Any, dict[str, Any]]]:
        exact, errors = next(super().expected(operands, stream))
        error = bound(exact.y, errors["y"], str(operands["x"].dtype))
        yield exact, {"y": error_of(exact.y, error)}


def _in_samples(rows: Array) -> Array:
    """Return rows as the positions of at most 16 samples."""
    count, width = rows.shape
    return rows.reshape(math.gcd(count, 16), -1, width)


def bytes_moved(call: partial[Any], result: Any) -> int:
    """Return how many bytes of arguments and results a call must read and write."""
    taken, results = dict(call.keywords), result if isinstance(result, tuple) else (result,)
    if "dy" in taken and not taken.get("activation"):
        taken.pop("bias", None)  # here bias only says that dbias is wanted
    return sum({id(one): getattr(one, "nbytes", 0) for one in (*taken.values(), *results)}.values())


def operators(width: int, dtype: str = "float32", is_quick: bool = False) -> list[Operator]:
    """Return the norms that the table shows for rows of a width and a dtype."""
    scaled, plain = {"center": True, "c": 1.0}, ("rms_norm", "layer_norm", "l2_norm")
    silu = {"num_groups": math.gcd(width, 32), "activation": "silu", "channel_axis": -1}
    modulated = {"weight_offset": 1.0}
    gated = {"gate_activation": "identity", "gate_position": "branch"}
    forms: dict[str, dict[str, Any]] = {
        **{name: {} for name in (*plain, "add_rms_norm", "add_layer_norm")},
        **dict.fromkeys(("normalize", "add_normalize"), scaled),
        **{f"rms_norm, {where}-gate": {"gate_position": where} for where in ("post", "pre")},
        "rms_norm, groups": {"groups": math.gcd(width, 24)},
        **{f"rms_norm, {model}": options for model, options in MODELS.items()},
        "group_norm, silu": silu,
        "group_norm, channels first": silu | {"channel_axis": 1},
        "instance_norm": {"num_groups": width, "channel_axis": -1},
        f"group_norm, mean {_MEAN}": silu,
        **dict(zip(_MODULATED, (modulated, modulated | gated, silu), strict=True)),
        **{"rms_norm_quantized": {}, "layer_norm_quantized": {}, "normalize_quantized": scaled},
    }
    labels = _SHOWN.get((dtype, is_quick), forms.keys())
    return [_kind(form[0])(*form) for form in forms.items() if form[0] in labels]


def _kind(label: str) -> type[Operator]:
    return QuantizedOperator if label.endswith("_quantized") else Operator
