# SPDX-License-Identifier: MIT
"""How x falls into rows, and the operands that must fit them."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from cunorm._core.dtypes import DType
from cunorm._core.operands import PARAMETERS, check_compute, check_shape
from cunorm._core.tensor import RowAxes, TensorSpec

_WIDTH_LIMIT = 2**31


class RowShape(NamedTuple):
    """The rows that share a statistic each: in every group of columns there are `rows` of them."""

    rows: int
    width: int
    groups: int = 1

    @property
    def elements(self) -> int:
        """Return how many elements x has."""
        return self.rows * self.width * self.groups

    @property
    def row_width(self) -> int:
        """Return the elements of a row of all groups."""
        return self.width * self.groups

    def not_empty(self) -> RowShape:
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

    @property
    def statistic_shape(self) -> tuple[int, ...]:
        """Return the shape of mean and rstd."""
        groups = self.rows.groups
        return self.shape[: self.leading_axes] + ((groups,) if groups > 1 else ())

    @property
    def row_axes(self) -> RowAxes:
        """Return where the rows of an array of this shape begin."""
        return RowAxes(self.leading_axes, self.rows.groups)

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Return the shape of weight and bias."""
        return self.shape[self.leading_axes :]


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


def check_operand(
    function: str, argument: str, operand: TensorSpec | None, where: Geometry
) -> None:
    """Check an operand that has an element for each of x or, weight and bias, of a row."""
    shape, of = where.shape, ", the shape of x"
    if argument in PARAMETERS:
        shape, axes = where.row_shape, len(where.row_shape)
        of = " to match x.shape[-1]" if axes == 1 else f" to match x.shape[{-axes}:]"
    check_shape(function, argument, operand, shape, of)


def check_statistic(
    function: str, argument: str, operand: TensorSpec | None, where: Geometry, compute: DType
) -> None:
    """Check mean or rstd: an element for each row, in the compute type."""
    of = ", one element for each row of x"
    check_shape(function, argument, operand, where.statistic_shape, of)
    check_compute(function, argument, operand, compute, "x, its residual stream or x_dtype")
