# SPDX-License-Identifier: MIT
"""Arrays of any dtype, strides and alignment, on CPU or GPU, in memory of exactly their size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle
from math import prod
from typing import Any, NamedTuple

import numpy as np

from tests.support.operands import DTYPES

Array = np.ndarray
Shape = tuple[int, ...]
POISON = 0xFF  # bytes of NaNs of every dtype


def _longer_rows(shape: Shape, dtype: np.dtype, padding: int) -> Array:
    return np.empty((*shape[:-1], shape[-1] + padding), dtype)[..., : shape[-1]]


# Layouts of rows with three leading axes.
ROW_LAYOUTS: dict[str, Callable[[Shape, np.dtype], Array]] = {
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
    "expanded": lambda shape, dtype: np.broadcast_to(
        np.empty((shape[0], 1, *shape[2:]), dtype), shape
    ),
}
GROUP_LAYOUTS = ("contiguous", "padded", "misaligned", "reversed", "apart", "expanded")


class Samples(NamedTuple):
    """The shape of a group norm's x, and how its channels and positions lie in memory."""

    samples: int
    spatial: tuple[int, ...]
    channels: int
    groups: int
    channels_last: bool = True  # in memory
    channel_axis: int = -1  # of the shape

    @property
    def shape(self) -> Shape:
        """The shape of x."""
        if self.channel_axis == 1:
            return (self.samples, self.channels, *self.spatial)
        return (self.samples, *self.spatial, self.channels)

    def empty(self, dtype: np.dtype, layout: str) -> Array:
        """Return an array of x's shape in a layout."""
        lines, line = prod(self.spatial), self.channels
        if not self.channels_last:
            lines, line = line, lines
        padding = {"padded": 16, "misaligned": 1}.get(layout, 0)
        samples = 1 if layout == "expanded" else self.samples
        memory = np.empty((samples, lines + (layout == "apart"), line + padding), dtype)
        memory = memory[::-1, ::-1] if layout == "reversed" else memory
        sample, *strides = memory[:, :lines, :line].strides
        position, channel = strides if self.channels_last else reversed(strides)
        later = (prod(self.spatial[axis + 1 :]) for axis in range(len(self.spatial)))
        spatial = [position * size for size in later]
        ordered = [channel, *spatial] if self.channel_axis == 1 else [*spatial, channel]
        sample = 0 if layout == "expanded" else sample
        return np.lib.stride_tricks.as_strided(memory, self.shape, (sample, *ordered))


class Placed:
    """An array that begins `offset` elements after an aligned address, in memory of its size.

    Its shape, strides and dtype are those of `like`. Elements that get no values are poison. There
    is also poison between elements, and in `on.behind` more bytes behind the array.
    """

    def __init__(self, on: Any, like: Array, values: Array | None, offset: int = 0) -> None:
        size = like.itemsize
        steps = [(n - 1) * s for n, s in zip(like.shape, like.strides, strict=True)]
        begin = offset * size - sum(s for s in steps if s < 0)
        end = begin + sum(s for s in steps if s > 0) + size + on.behind
        self.bytes = np.full(end, POISON, np.uint8)
        self.host = np.ndarray(like.shape, like.dtype, self.bytes, begin, like.strides)
        self.host.view(f"u{size}")[...] = 0
        self._between = np.flatnonzero(self.bytes)
        self.host.view(f"u{size}")[...] = ~np.zeros((), f"u{size}")
        if values is not None:
            self.host[...] = values
        self._on, self._raw = on, on.allocate(self.bytes)
        memory, array_type = self._raw, np.ndarray
        if on.is_gpu:
            cuda, array_type = on.cupy.cuda, on.cupy.ndarray
            memory = cuda.UnownedMemory(self._raw.data.ptr, len(self.bytes), self._raw, 0)
            memory = cuda.MemoryPointer(memory, begin)
        start = () if on.is_gpu else (begin,)
        # CuPy makes no arrays of 8-bit floats, but its arrays can be viewed so.
        dtype = np.dtype(np.uint8) if size == 1 else like.dtype
        array = array_type(like.shape, dtype, memory, *start, strides=like.strides)
        self.array = array if size > 1 else array.view(like.dtype)

    def put(self) -> None:
        """Write the contents of `host` again."""
        self._raw[:] = self._on.put(self.bytes)

    def check(self, *, written: bool) -> None:
        """Check that the memory is unchanged; if `written`, only the memory that has no element."""
        raw, part = self._on.get(self._raw), self._between if written else slice(None)
        assert (raw[part] == self.bytes[part]).all(), "a store outside of the results"


