# SPDX-License-Identifier: MIT
"""The division of x into rows, and the shapes and strides of the operands."""

from dataclasses import dataclass
from functools import cached_property
from math import prod

from cunorm._core import validate
from cunorm._core.calls import CallGeometry
from cunorm._core.dtypes import DType
from cunorm._core.operands import Kind, Slot, Specs
from cunorm._core.tensor import (
    SINGLE_ROW,
    SINGLE_STRIDED_ROW,
    WHOLE,
    OptionalSpec,
    RowAxes,
    RowLayout,
    Shape,
    StridedAxes,
    StridedLayout,
    TensorSpec,
)
from cunorm._core.types import Axis
from cunorm._row_norm.blocks import check_blocks, scale_shape
from cunorm._row_norm.modulation import Segments, is_of_row, own_axes, segments_of
from cunorm._row_norm.order import lie_apart, row_order
from cunorm._row_norm.shape import RowShape

_WIDTH_LIMIT = 2**31
_STRIDED_LIMIT = 1 << 14  # the most columns that lie apart, because a block of threads holds them


@dataclass(frozen=True)
class Geometry(CallGeometry):
    """The division of x into rows, and of rows into groups of columns."""

    float64_source = "x, its residual stream or x_dtype"
    absent, absent_parameter = SINGLE_ROW, SINGLE_ROW

    leading_axes: int
    rows: RowShape
    branch_gate: bool = False  # the gate may have fewer elements than x
    block: int | None = None  # the columns that share a scale; None: a row has one scale
    order: tuple[int, ...] | None = None  # x's axes, those of a row last; None if they are last
    strided: bool = False  # rows lie side by side, and columns apart

    @cached_property
    def ordered(self) -> Shape:
        """Return the shape of x with the axes of a row last."""
        return self.shape if self.order is None else tuple(self.shape[n] for n in self.order)

    @property
    def leading(self) -> Shape:
        return self.ordered[: self.leading_axes]

    @property
    def row(self) -> Shape:
        return self.ordered[self.leading_axes :]

    def fits(self, slot: Slot, shape: Shape) -> bool:
        is_gate = slot.name == "gate" and self.branch_gate
        if slot.kind is Kind.SCALE and prod(shape) == 1:
            return True  # one number for all rows
        if slot.kind is not Kind.PARAMETER and not is_gate:
            return super().fits(slot, shape)
        if is_gate and shape == self.shape:
            return True
        if len(shape) > len(self.shape):
            return False
        missing = [1] * (len(self.shape) - len(shape))
        shape = (*missing, *shape) if is_gate and shape != self.row else shape
        shape = self._in_order(shape)
        if not self._varies_before_row(shape):
            return False
        lead, row = self._parts_of(shape)
        of_x = self.leading[len(self.leading) - len(lead) :]
        return (row == self.row or (is_gate and prod(row) == 1)) and all(
            size in (1, rows) for size, rows in zip(lead, of_x, strict=True)
        )

    def _in_order(self, shape: Shape) -> Shape:
        """Return the shape of an operand, which may be a row, with the axes of a row last."""
        if self.order is None or shape == self.row:
            return shape
        full = (*[1] * (len(self.shape) - len(shape)), *shape)
        return tuple(full[n] for n in self.order)

    def _varies_before_row(self, shape: Shape) -> bool:
        """Return whether a row of a shape in order differs only along the axes before x's row.

        Then rows are runs in C order, in which parameters and their gradients are.
        """
        lead, row = self._parts_of(shape)
        if self.order is None or prod(row) == 1 or not lead:
            return True
        return prod(lead[self.order[self.leading_axes] :]) == 1

    def _parts_of(self, shape: Shape) -> tuple[Shape, Shape]:
        """Return the leading axes and the axes of a row of a shape with the axes of a row last."""
        before_row = max(0, len(shape) - (len(self.shape) - self.leading_axes))
        return shape[:before_row], shape[before_row:]

    def is_scalar(self, spec: OptionalSpec) -> bool:
        """Return whether a gate has one number for a row."""
        if spec is None:
            return False
        return self.rows.row_width > prod(self._parts_of(self._in_order(spec.shape))[1])

    def is_of_row(self, spec: OptionalSpec) -> bool:
        """Return whether no two rows of x share a row of an operand."""
        if spec is None or self.is_scalar(spec):
            return False
        return is_of_row(self.leading, self._own_axes(spec))

    def _own_axes(self, spec: TensorSpec) -> tuple[bool, ...]:
        return own_axes(self.leading, len(self.shape), self._in_order(spec.shape))

    def shape_of(self, kind: Kind) -> Shape:
        if kind is Kind.STATISTIC:
            groups = self.rows.groups
            return self.leading + ((groups,) if groups > 1 else ())
        if kind is Kind.SCALE:
            return scale_shape(self.shape, self.leading_axes, self.rows.groups, self.block)
        return self.shape if kind is Kind.LIKE_X else self.row

    def hint(self, kind: Kind) -> str:
        if kind is Kind.PARAMETER and self.order is not None:
            axes = self.order[self.leading_axes :]
            row = ", ".join(f"x.shape[{n}]" for n in axes)
            ones = tuple(size if n in axes else 1 for n, size in enumerate(self.shape))
            return f" to match {row}, or {ones}, whose axes before the row may have the sizes of x"
        if kind is Kind.PARAMETER:
            count = len(self.row)
            row = f" to match x.shape[{'-1' if count == 1 else f'{-count}:'}]"
            before = f", alone or after axes that broadcast to {self.leading}"
            return row + before if self.leading else row
        if kind is Kind.SCALE:
            each = "group of a row" if self.rows.groups > 1 else "row"
            return f", one number for each {each}, or a single number"
        return ", the shape of x" if kind is Kind.LIKE_X else ", one element for each row of x"

    def remedies(self, argument: str, shape: Shape) -> list[str]:
        is_gate = argument == "gate" and self.branch_gate
        takes_ones = (is_gate or argument in ("weight", "bias")) and self.order is None
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

    def layout(self, spec: TensorSpec) -> RowLayout | StridedLayout | None:
        full = self.expanded(spec)
        if self.strided:
            return StridedAxes(self.leading_axes).layout(full)
        if not self.is_scalar(spec):
            return self.axes.layout(full)
        groups = (self.rows.groups,) if self.rows.groups > 1 else ()
        shape = (*self.leading, *groups, 1)
        strides = (*full.strides[: self.leading_axes], *[0] * len(groups), 1)
        return RowAxes(len(shape) - 1).layout(full._replace(shape=shape, strides=strides))

    def layout_of_input(self, spec: OptionalSpec) -> tuple[int, ...]:
        if spec is None and self.strided:
            return SINGLE_STRIDED_ROW
        return super().layout_of_input(spec)

    def parameter_layout(self, spec: TensorSpec) -> RowLayout | None:
        return self.axes.layout(self.expanded(spec))

    def copy_axes(self, kind: Kind, shape: Shape) -> tuple[int, ...] | None:
        is_of_rows = kind is Kind.LIKE_X and shape == self.shape and not self.strided
        return self.order if is_of_rows else None

    def new_output(self, x: TensorSpec, kind: Kind, dtype: DType, shape: Shape) -> TensorSpec:
        """Return the spec of a result, which has the memory layout that a copy has."""
        new = super().new_output(x, kind, dtype, shape)
        return new if kind is Kind.STATISTIC else new.dense(self.copy_axes(kind, shape))

    @property
    def runs(self) -> str:
        return "two runs of axes before the groups" if self.rows.groups > 1 else super().runs

    def can_follow(self, slot: Slot, spec: TensorSpec) -> bool:
        if slot.kind in (Kind.STATISTIC, Kind.SCALE):
            return True
        layout_of = self.parameter_layout if slot.kind is Kind.PARAMETER else self.layout
        return layout_of(spec.dense(self.copy_axes(slot.kind, spec.shape))) is not None

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
        own = {name: self._own_axes(one) for name, one in given.items() if one}
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

    def _check_in_order(
        self, function: str, argument: str, spec: TensorSpec, shape: Shape, *, is_like_x: bool
    ) -> None:
        """Check an output whose axes of a row are not the last."""
        validate.shape_of(function, argument, spec, shape)
        validate.own_memory(function, argument, spec)
        axes = self.copy_axes(Kind.LIKE_X, shape) if is_like_x else None
        if (self.layout if is_like_x else WHOLE.layout)(spec) is None:
            raise ValueError(
                f"{function}: {argument} has strides {spec.strides}, expected the memory layout of "
                f"x, such as strides {spec.dense(axes).strides}"
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
        """Return the view of an operand that has x's shape, with the axes of a row last.

        The stride of added axes is 0.
        """
        before, own = len(self.shape) - len(spec.shape), spec.shape
        shape, strides = (*[1] * before, *own), (*[0] * before, *spec.strides)
        full = spec._replace(shape=shape, strides=strides)
        if self.order is not None and own != self.row:
            full = full.permuted(self.order)
        pairs = zip(full.shape, self.ordered, full.strides, strict=True)
        steps = tuple(0 if size == 1 != of_x else step for size, of_x, step in pairs)
        return full._replace(shape=self.ordered, strides=steps)

    def check_output(
        self, function: str, argument: str, kind: Kind, spec: TensorSpec, shape: Shape
    ) -> None:
        if kind is Kind.SCALE:
            self._check_scale(function, argument, spec, shape)
            return
        is_like_x = kind is Kind.LIKE_X and shape == self.shape
        if self.order is None or kind is Kind.STATISTIC:
            validate.output(function, argument, spec, shape, self.axes if is_like_x else WHOLE)
        else:
            self._check_in_order(function, argument, spec, shape, is_like_x=is_like_x)
        if kind is Kind.STATISTIC:
            self.check_compute(function, argument, spec)


def row_geometry(
    function: str,
    x: TensorSpec,
    compute: DType,
    axis: Axis,
    groups: int = 1,
    *,
    branch_gate: bool = False,
    block: int | None = None,
) -> Geometry:
    """Return the geometry of x.

    A row is all axes from `axis` to the last, or the axes of a tuple. If these are not the last,
    rows lie as x has them in memory: each as one run, or side by side. If neither, x is copied.
    """
    shape, ndim = x.shape, len(x.shape)
    order, leading_axes = row_order(function, shape, axis)
    in_order = x if order is None else x.permuted(order)
    width = prod(in_order.shape[leading_axes:])
    if not 0 < width < _WIDTH_LIMIT:
        raise ValueError(
            f"{function}: x of shape {shape} has rows of {width} elements (axis {axis}), "
            "expected 1 to 2147483647"
        )
    if groups < 1 or width % groups:
        raise ValueError(
            f"{function}: groups is {groups}, expected a divisor of {width}, the width of a row"
        )
    if groups != 1 and (leading_axes != ndim - 1 or order is not None):
        raise ValueError(
            f"{function}: groups is {groups} and axis is {axis}, expected axis -1 with groups"
        )
    rows = RowShape(prod(in_order.shape[:leading_axes]), width // groups, groups)
    if block is not None:
        check_blocks(function, block, rows.width, leading_axes == ndim - 1, compute)
    strided = order is not None and lie_apart(in_order, x.dense().permuted(order), leading_axes)
    if strided and width > _STRIDED_LIMIT:
        raise ValueError(
            f"{function}: x has rows of {width} elements that lie apart in memory (axis {axis}), "
            f"expected at most {_STRIDED_LIMIT}: pass an x whose last axes are a row"
        )
    return Geometry(shape, compute, leading_axes, rows, branch_gate, block, order, strided)
