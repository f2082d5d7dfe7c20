# SPDX-License-Identifier: MIT
"""How the channels and positions of x lie in memory, read off its shape and strides."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import NamedTuple

from cunorm._arrays import Form, contiguous_form
from cunorm._dtypes import DType
from cunorm._layout import collapsed, is_contiguous
from cunorm.group_norm._calls import Lines
from cunorm.group_norm._tiling import Samples

_LIMIT = 2**31


class GroupGeometry(NamedTuple):
    """How x falls into samples, positions and groups of channels."""

    shape: tuple[int, ...]
    where: Samples
    axes: tuple[int, ...]  # of x, in the kernel's order: samples, then what it calls lines
    result_axes: tuple[int, ...]  # of results, from the outermost in memory

    @property
    def channel_shape(self) -> tuple[int, ...]:
        """Return the shape of weight and bias."""
        return (self.where.channels,)

    @property
    def statistic_shape(self) -> tuple[int, ...]:
        """Return the shape of mean and rstd."""
        return (self.where.samples, self.where.groups)

    def lines(self, form: Form) -> Lines | None:
        """Return where the lines of an array of x's shape are, None where kernels cannot follow."""
        return _lines(in_order(form, self.axes), self.where.channels_last)

    def result(self, dtype: DType, form: Form) -> Form:
        """Return the form of a new result: dense, in the memory layout of x."""
        axes = self.result_axes
        dense = contiguous_form(tuple(self.shape[axis] for axis in axes), dtype, form.device)
        return in_order(dense, back(axes))


def in_order(form: Form, axes: tuple[int, ...]) -> Form:
    """Return the form of the same memory with its axes in another order."""
    shape, strides = (tuple(of[axis] for axis in axes) for of in form[:2])
    return form._replace(shape=shape, strides=strides)


def back(axes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the order that undoes an order of axes."""
    return tuple(axes.index(axis) for axis in range(len(axes)))


@lru_cache(maxsize=1024)
def geometry(function: str, x: Form, num_groups: int | None, channel_axis: int) -> GroupGeometry:
    """Return the samples of x, None groups being as many as channels.

    The memory layout is the one that the strides of x fit, else the nearer one; where that is
    either, the one that channel_axis names.
    """
    shape, ndim = x.shape, len(x.shape)
    if channel_axis not in (-1, 1):
        raise ValueError(f"{function}: channel_axis is {channel_axis}, expected -1 or 1")
    if ndim < 2:
        raise ValueError(
            f"{function}: x has shape {shape}, expected at least two axes: samples and channels"
        )
    last, first = _orders(ndim, channel_axis)
    channels, positions = shape[last[-1]], prod(shape[axis] for axis in last[1:-1])
    if not 0 < channels < _LIMIT or not positions:
        raise ValueError(
            f"{function}: x has shape {shape}: {channels} channels (channel_axis {channel_axis}) "
            f"of {positions} positions, expected 1 to 2147483647 channels of at least one position"
        )
    num_groups = channels if num_groups is None else num_groups
    if num_groups < 1 or channels % num_groups:
        raise ValueError(
            f"{function}: num_groups is {num_groups}, expected a divisor of {channels}, the number "
            "of channels"
        )
    fits_last, fits_first = (
        _lines(in_order(x, axes), axes_are_last) is not None
        for axes, axes_are_last in ((last, True), (first, False))
    )
    if fits_last != fits_first:
        channels_last = results_last = fits_last
    else:
        nearer = None if fits_last else _nearer_to_last(x, last)
        results_last = channel_axis == -1 if nearer is None else nearer
        # The memory of one position or of one channel is the same: longer lines are faster.
        same = positions == 1 or channels == 1
        channels_last = positions == 1 if same else results_last
    result_axes = last if results_last else first
    where = Samples(shape[0], positions, channels, num_groups, channels_last)
    return GroupGeometry(shape, where, last if channels_last else first, result_axes)


def _nearer_to_last(x: Form, last: tuple[int, ...]) -> bool | None:
    """Whether the channels of an array that fits neither layout lie closer than its positions."""
    (_, *sizes, _), (_, *strides, channel) = in_order(x, last)[:2]
    closest = min(
        (abs(s) for s, n in zip(strides, sizes, strict=True) if n > 1), default=abs(channel)
    )
    return None if closest == abs(channel) else abs(channel) < closest


def _orders(ndim: int, channel_axis: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the axes of x with channels last, and with channels first."""
    channel = channel_axis % ndim
    spatial = tuple(axis for axis in range(1, ndim) if axis != channel)
    return (0, *spatial, channel), (0, channel, *spatial)


def _lines(form: Form, channels_last: bool) -> Lines | None:
    """Return the strides of samples and of lines, of an array in the kernel's order of axes."""
    shape, strides = form.shape, form.strides
    lines = (shape[1:-1], strides[1:-1]) if channels_last else (shape[1:2], strides[1:2])
    line = (shape[-1:], strides[-1:]) if channels_last else (shape[2:], strides[2:])
    axes = collapsed(*lines)
    if not is_contiguous(*line) or len(axes) > 1:
        return None
    return (strides[0] if shape[0] > 1 else 0), (axes[0][1] if axes else 0)
