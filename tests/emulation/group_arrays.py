# SPDX-License-Identifier: MIT
"""Arrays for the group norms under emulation: of any dtype, memory layout and strides."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided

from cunorm import reference
from cunorm.group_norm._builds import GroupTypes
from cunorm.group_norm._tiling import Samples, Tiling, _pack, _power_of_two
from tests.support.operands import DTYPES

Array = np.ndarray
EPS = 1e-5

LAYOUTS = ("contiguous", "padded", "misaligned", "reversed", "apart")
INPUT_LAYOUTS = (*LAYOUTS, "expanded")
_PADDING = {"padded": 16, "misaligned": 1}  # of a line, in elements


class Grid(NamedTuple):
    """The shape of x, and how its channels and positions lie in memory."""

    samples: int
    spatial: tuple[int, ...]
    channels: int
    channels_last: bool = True  # in memory
    channel_axis: int = -1  # of the shape

    @property
    def positions(self) -> int:
        return prod(self.spatial)

    @property
    def shape(self) -> tuple[int, ...]:
        if self.channel_axis == 1:
            return (self.samples, self.channels, *self.spatial)
        return (self.samples, *self.spatial, self.channels)

    def empty(self, dtype: str, layout: str = "contiguous") -> Array:
        """Return an array with nothing in it yet, in a layout; for results none is "expanded"."""
        lines, line = self.positions, self.channels
        if not self.channels_last:
            lines, line = line, lines
        padded = line + _PADDING.get(layout, 0)
        memory = np.empty((self.samples, lines + (layout == "apart"), padded), DTYPES[dtype])
        memory = memory[::-1, ::-1] if layout == "reversed" else memory
        return self._view(memory[:, :lines, :line])

    def spread(self, values: Array, dtype: str, layout: str = "contiguous") -> Array:
        """Return values in a layout; "expanded" repeats the first sample, with stride 0."""
        if layout != "expanded":
            array = self.empty(dtype, layout)
            array[...] = values
            return array
        one = self._replace(samples=1).spread(values[:1], dtype)
        return np.broadcast_to(one, self.shape)

    def _view(self, memory: Array) -> Array:
        """Return memory in the kernel's order of axes as an array of x's shape."""
        sample, *strides = memory.strides
        position, channel = strides if self.channels_last else reversed(strides)
        later = (prod(self.spatial[axis + 1 :]) for axis in range(len(self.spatial)))
        spatial = [position * size for size in later]
        ordered = [channel, *spatial] if self.channel_axis == 1 else [*spatial, channel]
        return as_strided(memory, self.shape, (sample, *ordered))


class Operands:
    """Draws operands of one shape, one after the other; the same ones each time.

    With `far`, x has mean 1e4, else 0; its deviation is 1.
    """

    def __init__(self, grid: Grid, *, far: bool = False) -> None:
        self.grid = grid
        self._mean = 1e4 if far else 0.0
        self._rng = np.random.default_rng((grid.samples, grid.positions, grid.channels))

    def x(self, dtype: str, layout: str = "contiguous") -> Array:
        return self.grid.spread(self._mean + self._normal(self.grid.shape), dtype, layout)

    def dy(self, dtype: str, layout: str = "contiguous") -> Array:
        return self.grid.spread(self._normal(self.grid.shape), dtype, layout)

    def param(self, dtype: str | None) -> Array | None:
        """Return an operand like weight, None without a dtype."""
        return None if dtype is None else self._normal(self.grid.channels).astype(DTYPES[dtype])

    def _normal(self, shape: tuple[int, ...] | int) -> Array:
        return self._rng.standard_normal(shape)


def saved(x: Array, num_groups: int, channel_axis: int = -1) -> dict[str, Array]:
    """Return what a forward saves for the backward: mean and rstd."""
    exact = reference.group_norm_forward(x, num_groups, eps=EPS, channel_axis=channel_axis)
    compute = np.float64 if x.dtype == np.float64 else np.float32
    return {"mean": exact.mean.astype(compute), "rstd": exact.rstd.astype(compute)}


def small_tiling(types: GroupTypes, where: Samples) -> Tiling:
    """Return tiles that are a small part of a small sample: 64 threads have two packs each.

    With channels last a tile has few of the channels, and one thread may be left over; with
    channels first a channel has one thread, some of a warp, or two warps.
    """
    pack = _pack(types, where.channels if where.channels_last else where.positions)
    if where.channels_last:
        channel_threads = min(where.channels // pack, 3)
        return Tiling(64, channel_threads, 64 // channel_threads, pack, 2)
    position_threads = min(64, _power_of_two(-(-where.positions // pack)))
    return Tiling(64, 64 // position_threads, position_threads, pack, 2)


class Family(NamedTuple):
    """A kind of plan: a sample that it is the plan of, and what a GroupPlan is told for it."""

    grid: Grid
    groups: int
    plan: Mapping[str, Any] = MappingProxyType({})
    passes: int = 1  # launches of a forward

    def of(self, samples: int) -> Grid:
        """Return the shape of so many samples."""
        return self.grid._replace(samples=samples)


_SMALL = {"tiling": small_tiling}
_FIRST = {"channels_last": False, "channel_axis": 1}
FAMILIES = {
    "last, one launch": Family(Grid(1, (9, 7), 40), 5),
    "last, one launch, groups together": Family(Grid(1, (31,), 36), 12),
    "last, three launches": Family(Grid(1, (50,), 80), 16, _SMALL, 3),
    "first, one launch, in a warp": Family(Grid(1, (5,), 9, **_FIRST), 3),
    "first, one launch, in warps": Family(Grid(1, (9, 31), 6, **_FIRST), 2),
    "first, three launches, in a warp": Family(Grid(1, (15,), 6, **_FIRST), 2, _SMALL, 3),
    "first, three launches, in warps": Family(Grid(1, (7, 43), 6, **_FIRST), 3, _SMALL, 3),
}
