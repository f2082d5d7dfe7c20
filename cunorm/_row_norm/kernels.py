# SPDX-License-Identifier: MIT
"""The row-norm kernels: the macros of their builds, and their argument structs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from cunorm._core.build import ArgsWriter, KernelArgs, Launch, Macros, cuda_bool, numbers_of
from cunorm._core.dtypes import DType
from cunorm._core.operands import PARAMETERS, Specs, places_of, type_macros
from cunorm._core.plan import Operand, vector_width
from cunorm._core.tensor import RowLayout
from cunorm._row_norm.geometry import Geometry

FORWARD_ROWS = ("x", "residual", "gate", "y", "new_residual")
BACKWARD_ROWS = ("dy", "x", "d_residual", "gate", "dx", "dresidual", "dgate")


class Formula(NamedTuple):
    """The formula of a build, as far as its operands do not say it."""

    center: bool = False
    activation: str = "identity"  # of the gate
    pre_gate: bool = False
    weight_offset: bool = False
    rounded: DType | None = None  # to which k * r is rounded before weight

    def macros(self) -> Macros:
        """Return its part of a build."""
        return (
            ("CENTER", cuda_bool(self.center)),
            ("GATE_ACTIVATION", self.activation),
            ("PRE_GATE", cuda_bool(self.pre_gate)),
            ("WEIGHT_OFFSET", cuda_bool(self.weight_offset)),
            *type_macros(self, "rounded"),
        )


class ForwardTypes(NamedTuple):
    """The operands of row_norm_forward: their dtypes, None where absent."""

    compute: DType
    x: DType
    y: DType
    residual: DType | None = None
    gate: DType | None = None
    new_residual: DType | None = None
    weight: DType | None = None
    bias: DType | None = None
    formula: Formula = Formula()

    def macros(self) -> Macros:
        """Return their part of a build."""
        names = ("compute", "x", "residual", "gate", "new_residual", "weight", "bias", "y")
        return (*type_macros(self, *names), *self.formula.macros())

    def row_operands(self) -> tuple[DType | None, ...]:
        """Return the operands that have a row for each row of x."""
        return tuple(getattr(self, name) for name in FORWARD_ROWS)

    def held_operands(self) -> list[int]:
        """Return the bytes of each operand that a thread holds for an element of a row."""
        operands = (self.x, self.residual, self.gate, self.weight, self.bias)
        return [_held_itemsize(dtype, self.compute) for dtype in operands if dtype is not None]


class BackwardTypes(NamedTuple):
    """The operands of row_norm_backward: their dtypes, None where absent."""

    compute: DType
    dy: DType
    x: DType | None = None
    d_residual: DType | None = None
    gate: DType | None = None
    dx: DType | None = None
    dresidual: DType | None = None
    dgate: DType | None = None
    weight: DType | None = None
    bias: DType | None = None
    dweight: bool = False
    dbias: bool = False
    formula: Formula = Formula()

    def macros(self) -> Macros:
        """Return their part of a build."""
        return (
            *type_macros(self, "compute", *BACKWARD_ROWS, *PARAMETERS),
            ("DWEIGHT", cuda_bool(self.dweight)),
            ("DBIAS", cuda_bool(self.dbias)),
            *self.formula.macros(),
        )

    def row_operands(self) -> tuple[DType | None, ...]:
        """Return the operands that have a row for each row of x."""
        return tuple(getattr(self, name) for name in BACKWARD_ROWS)

    def held_operands(self) -> list[int]:
        """Return the bytes that a thread holds for an element of a row: operands and sums."""
        operands = (self.dy, self.x, self.d_residual, self.gate, self.weight, self.bias)
        held = [_held_itemsize(dtype, self.compute) for dtype in operands if dtype is not None]
        return held + [self.compute.itemsize] * (self.dweight + self.dbias)


def _held_itemsize(dtype: DType, compute: DType) -> int:
    """Return the bytes of a held element: as stored, but compilers hold float64 converted."""
    return compute.itemsize if compute.itemsize == 8 else dtype.itemsize


RowTypes = ForwardTypes | BackwardTypes


class RowKernel(NamedTuple):
    """A row norm's kernel with its operands, for arrays anywhere."""

    types: RowTypes
    where: Geometry
    layouts: dict[str, RowLayout]  # of FORWARD_ROWS or BACKWARD_ROWS
    arrays: dict[str, int]  # the places of the arrays that there are, by the kernel's names
    numbers: tuple[float, ...]

    def args(self, sums: Iterable[int | None] = ()) -> KernelArgs:
        """Return `struct Arguments`; `sums` are where partial sums begin in the workspace."""
        writer = ArgsWriter(self.arrays)
        for name, layout in self.layouts.items():
            writer.pointer(name)
            writer.integers(*layout)
        for name in (*PARAMETERS, "mean", "rstd"):
            writer.pointer(name)
        writer.pointers_at("workspace", sums)
        rows, width, groups = self.where.rows
        writer.integers(rows, groups, width)
        return writer.finish(numbers_of(self.types.compute, self.numbers))

    def sums(self, launch: Launch) -> tuple[int | None, int | None]:
        """Return where the partial sums for dweight and for dbias begin, in bytes."""
        types = self.types
        assert isinstance(types, BackwardTypes)
        size = launch.sums_size * types.compute.itemsize
        return (0 if types.dweight else None, size * types.dweight if types.dbias else None)

    def access(self, alignments: Sequence[int] | None) -> int:
        """Return how many elements alignment lets a GPU's thread move at once."""
        width = self.where.rows.width
        if alignments is None:
            return vector_width(width)
        strides = {name: layout.strides for name, layout in self.layouts.items()}
        operands: list[Operand] = []
        for name in (*self.layouts, *PARAMETERS):
            dtype = getattr(self.types, name)
            if dtype is not None:
                alignment = alignments[self.arrays[name]]
                operands.append((alignment, dtype.itemsize, strides.get(name, ())))
        return vector_width(width, operands)


def row_kernel(
    types: RowTypes, where: Geometry, operands: Specs, numbers: tuple[float, ...]
) -> RowKernel:
    """Return a kernel of operands, which are named as the kernel names them."""
    names = FORWARD_ROWS if isinstance(types, ForwardTypes) else BACKWARD_ROWS
    layouts = {name: where.row_axes.layout_of_input(operands[name]) for name in names}
    return RowKernel(types, where, layouts, places_of(operands), numbers)
