# SPDX-License-Identifier: MIT
"""Where an operand's rows are: up to three leading axes, as `Rows` in operands.cuh has them."""

from __future__ import annotations

from typing import NamedTuple

from cunorm._core.tensor import TensorSpec, contiguous, is_contiguous

_UNBOUNDED = 2**62  # the size of an axis that has no axis outside it


class RowLayout(NamedTuple):
    """Sizes of the last two leading axes, and the strides of all three, in elements."""

    inner: int
    middle: int
    outer_stride: int
    middle_stride: int
    inner_stride: int

    @property
    def strides(self) -> tuple[int, int, int]:
        """Return the strides alone."""
        return self[2:]


class RowAxes(NamedTuple):
    """Where the rows of an array begin: after so many axes, and at each group of the columns."""

    leading_axes: int
    groups: int = 1

    def layout(self, spec: TensorSpec) -> RowLayout | None:
        """Return the layout of an array's rows, None where kernels cannot follow its strides.

        Each row must be contiguous, with at most three leading axes once `collapsed`.
        """
        shape, strides = spec.shape, spec.strides
        if self.groups == 1:
            return _row_layout(shape, strides, self.leading_axes)
        width, step = shape[-1] // self.groups, strides[-1]
        shape, strides = (*shape[:-1], self.groups, width), (*strides[:-1], width * step, step)
        return _row_layout(shape, strides, self.leading_axes + 1)

    def layout_of_input(self, spec: TensorSpec | None) -> RowLayout:
        """Return the layout of an input's rows, or of its copy in C order; any where absent."""
        if spec is None:
            return SINGLE_ROW
        copy = contiguous(spec.shape, spec.dtype, spec.device)
        layout = self.layout(spec) or self.layout(copy)
        assert layout is not None, "kernels follow the strides of C order"
        return layout


WHOLE = RowAxes(0)  # the array is one row
SINGLE_ROW = RowLayout(_UNBOUNDED, _UNBOUNDED, 0, 0, 0)


def _row_layout(
    shape: tuple[int, ...], strides: tuple[int, ...], leading_axes: int
) -> RowLayout | None:
    if 0 in shape:
        return SINGLE_ROW
    if not is_contiguous(shape[leading_axes:], strides[leading_axes:]):
        return None
    axes = collapsed(shape[:leading_axes], strides[:leading_axes])
    if len(axes) > 3:
        return None
    if axes:
        axes[0] = _UNBOUNDED, axes[0][1]
    outer, middle, inner = [(_UNBOUNDED, 0)] * (3 - len(axes)) + axes
    return RowLayout(inner[0], middle[0], outer[1], middle[1], inner[1])


def collapsed(shape: tuple[int, ...], strides: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return (size, stride) of the axes; neighbours that one stride walks are joined."""
    axes: list[tuple[int, int]] = []
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if axes and axes[-1][1] == stride * size:
            axes[-1] = (axes[-1][0] * size, stride)
        else:
            axes.append((size, stride))
    return axes
