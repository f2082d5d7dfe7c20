# SPDX-License-Identifier: MIT
"""How x falls into rows, and the operands that must fit them."""

from math import prod
from typing import NamedTuple

from cunorm._core.operands import PARAMETERS, STATISTICS, check_shape
from cunorm._core.tensor import WHOLE, OptionalSpec, RowAxes, TensorSpec

_WIDTH_LIMIT = 2**31


class RowShape(NamedTuple):
    """The rows that share a statistic each: in every group of columns there are `rows` of them."""

    rows: int
    width: int
    groups: int = 1

    @property
    def elements(self) -> int:
        return self.rows * self.width * self.groups

    @property
    def row_width(self) -> int:
        """Return the elements of a row of all groups."""
        return self.width * self.groups

    def not_empty(self) -> "RowShape":
        """Return this, or one row of it where there is none, for a launch plan."""
        return self if self.rows else self._replace(rows=1)

    def sums_pitch(self, *, twice: bool) -> int:
        """Return the elements of a row of partial sums, with a row of recent ones or without.

        A row of sums is whole cache lines: `sum_pitch` in C++.
        """
        pitch = -(-self.row_width // 16) * 16
        return 2 * pitch if twice else pitch


class Geometry(NamedTuple):
    """How x falls into rows, and those into groups of columns."""

    shape: tuple[int, ...]
    leading_axes: int
    rows: RowShape

    def shape_of(self, operand: str) -> tuple[int, ...]:
        """Return the shape of an operand: of x, of a row, or an element for each row."""
        if operand in STATISTICS:
            groups = self.rows.groups
            return self.shape[: self.leading_axes] + ((groups,) if groups > 1 else ())
        return self.shape[self.leading_axes :] if operand in PARAMETERS else self.shape

    def axes_of(self, operand: str) -> RowAxes:
        """Return where the rows of an operand begin; a parameter or a statistic is one row."""
        is_whole = operand in PARAMETERS or operand in STATISTICS
        return WHOLE if is_whole else RowAxes(self.leading_axes, self.rows.groups)


def geometry(function: str, x: TensorSpec, axis: int, groups: int = 1) -> Geometry:
    """Return the rows of x, all axes from `axis` to the last, and their groups."""
    shape, ndim = x.shape, len(x.shape)
    if ndim == 0:
        raise ValueError(f"{function}: x has shape (), expected at least one axis")
    if not -ndim <= axis < ndim:
        raise ValueError(
            f"{function}: axis is {axis}, expected {-ndim} to {ndim - 1} for x of shape {shape}"
        )
    leading_axes = axis % ndim
    width = prod(shape[leading_axes:])
    if not 0 < width < _WIDTH_LIMIT:
        raise ValueError(
            f"{function}: x of shape {shape} has rows of {width} elements (axis {axis}), "
            "expected 1 to 2147483647"
        )
    if groups < 1 or width % groups:
        raise ValueError(
            f"{function}: groups is {groups}, expected a divisor of {width}, the width of a row"
        )
    if groups != 1 and leading_axes != ndim - 1:
        raise ValueError(
            f"{function}: groups is {groups} and axis is {axis}, expected axis -1 with groups"
        )
    rows = RowShape(prod(shape[:leading_axes]), width // groups, groups)
    return Geometry(shape, leading_axes, rows)


def check_operand(function: str, argument: str, operand: OptionalSpec, where: Geometry) -> None:
    of = ", the shape of x"
    if argument in PARAMETERS:
        axes = len(where.shape) - where.leading_axes
        of = f" to match x.shape[{'-1' if axes == 1 else f'{-axes}:'}]"
    if argument in STATISTICS:
        of = ", one element for each row of x"
    shape = where.shape_of(argument)
    is_like_x = argument in ("gate", "residual")
    if is_like_x and operand is not None and _is_narrower(operand.shape, shape):
        of += ": expand it, as by broadcast_to of numpy or jax.numpy, or Tensor.expand"
    check_shape(function, argument, operand, shape, of)


def _is_narrower(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Whether an array of a shape would be broadcast to the whole one."""
    pairs = zip(reversed(shape), reversed(whole), strict=False)  # axes may be missing
    return len(shape) <= len(whole) and all(size in (1, full) for size, full in pairs)
