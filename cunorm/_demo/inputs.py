# SPDX-License-Identifier: MIT
"""The demo's real input: a user's array, or a text that every Python installation has."""

import pydoc
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from cunorm._demo.device import DemoError
from cunorm.reference import round_to

Array = NDArray[Any]

_MAX_ELEMENTS = 1 << 22  # of a user's array: the float64 reference is slow
_LARGEST_GATE = 4.0
# Of the input, by dtype, so that sums of x * dy * weight do not overflow.
LARGEST = {"float32": 1e10, "bfloat16": 1e10, "float16": 1e4}


def load(path: Path) -> tuple[Array, str]:
    """Read the rows of a .npy file, as a float32 or float64 matrix, and say what they are."""
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
    largest, most = float(np.abs(rows).max()), LARGEST["float32"]
    if not largest <= most:
        what += f" with a largest magnitude of {largest}"
        raise DemoError(f"{what}, expected finite values of at most {most:g}")
    rows = np.ascontiguousarray(rows, np.float32 if rows.dtype.itemsize < 8 else np.float64)
    return rows, f"{path}, {rows.shape[0]} rows of {rows.shape[1]}"


def text(count: int = 2048) -> tuple[Array, str]:
    """Return rows of numbers for the first bytes of a text that comes with Python.

    A row is that of its byte in the text's matrix of log(1 + count), where count is how often each
    other byte follows it.
    """
    path = Path(pydoc.__file__)
    codes = np.frombuffer(path.read_bytes(), np.uint8).astype(np.intp)
    pairs = 256 * codes[:-1] + codes[1:]
    bigrams = np.log1p(np.bincount(pairs, minlength=256 * 256)).reshape(256, 256)
    source = f"Python's {path.name}, its first {count} bytes, each as a row of 256 numbers:\n"
    source += "        how often each byte follows it in the file, as log(1 + count)"
    return bigrams[codes[:count]].astype(np.float32), source


def row_operands(rows: Array, dtype: DTypeLike) -> dict[str, Array]:
    """Return the operands of a row norm, made of the rows and their neighbours.

    The parameters are float32, as in training, and the weight has no zeros.
    """
    x, mean_row = round_to(rows, dtype), rows.mean(axis=0, dtype=np.float64)
    gate_scale = min(1.0, _LARGEST_GATE / max(float(np.abs(rows).max()), 1.0))
    return {
        "x": x,
        "residual": np.roll(x, 1, axis=0),
        "gate": round_to(gate_scale * np.roll(rows, 2, axis=0), dtype),
        "dy": np.roll(x, -1, axis=0),
        "d_residual": np.roll(x, -2, axis=0),
        "weight": (1.0 + mean_row).astype(np.float32),
        "bias": mean_row.astype(np.float32),
    }
