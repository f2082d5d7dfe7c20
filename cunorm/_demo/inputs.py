# SPDX-License-Identifier: MIT
"""The demo's real input: a user's array, or a text that every Python installation has."""

import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from cunorm._demo.device import DemoError
from cunorm.reference import round_to

Array = NDArray[Any]

_ROWS = 2048  # of the text
_TEXTS = ("pydoc_data/topics.py", "LICENSE.txt", "typing.py", "os.py")
_MOST_ELEMENTS = 1 << 22  # of a user's array: the float64 reference is slow
_LARGEST_GATE = 4.0
# Of the input, by dtype, so that sums of x * dy * weight do not overflow.
LARGEST = {"float32": 1e10, "bfloat16": 1e10, "float16": 1e4}


def load(path: Path) -> Array:
    """Read the rows of a .npy file, as a float32 or float64 matrix."""
    try:
        with path.open("rb") as file:
            array = np.lib.format.read_array(file, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DemoError(f"{path} cannot be read as a .npy file: {error}") from error
    what = f"{path} has an array of shape {array.shape} and dtype {array.dtype}"
    if array.dtype.kind != "f" or array.ndim == 0 or array.size == 0:
        hint = "; if it is bfloat16, save it as float32" if array.dtype.str[1:] == "V2" else ""
        raise DemoError(f"{what}, expected floats in rows along the last axis{hint}")
    rows = array.reshape(-1, array.shape[-1])[: max(1, _MOST_ELEMENTS // array.shape[-1])]
    largest = float(np.abs(rows).max())
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
