# SPDX-License-Identifier: MIT
"""Errors of norms with quantised results, and of quantised arrays where they cannot be.

Each error names the function, the argument, what was given and what is expected; nothing is
written.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cunorm
from cunorm import NormForward, QuantizedNorm
from tests.support.operands import at
from tests.support.quantized import CODES

E4M3, E8M0 = CODES["float8_e4m3fn"], np.dtype(ml_dtypes.float8_e8m0fnu)
FUNCTIONS = ("rms_norm_quantized", "layer_norm_quantized", "normalize_quantized")
TYPE, VALUE = TypeError, ValueError
X = np.ones((4, 64), np.float32)
Q = np.zeros((4, 64), E4M3)
Error = tuple[dict[str, Any], type[Exception], str]

FORMATS = "expected float8_e4m3fn, float8_e5m2 or int8"
SCALES = "expected float32 or float8_e8m0fnu"
POSITIVE = "expected a positive normal number of float32"
BLOCKS = "expected None, 32, 64 or 128"
ARRAY = "expected a NumPy, CuPy, PyTorch or JAX array or another object with __dlpack__"
OF_ROWS = "expected (4, 1), one number for each row, or a single number"
FOLLOWED = "expected contiguous rows and at most three leading axes that no single stride walks"
OWN = "with which elements may share memory, expected memory of its own for each element"


def ones(*shape: int, dtype: Any = np.float32) -> Any:
    return np.ones(shape, dtype)


def of_options() -> list[Error]:
    """Return errors of dtype, block, scale_dtype, absmax_bound, return_y and a number as scale."""
    wrong = ("float8", "e4m3", "INT8", "float8_e4m3fnuz", "float8_e8m0fnu", None, 3, b"int8", float)
    found = [({"dtype": one}, TYPE, f"dtype is {one!r}, {FORMATS}") for one in wrong]
    for one in (np.float32, np.uint8, ml_dtypes.float8_e4m3):
        found.append(({"dtype": one}, TYPE, f"dtype is {np.dtype(one).name}, {FORMATS}"))
    for one in ("float16", "e8m0", None, 1):
        found.append(({"scale_dtype": one}, TYPE, f"scale_dtype is {one!r}, {SCALES}"))
    found += [({"block": one}, VALUE, f"block is {one}, {BLOCKS}") for one in (0, 16, 127, -32)]
    for one in (True, 32.0, "32", (32,)):
        found.append(({"block": one}, TYPE, f"block is {one!r}, expected an int"))
    for name in ("scale", "absmax_bound"):
        for one in (0, -1.0, np.inf, np.nan, 1e-39, 1e39):
            found.append(({name: one}, VALUE, f"{name} is {one!r}, {POSITIVE}"))
        for one in ("1", True):
            found.append(({name: one}, TYPE, f"{name} is {one!r}, expected a number"))
    for one in (1, None, np.True_):
        found.append(({"return_y": one}, TYPE, f"return_y is {one!r}, expected True or False"))
    return found


def of_scales() -> list[Error]:
    """Return errors of arrays as scale."""
    found: list[Error] = []
    for shape in ((4,), (1, 4), (4, 64), (4, 1, 1), (3, 1), (4, 2), (0,)):
        found.append(({"scale": ones(*shape)}, VALUE, f"scale has shape {shape}, {OF_ROWS}"))
    for dtype in (np.float64, np.float16, np.int32, E8M0):
        text = f"scale has dtype {np.dtype(dtype).name}, expected float32"
        found.append(({"scale": ones(4, 1, dtype=dtype)}, TYPE, text))
    for one in ([1.0], (1.0,), 1j):
        text = f"scale is of type {type(one).__name__}, {ARRAY}"
        found.append(({"scale": one}, TYPE, text))
    return found


def of_combinations() -> list[Error]:
    """Return errors of options that do not go together, and of blocks of rows without them."""
    found: list[Error] = []
    for scale in (1.0, ones(1)):
        for name, value, default in (
            ("block", 32, None),
            ("scale_dtype", "float8_e8m0fnu", "float32"),
            ("absmax_bound", 1.0, None),
        ):
            text = f"{name} is {value}, expected {default} as scale is given: leave it out"
            found.append(({"scale": scale, name: value}, VALUE, text))
        given = {"scale": scale, "out": QuantizedNorm(scale=ones(4, 1))}
        found.append((given, VALUE, "out.scale is given, expected None: scale is given"))
    text = "scale_dtype is float8_e8m0fnu, expected float32 as dtype is int8: leave it out"
    found.append(({"dtype": "int8", "scale_dtype": E8M0}, VALUE, text))
    wide = "block is 32 for float64, expected x and its residual stream in a narrower type"
    found.append(({"block": 32, "x": X.astype(np.float64)}, TYPE, wide))
    found.append(({"block": 32, "residual": X.astype(np.float64)}, TYPE, wide))
    found.append(({"block": 32, "residual": X, "residual_dtype": "float64"}, TYPE, wide))
    for columns, groups in ((66, 1), (84, 2)):
        text = f"block is 32 for rows of {columns // groups} elements, expected a multiple of 4"
        found.append(({"block": 32, "x": ones(4, columns), "groups": groups}, VALUE, text))
    text = "scale is 1e+38, expected at most 2**126 as dtype is int8: y is multiplied by 1 / scale"
    found.append(({"dtype": "int8", "scale": 1e38}, VALUE, text))
    given = {"block": 32, "x": ones(2, 4, 64), "axis": -2}
    found.append((given, VALUE, "block is 32, expected axis -1 with it"))
    return found


def of_results() -> list[Error]:
    """Return errors of given results."""
    read_only = np.zeros_like(Q)
    read_only.flags.writeable = False
    arrays: list[tuple[str, Any, type[Exception], str]] = [
        ("q", Q.view(np.int8), VALUE, "has dtype int8, expected float8_e4m3fn, that of dtype"),
        ("q", X, TYPE, "has dtype float32, expected float8_e4m3fn, float8_e5m2 or int8"),
        ("q", Q.view(np.uint8), TYPE, "has dtype uint8, expected float8_e4m3fn, "),
        ("q", Q[:, :63].copy(), VALUE, "has shape (4, 63), expected (4, 64)"),
        ("q", np.zeros((64, 4), E4M3).T, VALUE, f"has strides (1, 4), {FOLLOWED}"),
        ("q", np.zeros((4, 128), E4M3)[:, ::2], VALUE, f"has strides (128, 2), {FOLLOWED}"),
        ("q", np.broadcast_to(Q[:1], (4, 64)), VALUE, f"has strides (0, 1), {OWN}"),
        ("q", read_only, VALUE, "cannot be written to in place, expected a writable"),
        ("q", [1], TYPE, f"is of type list, {ARRAY}"),
        ("scale", ones(4), VALUE, "has shape (4,), expected (4, 1)"),
        ("scale", ones(1, 1), VALUE, "has shape (1, 1), expected (4, 1)"),
        ("scale", ones(4, 2), VALUE, "has shape (4, 2), expected (4, 1)"),
        ("scale", np.broadcast_to(ones(1, 1), (4, 1)), VALUE, f"has strides (0, 0), {OWN}"),
        ("scale", ones(4, 1, dtype=np.float64), TYPE, "has dtype float64, expected float32 or"),
        (
            "scale",
            ones(4, 1, dtype=E8M0),
            VALUE,
            "has dtype float8_e8m0fnu, expected float32, that",
        ),
        ("scale", 1.0, TYPE, f"is of type float, {ARRAY}"),
        ("y", X.astype(np.float16), VALUE, "has dtype float16, expected float32, that of x and"),
        ("y", Q, TYPE, "has dtype float8_e4m3fn, expected float16, bfloat16, float32 or float64"),
    ]
    found = [
        ({"out": QuantizedNorm(**{name: array})}, error, f"out.{name} {text}")
        for name, array, error, text in arrays
    ]
    for one in ((Q,), NormForward(), Q):
        text = f"out is of type {type(one).__name__}, expected a QuantizedNorm of arrays and Nones"
        found.append(({"out": one}, TYPE, text))
    apart = np.zeros((3, 3, 3, 3, 1), np.float32)[::2, ::2, ::2, ::2]
    given = {"x": ones(2, 2, 2, 2, 64), "out": QuantizedNorm(scale=apart)}
    found.append((given, VALUE, "out.scale has strides (54, 18, 6, 2, 1), expected at most three"))
    return found


def of_inputs() -> list[Error]:
    """Return errors of quantised arrays as inputs."""
    found: list[Error] = []
    for name in ("x", "weight", "bias", "residual", "gate"):
        array = Q[0] if name in ("weight", "bias") else Q
        text = f"{name} has dtype float8_e4m3fn, expected float16, bfloat16, float32 or float64: "
        text += f"pass a dequantised array, {name}.astype('float32') times its scale"
        found.append(({name: array}, TYPE, text))
    return found


ERRORS = {
    "options": of_options(),
    "scales": of_scales(),
    "combinations": of_combinations(),
    "results": of_results(),
    "inputs": of_inputs(),
}


def check(function: str, given: dict[str, Any], error: type[Exception], text: str) -> None:
    """Check the beginning of an error's message, and that no array is written."""
    arrays = given | {"x": given.get("x", X)}
    out = given.get("out")
    results = out._asdict() if isinstance(out, tuple) and hasattr(out, "_asdict") else {}
    kept = {k: a for k, a in (arrays | results).items() if isinstance(a, np.ndarray)}
    before = {name: array.tobytes() for name, array in kept.items()}
    with at(function, text), pytest.raises(error) as caught:
        getattr(cunorm, function)(**arrays)
    assert type(caught.value) is error
    assert str(caught.value).startswith(f"{function}: {text}"), str(caught.value)
    assert {name: array.tobytes() for name, array in kept.items()} == before


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("errors", ERRORS.values(), ids=ERRORS)
def test_wrong_input_is_named_and_nothing_is_written(errors, function):
    getattr(cunorm, function)(X)
    for given, error, text in errors:
        check(function, given, error, text)


