# SPDX-License-Identifier: MIT
"""How the channels and positions of x lie in memory, read off its shape and strides."""

from math import prod
from typing import NamedTuple

from cunorm._core import validate
from cunorm._core.dtypes import FLOAT32, FLOAT64, DType
from cunorm._core.operands import Kind, Slot, check_compute, check_shape
from cunorm._core.tensor import (
    WHOLE,
    OptionalSpec,
    TensorSpec,
    collapsed,
    contiguous,
    is_contiguous,
)

LINE = 16  # elements to which rows of channels are padded
_LIMIT = 2**31

Lines = tuple[int, int]  # the strides from sample to sample and from line to line, in elements


class Samples(NamedTuple):
    """The sizes of x."""

    samples: int
    positions: int
    channels: int
    groups: int
    channels_last: bool  # in memory

    @property
    def elements(self) -> int:
        return prod(self[:3])

    @property
    def group_channels(self) -> int:
        return self.channels // self.groups

    @property
    def pitch(self) -> int:
        """Return the elements of a row of channels in memory: `sum_pitch` in C++."""
        return -(-self.channels // LINE) * LINE


class GroupGeometry(NamedTuple):
    """How x falls into samples, positions and groups of channels."""

    shape: tuple[int, ...]
    compute: DType
    sizes: Samples
    axes: tuple[int, ...]  # of x, in the kernel's order: samples, then lines
    result_axes: tuple[int, ...]  # of results, from the outermost in memory

    def shape_of(self, kind: Kind) -> tuple[int, ...]:
        """Return the shape of x, or of an element for each channel or group."""
        if kind is Kind.STATISTIC:
            return (self.sizes.samples, self.sizes.groups)
        return self.shape if kind is Kind.LIKE_X else (self.sizes.channels,)

    def lines(self, spec: TensorSpec) -> Lines | None:
        """Return where the lines of an array of x's shape are, None where kernels cannot follow."""
        return _lines(spec.permuted(self.axes), self.sizes.channels_last)

    def lines_of_input(self, spec: OptionalSpec) -> Lines:
        """Return where an operand's lines are, or those of its dense copy; any where absent."""
        if spec is None:
            return (0, 0)
        lines = self.lines(spec) or self.lines(spec.dense(self.axes))
        assert lines is not None, "a dense copy has lines"
        return lines

    def result(self, dtype: DType, x: TensorSpec) -> TensorSpec:
        """Return the spec of a new output: dense, in the memory layout of x."""
        return x._replace(dtype=dtype).dense(self.result_axes)

    def new_result(self, x: TensorSpec, kind: Kind, dtype: DType) -> TensorSpec:
        """Return the spec of a new output; one like x is as `result`, another in C order."""
        if kind is Kind.LIKE_X:
            return self.result(dtype, x)
        return contiguous(self.shape_of(kind), dtype, x.device)


def group_geometry(
    function: str, x: TensorSpec, num_groups: int | None, channel_axis: int
) -> GroupGeometry:
    """Return the samples of x; a num_groups of None is the number of channels.

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
            f"of channels, {_size_of(last[-1], ndim)}"
        )
    fits_last = _lines(x.permuted(last), channels_last=True) is not None
    fits_first = _lines(x.permuted(first), channels_last=False) is not None
    if fits_last != fits_first:
        channels_last = results_last = fits_last
    else:
        nearer = None if fits_last else _nearer_to_last(x, last)
        results_last = channel_axis == -1 if nearer is None else nearer
        # The memory of one position or of one channel is the same: longer lines are faster.
        same = positions == 1 or channels == 1
        channels_last = positions == 1 if same else results_last
    result_axes = last if results_last else first
    sizes = Samples(shape[0], positions, channels, num_groups, channels_last)
    compute = FLOAT64 if x.dtype is FLOAT64 else FLOAT32
    return GroupGeometry(shape, compute, sizes, last if channels_last else first, result_axes)


def _size_of(channel: int, ndim: int) -> str:
    """Return what the number of channels is, for an error."""
    if channel < ndim - 1:
        return "x.shape[1] (channel_axis=-1 is for channels last)"
    hint = " (channel_axis=1 is for channels first)" if ndim > 2 else ""
    return f"x.shape[-1]{hint}"


def _nearer_to_last(x: TensorSpec, last: tuple[int, ...]) -> bool | None:
    """Whether the channels of an array that fits neither layout lie closer than its positions."""
    (_, *sizes, _), (_, *strides, channel) = x.permuted(last)[:2]
    closest = min(
        (abs(s) for s, n in zip(strides, sizes, strict=True) if n > 1), default=abs(channel)
    )
    return None if closest == abs(channel) else abs(channel) < closest


def _orders(ndim: int, channel_axis: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the axes of x with channels last, and with channels first."""
    channel = channel_axis % ndim
    spatial = tuple(axis for axis in range(1, ndim) if axis != channel)
    return (0, *spatial, channel), (0, channel, *spatial)


def _lines(spec: TensorSpec, channels_last: bool) -> Lines | None:
    """Return the strides of samples and of lines, of an array in the kernel's order of axes."""
    shape, strides = spec.shape, spec.strides
    lines = (shape[1:-1], strides[1:-1]) if channels_last else (shape[1:2], strides[1:2])
    line = (shape[-1:], strides[-1:]) if channels_last else (shape[2:], strides[2:])
    axes = collapsed(*lines)
    if not is_contiguous(*line) or len(axes) > 1:
        return None
    return (strides[0] if shape[0] > 1 else 0), (axes[0][1] if axes else 0)


def check_operand(
    function: str,
    slot: Slot,
    spec: OptionalSpec,
    geometry: GroupGeometry,
    argument: str | None = None,
) -> None:
    """Check an operand's shape, and a statistic's dtype; a result has another name in errors."""
    argument, hint = argument or slot.argument, ", the shape of x"
    if slot.kind is Kind.PARAMETER:
        channel = geometry.axes[-1 if geometry.sizes.channels_last else 1]
        hint = f", one for each channel, {_size_of(channel, len(geometry.shape))}"
    if slot.kind is Kind.STATISTIC:
        hint = ", one element for each group of each sample"
    check_shape(function, argument, spec, geometry.shape_of(slot.kind), hint)
    if slot.kind is Kind.STATISTIC:
        check_compute(function, argument, spec, geometry.compute, "x")


def check_result(
    function: str, argument: str, slot: Slot, spec: OptionalSpec, geometry: GroupGeometry
) -> None:
    """Check a given result."""
    if spec is None:
        return
    if slot.kind is not Kind.LIKE_X:
        if slot.kind is Kind.STATISTIC:
            check_operand(function, slot, spec, geometry, argument)
        validate.output(function, argument, spec, geometry.shape_of(slot.kind), WHOLE)
        return
    check_operand(function, slot, spec, geometry, argument)
    validate.own_memory(function, argument, spec)
    if geometry.sizes.elements and geometry.lines(spec) is None:
        layout = "channels last" if geometry.sizes.channels_last else "channels first"
        raise ValueError(
            f"{function}: {argument} has strides {spec.strides}, expected the memory layout of x, "
            f"{layout}, with one stride for all of its lines"
        )
