# SPDX-License-Identifier: MIT
"""Arrays for the row norms under emulation: of any dtype, strides and distribution."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cunorm import reference
from cunorm._dtypes import numpy_dtype
from cunorm._teams import Team
from tests.support.operands import DTYPES

from .kernels import compute_type

Array = np.ndarray
Shape = tuple[int, ...]  # three leading axes, then the width, of all groups together
EPS = 1e-5

# A width for each kind of team, with columns left over, for float32 and bfloat16. A GPU streams
# wider rows than these, and with more threads: that takes longer and differs in nothing else.
FAMILIES = {
    "warp teams": (100, None),
    "block team": (3100, None),
    "cluster": (3100, Team(threads=64, threads_per_row=256, pack=4, packs=4)),
    "streamed": (3100, Team(threads=128, threads_per_row=128, pack=4, packs=0)),
}


def _longer_rows(shape: Shape, dtype: np.dtype, padding: int) -> Array:
    return np.empty((*shape[:3], shape[3] + padding), dtype)[..., : shape[3]]


# Arrays with nothing in them yet, by the strides of their leading axes.
LAYOUTS: dict[str, Callable[[Shape, np.dtype], Array]] = {
    "contiguous": np.empty,
    "padded": lambda shape, dtype: _longer_rows(shape, dtype, 16),  # rows stay aligned
    "misaligned": lambda shape, dtype: _longer_rows(shape, dtype, 1),
    "reversed": lambda shape, dtype: np.empty(shape, dtype)[::-1, ::-1, ::-1],
    "two strides": lambda shape, dtype: np.empty((*shape[:2], shape[2] + 1, shape[3]), dtype)[
        :, :, :-1
    ],
    "transposed": lambda shape, dtype: np.empty((shape[2], *shape[:2], shape[3]), dtype).transpose(
        1, 2, 0, 3
    ),
    "three strides": lambda shape, dtype: np.empty((*shape[2::-1], shape[3]), dtype).transpose(
        2, 1, 0, 3
    ),
}


def input_layouts(groups: int) -> tuple[str, ...]:
    """Return the layouts of inputs; groups are one stride more, and the kernels take three."""
    names = (*LAYOUTS, "expanded")
    return names if groups == 1 else tuple(name for name in names if name != "three strides")


def empty(shape: Shape, dtype: str, layout: str = "contiguous") -> Array:
    """Return an array for results; none can be expanded."""
    return LAYOUTS["contiguous" if layout == "expanded" else layout](shape, DTYPES[dtype])


def spread(values: Array, dtype: str, layout: str = "contiguous") -> Array:
    """Return values in a layout; "expanded" repeats those at 0 of the second axis, stride 0."""
    if layout == "expanded":
        first = np.ascontiguousarray(values[:, :1]).astype(DTYPES[dtype])
        return np.broadcast_to(first, values.shape)
    array = empty(values.shape, dtype, layout)
    array[...] = values
    return array


class Operands:
    """Draws operands of one shape, one after the other; the same ones each time.

    Parameters
    ----------
    shape : tuple of int
        Three leading axes, then the width.
    far : bool
        Whether rows have mean 1e4, else 0; their deviation is 1.
    """

    def __init__(self, shape: Shape, *, far: bool = False) -> None:
        self.shape = shape
        self._mean = 1e4 if far else 0.0
        self._rng = np.random.default_rng(shape)

    def rows(self, dtype: str, layout: str = "contiguous", *, near: bool = False) -> Array:
        """Return an operand like x; `near`: of mean 0 in any case."""
        mean = 0.0 if near else self._mean
        return spread(mean + self._rng.standard_normal(self.shape), dtype, layout)

    def param(self, dtype: str) -> Array:
        """Return an operand like weight, of all groups."""
        return self._rng.standard_normal(self.shape[-1]).astype(DTYPES[dtype])


def saved(x: Array, *, x_dtype: str | None = None, **options) -> dict[str, Array]:
    """Return what a forward saves for the backward: mean, where there is center, and rstd.

    The options are keyword arguments of cunorm.normalize, those that the statistics depend on among
    them.
    """
    exact = reference.normalize_forward(x, eps=EPS, **options)
    compute = numpy_dtype(compute_type(str(x.dtype), x_dtype))
    statistics = {"rstd": exact.rstd.astype(compute)}
    return statistics | ({} if exact.mean is None else {"mean": exact.mean.astype(compute)})
