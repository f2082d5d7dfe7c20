# SPDX-License-Identifier: MIT
"""The division of x into rows, and the shapes and strides of the operands."""

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from cunorm._core import validate
from cunorm._core.calls import CallGeometry
from cunorm._core.dtypes import FLOAT64, DType
from cunorm._core.operands import Kind, Slot, Specs
from cunorm._core.tensor import (
    SINGLE_ROW,
    WHOLE,
    OptionalSpec,
    RowAxes,
    RowLayout,
    Shape,
    TensorSpec,
)
from cunorm._row_norm.modulation import Segments, is_of_row, own_axes, segments_of

_WIDTH_LIMIT = 2**31
BLOCK_STEP = 4  # columns; 32 lanes with packs of 4 have a block of 128


class RowShape(NamedTuple):
    """The rows that have statistics: `rows` rows in each of `groups` groups of `width` columns."""

    rows: int
    width: int
    groups: int = 1

    @property
    def elements(self) -> int:
        return prod(self)

    @property
    def row_width(self) -> int:
        """Return the number of elements of a row with all its groups."""
        return self.width * self.groups

    def not_empty(self) -> "RowShape":
        """Return this shape, or one row if it has none, because a launch plan needs a row."""
        return self if self.rows else self._replace(rows=1)

    def sums_pitch(self, *, twice: bool) -> int:
        """Return the number of elements from one row of partial sums to the next.

        If `twice`, a row of recent sums (see param_sums.cuh) follows each row. A row fills whole
        cache lines of a CPU. `sum_pitch` in types.cuh computes the same number.
        """
        pitch = -(-self.row_width // 16) * 16
        return 2 * pitch if twice else pitch


@dataclass(frozen=True)
class Geometry(CallGeometry):
    """The division of x into rows, and of rows into groups of columns."""

    float64_source = "x, its residual stream or x_dtype"
    absent = SINGLE_ROW

    leading_axes: int
    rows: RowShape
    branch_gate: bool = False  # the gate may have fewer elements than x
    block: int | None = None  # the columns that share a scale; None: a row has one scale

    @property
    def leading(self) -> Shape:
        return self.shape[: self.leading_axes]

    def fits(self, slot: Slot, shape: Shape) -> bool:
        is_gate = slot.name == "gate" and self.branch_gate
        if slot.kind is Kind.SCALE and prod(shape) == 1:
            return True  # one number for all rows
        if slot.kind is not Kind.PARAMETER and not is_gate:
            return super().fits(slot, shape)
        if len(shape) > len(self.shape):
            return False
        shape = (*[1] * (len(self.shape) - len(shape)), *shape) if is_gate else shape
        lead, row = self._parts_of(shape)
        of_x = self.leading[len(self.leading) - len(lead) :]
        return (row == self.shape[self.leading_axes :] or (is_gate and prod(row) == 1)) and all(
            size in (1, rows) for size, rows in zip(lead, of_x, strict=True)
        )

    def _parts_of(self, shape: Shape) -> tuple[Shape, Shape]:
        """Return the leading axes and the axes of a row of an operand's shape."""
        before_row = max(0, len(shape) - (len(self.shape) - self.leading_axes))
        return shape[:before_row], shape[before_row:]

    def is_scalar(self, spec: OptionalSpec) -> bool:
        """Return whether a gate has one number for a row."""
        return spec is not None and self.rows.row_width > prod(self._parts_of(spec.shape)[1])

    def is_of_row(self, spec: OptionalSpec) -> bool:
        """Return whether no two rows of x share a row of an operand."""
        if spec is None or self.is_scalar(spec):
            return False
        return is_of_row(self.leading, own_axes(self.leading, len(self.shape), spec.shape))

    def shape_of(self, kind: Kind) -> Shape:
        if kind is Kind.STATISTIC:
            groups = self.rows.groups
            return self.shape[: self.leading_axes] + ((groups,) if groups > 1 else ())
        if kind is Kind.SCALE:
            return scale_shape(self.shape, self.leading_axes, self.rows.groups, self.block)
        return self.shape if kind is Kind.LIKE_X else self.shape[self.leading_axes :]

    def hint(self, kind: Kind) -> str:
        if kind is Kind.PARAMETER:
            axes = len(self.shape) - self.leading_axes
            row = f" to match x.shape[{'-1' if axes == 1 else f'{-axes}:'}]"
            before = f", alone or after axes that broadcast to {self.leading}"
            return row + before if self.leading else row
        if kind is Kind.SCALE:
            each = "group of a row" if self.rows.groups > 1 else "row"
            return f", one number for each {each}, or a single number"
        return ", the shape of x" if kind is Kind.LIKE_X else ", one element for each row of x"

    def remedies(self, argument: str, shape: Shape) -> list[str]:
        is_gate = argument == "gate" and self.branch_gate
        takes_ones = is_gate or argument in ("weight", "bias")
        full = self._with_ones(shape, is_gate) if takes_ones else None
        if full:
            return [f"pass {argument}.reshape{full}"]
        return ["each axis before the row, and the whole row, may be 1"] if is_gate else []

    def _with_ones(self, shape: Shape, is_gate: bool) -> Shape | None:
        """Return the shape of a parameter of x's first axes with the axes of 1 that it lacks."""
        row = self.shape[self.leading_axes :]
        lead, last = self._parts_of(shape)
        if last != row:
            lead, last = shape, (1,) * len(row)
        missing = self.leading_axes - len(lead)
        sizes = zip(lead, self.leading, strict=False)
        fits = all(size in (1, rows) for size, rows in sizes) and (last == row or is_gate)
        return (*lead, *[1] * missing, *last) if fits and missing >= 0 else None

    @property
    def axes(self) -> RowAxes:
        return RowAxes(self.leading_axes, self.rows.groups)

    def layout(self, spec: TensorSpec) -> RowLayout | None:
        full = self.expanded(spec)
        if not self.is_scalar(spec):
            return self.axes.layout(full)
        groups = (self.rows.groups,) if self.rows.groups > 1 else ()
        shape = (*self.leading, *groups, 1)
        strides = (*full.strides[: self.leading_axes], *[0] * len(groups), 1)
        return RowAxes(len(shape) - 1).layout(full._replace(shape=shape, strides=strides))

    @property
    def runs(self) -> str:
        return "two runs of axes before the groups" if self.rows.groups > 1 else super().runs

    def can_follow(self, slot: Slot, spec: TensorSpec) -> bool:
        if slot.kind in (Kind.STATISTIC, Kind.SCALE):
            return True
        return self.layout(spec.dense()) is not None

    def segments_with(
        self, function: str, parameters: Specs, gate: OptionalSpec
    ) -> Segments | None:
        """Return the segments of a backward, or None if all rows share their parameters.

        The gate is on the branch, and its gradient is wanted.
        """
        row = self.shape_of(Kind.PARAMETER)
        if gate is None and all(one is None or one.shape == row for one in parameters.values()):
            return None
        given = parameters if self.is_of_row(gate) else parameters | {"gate": gate}
        ndim = len(self.shape)
        own = {name: own_axes(self.leading, ndim, one.shape) for name, one in given.items() if one}
        try:
            return segments_of(self.leading, own)
        except ValueError:
            shapes = [f"{name} {one.shape}" for name, one in given.items() if one]
            verb = "is" if len(shapes) == 1 else "are"
            raise ValueError(
                f"{function}: {' and '.join(shapes)} {verb} shared along different axes of x, "
                f"{self.shape}, expected at most two runs of axes along which one of them has "
                "several rows"
            ) from None

    def _check_scale(self, function: str, argument: str, spec: TensorSpec, shape: Shape) -> None:
        validate.shape_of(function, argument, spec, shape)
        validate.own_memory(function, argument, spec)
        if self.scale_layout(spec)[0] is None:
            raise ValueError(
                f"{function}: {argument} has strides {spec.strides}, expected at most {self.runs}"
            )

    def scale_layout(self, spec: OptionalSpec) -> tuple[RowLayout | None, int]:
        """Return where the scales of rows are, and the step from one block's scale to the next."""
        if spec is None or prod(spec.shape) == 1:
            return SINGLE_ROW, 0
        groups, step, lead = self.rows.groups, spec.strides[-1], self.leading_axes
        blocks = spec.shape[-1] // groups
        of_groups = ((groups,), (blocks * step,)) if groups > 1 else ((), ())
        shape = (*spec.shape[:lead], *of_groups[0], 1)
        strides = (*spec.strides[:lead], *of_groups[1], 1)
        rows = RowAxes(len(shape) - 1).layout(spec._replace(shape=shape, strides=strides))
        return rows, step

    def expanded(self, spec: TensorSpec) -> TensorSpec:
        """Return the view of an operand that has x's shape; the stride of added axes is 0."""
        before = len(self.shape) - len(spec.shape)
        sizes = zip((*[1] * before, *spec.shape), self.shape, strict=True)
        strides = zip(sizes, (*[0] * before, *spec.strides), strict=True)
        steps = tuple(0 if size == 1 != of_x else step for (size, of_x), step in strides)
        return spec._replace(shape=self.shape, strides=steps)

    def check_output(
        self, function: str, argument: str, kind: Kind, spec: TensorSpec, shape: Shape
    ) -> None:
        if kind is Kind.SCALE:
            self._check_scale(function, argument, spec, shape)
            return
        axes = self.axes if kind is Kind.LIKE_X and shape == self.shape else WHOLE
        validate.output(function, argument, spec, shape, axes)
        if kind is Kind.STATISTIC:
            self.check_compute(function, argument, spec)


def row_geometry(
    function: str,
    x: TensorSpec,
    compute: DType,
    axis: int,
    groups: int = 1,
    *,
    branch_gate: bool = False,
    block: int | None = None,
) -> Geometry:
    """Return the geometry of x; a row is all axes from `axis` to the last."""
    shape, ndim = x.shape, len(x.shape)
    leading_axes = leading_axes_of(function, shape, axis)
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
    if block is not None:
        _check_blocks(function, block, rows.width, leading_axes == ndim - 1, compute)
    return Geometry(shape, compute, leading_axes, rows, branch_gate, block)


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


def _check_blocks(
    function: str, block: int, width: int, is_last_axis: bool, compute: DType
) -> None:
    """Check that rows may have scales of blocks: a warp then has all columns of a block."""
    if not is_last_axis:
        raise ValueError(f"{function}: block is {block}, expected axis -1 with it")
    if width % BLOCK_STEP:
        raise ValueError(
            f"{function}: block is {block} for rows of {width} elements, expected a multiple of "
            f"{BLOCK_STEP} elements: leave block out, or pad x"
        )
    if compute is FLOAT64:
        raise TypeError(
            f"{function}: block is {block} for float64, expected x and its residual stream in a "
            "narrower type"
        )


def scale_shape(x_shape: Shape, leading_axes: int, groups: int, block: int | None) -> Shape:
    """Return the shape of the scales of rows or, if they have blocks, of the blocks of each row."""
    ones = (1,) * (len(x_shape) - leading_axes - 1)
    blocks = 1 if block is None else -(-(x_shape[-1] // groups) // block)
    return (*x_shape[:leading_axes], *ones, groups * blocks)
