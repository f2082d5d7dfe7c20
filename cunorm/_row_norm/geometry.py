# SPDX-License-Identifier: MIT
"""How x falls into rows, and the operands that must fit them."""

from math import prod
from typing import NamedTuple

from cunorm._core.dtypes import DType
from cunorm._core.operands import Kind, Slot, check_shape
from cunorm._core.tensor import WHOLE, OptionalSpec, RowAxes, TensorSpec, contiguous

_WIDTH_LIMIT = 2**31


class RowShape(NamedTuple):
    """The rows that have statistics: `rows` in each of `groups` groups of `width` columns."""

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
        """Return the elements from one row of partial sums to the next.

        `twice`: a row of recent sums follows each. A row is whole cache lines of a CPU, as by
        `sum_pitch` in C++.
        """
        pitch = -(-self.row_width // 16) * 16
        return 2 * pitch if twice else pitch


class Geometry(NamedTuple):
    """How x falls into rows, and those into groups of columns."""

    shape: tuple[int, ...]
    leading_axes: int
    rows: RowShape

    def shape_of(self, kind: Kind) -> tuple[int, ...]:
        """Return the shape of x, of a row, or of an element for each row."""
        if kind is Kind.STATISTIC:
            groups = self.rows.groups
            return self.shape[: self.leading_axes] + ((groups,) if groups > 1 else ())
        return self.shape if kind is Kind.LIKE_X else self.shape[self.leading_axes :]

    def axes_of(self, kind: Kind) -> RowAxes:
        """Return where the rows of an operand begin; parameters and statistics are one row."""
        return RowAxes(self.leading_axes, self.rows.groups) if kind is Kind.LIKE_X else WHOLE

    def new_result(self, x: TensorSpec, kind: Kind, dtype: DType) -> TensorSpec:
        """Return the spec of a new output, in C order."""
        return contiguous(self.shape_of(kind), dtype, x.device)


def row_geometry(function: str, x: TensorSpec, axis: int, groups: int = 1) -> Geometry:
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


def check_operand(function: str, slot: Slot, operand: OptionalSpec, geometry: Geometry) -> None:
    """Check an operand's shape."""
    shape, hint = geometry.shape_of(slot.kind), ", the shape of x"
    if slot.kind is Kind.PARAMETER:
        axes = len(geometry.shape) - geometry.leading_axes
        hint = f" to match x.shape[{'-1' if axes == 1 else f'{-axes}:'}]"
    if slot.kind is Kind.STATISTIC:
        hint = ", one element for each row of x"
    may_be_narrower = slot.argument in ("gate", "residual")
    if may_be_narrower and operand is not None and _is_narrower(operand.shape, shape):
        hint += ": expand it, as by broadcast_to of numpy or jax.numpy, or Tensor.expand"
    check_shape(function, slot.argument, operand, shape, hint)


def _is_narrower(shape: tuple[int, ...], full: tuple[int, ...]) -> bool:
    """Whether an array of a shape would be broadcast to the full one."""
    if len(shape) > len(full):
        return False
    sizes = zip(shape, full[len(full) - len(shape) :], strict=True)
    return all(size in (1, full_size) for size, full_size in sizes)
