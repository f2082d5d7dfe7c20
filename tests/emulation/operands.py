# SPDX-License-Identifier: MIT
"""Operands for tests of the row norms: of any dtype, strides and distribution."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cunorm import reference
from cunorm._dtypes import DTYPES, numpy_dtype
from cunorm._plan import Team

from .kernels import compute_type

Array = np.ndarray
WIDTHS = (1, 2, 31, 33, 127, 128, 1000, 4096, 5003, 16384, 65536)
EPS = 1e-5

# A width for each kind of team, with columns left over; for operands of float32 and bfloat16.
# A GPU streams wider rows than these, with more threads: that takes longer and differs in nothing.
FAMILIES = {
    "warp teams": (100, None),
    "block team": (3100, None),
    "streamed": (3100, Team(threads=128, threads_per_row=128, pack=4, packs=0)),
}

# Where x's rows are, by the strides of three leading axes: how to make an array of that shape with
# nothing in it. Padding by 16 elements leaves rows aligned, by one it does not.
LAYOUTS: dict[str, Callable[[tuple[int, ...], np.dtype], Array]] = {
    "contiguous": lambda shape, dtype: np.empty(shape, dtype),
    "padded": lambda shape, dtype: _longer_rows(shape, dtype, 16),
    "two strides": lambda shape, dtype: _more_rows(shape, dtype),
    "transposed": lambda shape, dtype: np.empty((*shape[2::-1], shape[3]), dtype).transpose(
        2, 1, 0, 3
    ),
    "reversed": lambda shape, dtype: np.empty(shape, dtype)[::-1, ::-1, ::-1],
    "misaligned": lambda shape, dtype: _longer_rows(shape, dtype, 1),
}


def _longer_rows(shape: tuple[int, ...], dtype: np.dtype, padding: int) -> Array:
    return np.empty((*shape[:3], shape[3] + padding), dtype)[..., : shape[3]]


def _more_rows(shape: tuple[int, ...], dtype: np.dtype) -> Array:
    return np.empty((*shape[:2], shape[2] + 1, shape[3]), dtype)[:, :, : shape[2]]


def empty(shape: tuple[int, ...], dtype: str, layout: str = "contiguous") -> Array:
    """Return an array of the layout; "expanded", for inputs, is taken as contiguous."""
    make = LAYOUTS.get(layout, LAYOUTS["contiguous"])
    return make(shape, numpy_dtype(DTYPES[dtype]))


def spread(values: Array, dtype: str, layout: str = "contiguous") -> Array:
    """Return values of shape [a, b, c, width] in the layout.

    "expanded" repeats the rows of b = 0 for all of b, with stride 0.
    """
    if layout == "expanded":
        first = np.ascontiguousarray(values[:, :1]).astype(numpy_dtype(DTYPES[dtype]))
        return np.broadcast_to(first, values.shape)
    array = empty(values.shape, dtype, layout)
    array[...] = values
    return array


class Operands:
    """Draws operands of one shape, one after the other.

    Parameters
    ----------
    shape : tuple of int
        Three leading axes, then the width.
    far : bool
        Rows have mean 1e4 and deviation 1, where they would have mean 0.
    """

    def __init__(self, shape: tuple[int, ...], far: bool = False, seed: int = 0) -> None:
        self.shape = shape
        self._mean = 1e4 if far else 0.0
        self._rng = np.random.default_rng([seed, *shape])

    def rows(self, dtype: str, layout: str = "contiguous", *, far: bool | None = None) -> Array:
        """Return an operand like x."""
        mean = self._mean if far is None else 1e4 * far
        return spread(mean + self._rng.standard_normal(self.shape), dtype, layout)

    def param(self, dtype: str) -> Array:
        """Return an operand like weight."""
        return self._rng.standard_normal(self.shape[-1]).astype(numpy_dtype(DTYPES[dtype]))


def statistics(x: Array, *, center: bool, x_dtype: str | None = None) -> dict[str, Array]:
    """Return mean and rstd as the forward would have saved them; no mean unless center."""
    exact = reference.normalize_forward(x, center=center, eps=EPS)
    compute = numpy_dtype(compute_type(str(x.dtype), x_dtype))
    saved = {"rstd": exact.rstd.astype(compute)}
    return saved | ({"mean": exact.mean.astype(compute)} if center else {})
