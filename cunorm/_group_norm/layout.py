# SPDX-License-Identifier: MIT
"""The layout of channels and positions in memory, which follows from the shape and strides of x."""

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from cunorm._core import validate
from cunorm._core.calls import CallGeometry, check_operand
from cunorm._core.dtypes import DType, compute_type
from cunorm._core.operands import Kind, Slot
from cunorm._core.param_grad import Parts, axes_map
from cunorm._core.tensor import (
    WHOLE,
    RowAxes,
    Shape,
    TensorSpec,
    collapsed,
    is_contiguous,
)

LINE = 16  # rows of channels are padded to a multiple of so many elements
_LIMIT = 2**31

Lines = tuple[int, int]  # the strides from sample to sample and from line to line, in elements


class Samples(NamedTuple):
    """The sizes of x."""

    samples: int
    positions: int
    channels: int
    groups: int
    channels_last: bool  # the layout in memory

    @property
    def elements(self) -> int:
        return prod(self[:3])

    @property
    def group_channels(self) -> int:
        return self.channels // self.groups

    @property
    def pitch(self) -> int:
        """Return the elements from one row of channels to the next, like `sum_pitch` in C++."""
        return -(-self.channels // LINE) * LINE


@dataclass(frozen=True)
class GroupGeometry(CallGeometry):
    """The division of x into samples, positions and groups of channels."""

    float64_source = "x"
    absent, absent_parameter = (0, 0), (0,)

    sizes: Samples
    axes: tuple[int, ...]  # the axes of x in the kernel's order: samples, lines, elements of a line
    result_axes: tuple[int, ...]  # the axes of new results like x, the outermost in memory first

    def copy_axes(self, kind: Kind, shape: Shape) -> tuple[int, ...] | None:
        return self.axes if kind is Kind.LIKE_X else None

    def shape_of(self, kind: Kind) -> Shape:
        if kind is Kind.STATISTIC:
            return (self.sizes.samples, self.sizes.groups)
        return self.shape if kind is Kind.LIKE_X else (self.sizes.channels,)

    def fits(self, slot: Slot, shape: Shape) -> bool:
        if slot.kind is not Kind.PARAMETER:
            return super().fits(slot, shape)
        samples, channels = self.sizes.samples, self.sizes.channels
        return shape in ((channels,), (1, channels), (samples, channels))

    def hint(self, kind: Kind) -> str:
        if kind is Kind.PARAMETER:
            channel = self.axes[-1 if self.sizes.channels_last else 1]
            own = (self.sizes.samples, self.sizes.channels)
            per_channel = f", one for each channel, {_size_of(channel, len(self.shape))}"
            return f"{per_channel}, or {own}, a row for each sample"
        like_x, statistic = ", the shape of x", ", one element for each group of each sample"
        return like_x if kind is Kind.LIKE_X else statistic

    def remedies(self, argument: str, shape: Shape) -> list[str]:
        rows = (self.sizes.samples, self.sizes.channels)
        is_of_rows = tuple(size for size in shape if size != 1) == rows
        return [f"pass {argument}.reshape{rows}"] if is_of_rows else []

    def layout(self, spec: TensorSpec) -> Lines | None:
        return _lines(spec.permuted(self.axes), self.sizes.channels_last)

    def parameter_layout(self, spec: TensorSpec) -> tuple[int] | None:
        """Return the stride from sample to sample; 0 if all samples share a row."""
        rows = RowAxes(len(spec.shape) - 1).layout(spec)
        return rows and (rows.inner_stride,)

    def parts_of(self, parameter: Shape, parts: int) -> Parts:
        """Return which rows of sums a parameter's gradient adds up; a sample has `parts` rows."""
        rows, summands = 1, self.sizes.samples * parts
        if parameter[:-1] == (self.sizes.samples,):
            rows, summands = self.sizes.samples, parts
        return Parts(rows, summands, axes_map([(rows, parts)]), axes_map([(summands, 1)]))

    def check_output(
        self, function: str, argument: str, kind: Kind, spec: TensorSpec, shape: Shape
    ) -> None:
        if kind is not Kind.PARAMETER:
            check_operand(function, argument, Slot("", argument, kind, True), spec, self)
        if kind is not Kind.LIKE_X:
            validate.output(function, argument, spec, shape, WHOLE)
            return
        validate.own_memory(function, argument, spec)
        if self.sizes.elements and self.layout(spec) is None:
            layout = "channels last" if self.sizes.channels_last else "channels first"
            raise ValueError(
                f"{function}: {argument} has strides {spec.strides}, expected the memory layout of "
                f"x, {layout}, with one stride for all of its lines"
            )

    def new_output(self, x: TensorSpec, kind: Kind, dtype: DType, shape: Shape) -> TensorSpec:
        if kind is Kind.LIKE_X:
            return x._replace(dtype=dtype).dense(self.result_axes)
        return super().new_output(x, kind, dtype, shape)


def group_geometry(
    function: str, x: TensorSpec, num_groups: int | None, channel_axis: int
) -> GroupGeometry:
    """Return the geometry of x; without num_groups, each channel is a group.

    If the strides of x fit only one memory layout, x has that layout. If they fit neither, x is
    copied: channels or positions, whichever lie closer together, come last. In case of a tie, or if
    the strides fit both layouts, channel_axis decides.
    """
    shape, ndim = x.shape, len(x.shape)
    if ndim < 2:
        raise ValueError(
            f"{function}: x has shape {shape}, expected at least two axes: samples and channels"
        )
    channel = _channel(function, channel_axis, shape)
    spatial = tuple(axis for axis in range(1, ndim) if axis != channel)
    last, first = (0, *spatial, channel), (0, channel, *spatial)
    channels, positions = shape[channel], prod(shape[axis] for axis in spatial)
    if not 0 < channels < _LIMIT or not positions:
        raise ValueError(
            f"{function}: x has shape {shape}: {channels} channels (channel_axis {channel_axis}) "
            f"of {positions} positions, expected 1 to 2147483647 channels of at least one position"
        )
    num_groups = channels if num_groups is None else num_groups
    if num_groups < 1 or channels % num_groups:
        raise ValueError(
            f"{function}: num_groups is {num_groups}, expected a divisor of {channels}, the number "
            f"of channels, {_size_of(channel, ndim)}"
        )
    fits_last = _lines(x.permuted(last), channels_last=True) is not None
    fits_first = _lines(x.permuted(first), channels_last=False) is not None
    if fits_last != fits_first:
        channels_last = results_last = fits_last
    else:
        nearer = None if fits_last else _nearer_to_last(x, last)
        results_last = channel == ndim - 1 if nearer is None else nearer
        # With one position or one channel, both layouts are the same; longer lines are faster.
        same = positions == 1 or channels == 1
        channels_last = positions == 1 if same else results_last
    result_axes = last if results_last else first
    sizes = Samples(shape[0], positions, channels, num_groups, channels_last)
    axes = last if channels_last else first
    return GroupGeometry(shape, compute_type(x.dtype), sizes, axes, result_axes)


def _channel(function: str, channel_axis: int, shape: Shape) -> int:
    """Return which axis of x has the channels, counted from its first axis."""
    last = len(shape) - 1
    *allowed, final = dict.fromkeys((-1, 1, last, -last))
    if channel_axis not in (*allowed, final):
        raise ValueError(
            f"{function}: channel_axis is {channel_axis}, expected "
            f"{', '.join(map(str, allowed))} or {final} for x of shape {shape}"
        )
    return channel_axis % len(shape)


def _size_of(channel: int, ndim: int) -> str:
    """Return, for an error, which axis has the number of channels."""
    if channel < ndim - 1:
        return "x.shape[1] (channel_axis=-1 is for channels last)"
    hint = " (channel_axis=1 is for channels first)" if ndim > 2 else ""
    return f"x.shape[-1]{hint}"


def _nearer_to_last(x: TensorSpec, last: tuple[int, ...]) -> bool | None:
    """Return whether channels lie closer together than positions, or None if equally close."""
    (_, *sizes, _), (_, *strides, channel) = x.permuted(last)[:2]
    closest = min(
        (abs(s) for s, n in zip(strides, sizes, strict=True) if n > 1), default=abs(channel)
    )
    return None if closest == abs(channel) else abs(channel) < closest


def _lines(spec: TensorSpec, channels_last: bool) -> Lines | None:
    """Return the strides of samples and of lines; the spec's axes are in the kernel's order."""
    shape, strides = spec.shape, spec.strides
    lines = (shape[1:-1], strides[1:-1]) if channels_last else (shape[1:2], strides[1:2])
    line = (shape[-1:], strides[-1:]) if channels_last else (shape[2:], strides[2:])
    axes = collapsed(*lines)
    if not is_contiguous(*line) or len(axes) > 1:
        return None
    return (strides[0] if shape[0] > 1 else 0), (axes[0][1] if axes else 0)