def numbers(rng: np.random.Generator, shape: Shape, kind: str) -> Array:
    """Draw numbers: "normal", "quarters" (multiples of 1/4), heavy "tails", "equal" or "zeros"."""
    if kind == "tails":
        return np.clip(rng.standard_t(2, shape), -1000, 1000)
    if kind in ("equal", "zeros"):
        return np.full(shape, rng.standard_normal() if kind == "equal" else 0.0)
    drawn = rng.standard_normal(shape)
    return np.round(drawn * 4) / 4 if kind == "quarters" else drawn


class Draws:
    """Draws operands one after another, with the same numbers in each run; layouts rotate.

    Parameters
    ----------
    empty : callable
        Allocates an array of x's shape, given a dtype and a layout.
    shape : tuple of int
        The shape that is drawn; `pick` reduces it to x's shape.
    columns : int or tuple of int
        The shape of a parameter.
    layouts : tuple
        The layouts of operands like x, in rotation.
    results : tuple, optional
        The layouts of results; by default `layouts`, but no result is expanded.
    values : str
        The kind of `numbers` of operands that are not `near` (see `large`).
    scale : float
        The factor of operands that are not `near`.
    far : bool
        Whether 1e4 is added to operands that are not `near`, before `scale` multiplies them.
    offset : int
        How many elements after a boundary each operand begins.
    pick : callable
        Selects rows or samples of a drawn operand like x.
    """

    def __init__(
        self,
        on: Any,
        empty: Callable[[np.dtype, str], Array],
        shape: Shape,
        columns: int | Shape,
        layouts: tuple[Any, ...],
        *,
        results: tuple[Any, ...] | None = None,
        values: str = "normal",
        scale: float = 1.0,
        far: bool = False,
        offset: int = 0,
        pick: Callable[[Array], Array] = np.asarray,
    ) -> None:
        self._on, self._empty, self._columns, self._offset = on, empty, columns, offset
        self._shape, self._pick = shape, pick
        self._layouts: Iterator[Any] = cycle(layouts)
        self._results = cycle(results) if results else self._layouts
        self._values, self._scale, self._mean = values, scale, 1e4 if far else 0.0
        self._rng = np.random.default_rng(columns)
        self.all: list[Placed] = []

    def large(self, dtype: str | None, *, near: bool = False, scale: float = 1.0) -> Placed | None:
        """Place an operand like x; with `near`, of normal numbers times `scale`."""
        if dtype is None:
            return None
        like = self._empty(DTYPES[dtype], next(self._layouts))
        drawn = numbers(self._rng, self._shape, "normal" if near else self._values)
        drawn = scale * drawn if near else self._scale * (drawn + self._mean)
        values = self._pick(drawn)
        if 0 in like.strides:
            axis = like.strides.index(0)
            values = values.take([0], axis)
        return self._keep(like, values.astype(DTYPES[dtype]))

    def param(
        self,
        dtype: str | None,
        mean: float = 0.0,
        shape: Shape | None = None,
        pick: Callable[[Array], Array] = np.asarray,
    ) -> Placed | None:
        """Place an operand like weight, or what `pick` returns of one of a shape."""
        if dtype is None:
            return None
        drawn = mean + 0.5 * self._rng.standard_normal(self._columns if shape is None else shape)
        return self.values(pick(drawn).astype(DTYPES[dtype]))

    def values(self, array: Array | None) -> Placed | None:
        """Place an array with given values."""
        return None if array is None else self._keep(np.empty(array.shape, array.dtype), array)

    def result(self, dtype: str) -> Placed:
        """Place an array for a result like x; it is contiguous if its layout would be expanded."""
        layout = next(self._results)
        layout = "contiguous" if layout == "expanded" else layout
        return self._keep(self._empty(DTYPES[dtype], layout), None)

    def statistic(self, array: Array) -> Placed:
        """Place an array for a result of the shape and dtype of `array`."""
        return self._keep(np.empty(array.shape, array.dtype), None)

    def workspace(self, size: int) -> Placed:
        """Place a workspace of a size in bytes; it begins at a multiple of 16."""
        like = np.empty(max(1, -(-size // 16)) * 16, np.uint8)
        placed = Placed(self._on, like, None, 16 * self._offset)
        self.all.append(placed)
        return placed

    def _keep(self, like: Array, values: Array | None) -> Placed:
        placed = Placed(self._on, like, values, self._offset)
        self.all.append(placed)
        return placed