ELSEWHERE = {
    "rms_norm": ({"x": Q}, "x has dtype float8_e4m3fn"),
    "layer_norm": ({"x": Q.view(np.int8)}, "x has dtype int8"),
    "l2_norm": ({"x": X, "out": Q}, "out has dtype float8_e4m3fn"),
    "rms_norm_forward": ({"x": X, "out": NormForward(y=Q)}, "out.y has dtype float8_e4m3fn"),
    "layer_norm_forward": (
        {"x": X, "out": NormForward(rstd=Q[:, 0].copy())},
        "out.rstd has dtype float8_e4m3fn",
    ),
    "group_norm": ({"x": X, "num_groups": 4, "out": Q.view(np.int8)}, "out has dtype int8"),
    "rms_norm_backward": (
        {"dy": Q, "x": X, "rstd": X[:, 0].copy()},
        "dy has dtype float8_e4m3fn",
    ),
}


@pytest.mark.parametrize("function", ELSEWHERE)
def test_other_norms_take_and_give_no_quantised_arrays(function):
    given, text = ELSEWHERE[function]
    expected = f"{text}, expected float16, bfloat16, float32 or float64"
    with pytest.raises(TypeError, match=f"^{function}: {expected}"):
        getattr(cunorm, function)(**given)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "int8"])
def test_other_norms_have_no_results_of_quantised_dtypes(name):
    expected = f"is '{name}', expected float16, bfloat16, float32 or float64"
    with pytest.raises(TypeError, match=f"^rms_norm: dtype {expected}"):
        cunorm.rms_norm(X, dtype=name)
    with pytest.raises(TypeError, match=f"^add_rms_norm: residual_dtype {expected}"):
        cunorm.add_rms_norm(X, X, residual_dtype=name)
