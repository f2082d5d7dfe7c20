# SPDX-License-Identifier: MIT
"""The axes of a row among those of x."""

from cunorm._core.tensor import UNBOUNDED, RowAxes, Shape, StridedAxes, TensorSpec
from cunorm._core.types import Axis


def row_order(function: str, x_shape: Shape, axis: Axis) -> tuple[tuple[int, ...] | None, int]:
    """Return x's axes with those of a row last, None if they are last, and the number of others."""
    if isinstance(axis, int):
        return None, leading_axes_of(function, x_shape, axis)
    ndim = len(x_shape)
    axes = [one % ndim if -ndim <= one < ndim else ndim for one in axis]
    if not axes or axes != [*range(axes[0], axes[0] + len(axes))] or axes[-1] >= ndim:
        raise ValueError(
            f"{function}: axis is {axis}, expected one axis of x, or several neighbours in order, "
            f"for x of shape {x_shape}"
        )
    leading_axes = ndim - len(axes)
    if axes[-1] == ndim - 1:
        return None, leading_axes
    return (*range(axes[0]), *range(axes[-1] + 1, ndim), *axes), leading_axes


def leading_axes_of(function: str, x_shape: Shape, axis: int) -> int:
    """Return how many axes of x come before a row's."""
    ndim = len(x_shape)
    if ndim == 0:
        raise ValueError(f"{function}: x has shape (), expected at least one axis")
    if not -ndim <= axis < ndim:
        raise ValueError(
            f"{function}: axis is {axis}, expected {-ndim} to {ndim - 1} for x of shape {x_shape}"
        )
    return axis % ndim


def full_shape(axis: Axis, ndim: int, shape: Shape) -> Shape:
    """Return the shape of a parameter, which may be a row, with as many axes as x has."""
    if isinstance(axis, int) or len(shape) != len(axis):
        return (*[1] * (ndim - len(shape)), *shape)
    sizes = {one % ndim: size for one, size in zip(axis, shape, strict=True)}
    return tuple(sizes.get(one, 1) for one in range(ndim))


def lie_apart(x: TensorSpec, dense: TensorSpec, leading_axes: int) -> bool:
    """Return whether rows of x, whose axes are the last, lie side by side; so must those of a copy.

    `dense` is the copy in C order, with the axes of rows last.
    """
    rows, side_by_side = RowAxes(leading_axes), StridedAxes(leading_axes)
    if rows.layout(x) is not None or side_by_side.layout(dense) is None:
        return False
    axes = [abs(stride) if n > 1 else UNBOUNDED for n, stride in zip(*x[:2], strict=True)]
    return min(axes[:leading_axes], default=UNBOUNDED) < min(axes[leading_axes:])
