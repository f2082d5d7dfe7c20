# SPDX-License-Identifier: MIT
"""The row-norm kernels: the macros of their builds, and their argument structs."""

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, NamedTuple

from cunorm._core.build import ArgsWriter, KernelArgs, Launch, Macros, cuda_bool, numbers_of
from cunorm._core.dtypes import DType
from cunorm._core.operands import PARAMETERS, SUMS, KernelTypes, Specs, places_of, type_macros
from cunorm._core.plan import Alignments
from cunorm._core.tensor import RowLayout
from cunorm._row_norm.geometry import Geometry


class Formula(NamedTuple):
    """The formula of a build, as far as its operands do not say it."""

    center: bool = False
    activation: str = "identity"  # of the gate
    pre_gate: bool = False
    weight_offset: bool = False
    rounded: DType | None = None  # to which k * r is rounded before weight

    def macros(self) -> Macros:
        return (
            ("CENTER", cuda_bool(self.center)),
            ("GATE_ACTIVATION", self.activation),
            ("PRE_GATE", cuda_bool(self.pre_gate)),
            ("WEIGHT_OFFSET", cuda_bool(self.weight_offset)),
            *type_macros(self, "rounded"),
        )


_PLAIN = Formula()


@dataclass(frozen=True)
class _RowTypes(KernelTypes):
    """The operands of a row norm's kernel."""

    rows: ClassVar[tuple[str, ...]]  # those with a row for each row of x

    _: KW_ONLY
    gate: DType | None = None
    formula: Formula = _PLAIN

    def macros(self) -> Macros:
        return (*super().macros(), *self.formula.macros())

    def held_itemsizes(self) -> list[int]:
        """Return the bytes that a thread holds for an element of a row: of operands, and of sums.

        Operands are held as they are stored; where all is computed in float64, as that.
        """
        compute = self.compute.itemsize
        dtypes = [dtype for dtype in self.held() if dtype]
        held = [compute if compute == 8 else dtype.itemsize for dtype in dtypes]
        return held + [compute] * sum(getattr(self, name) for name in self.sums)

    def held(self) -> list[DType | None]:
        """Return the dtypes of what a thread holds of a row, but for sums."""
        raise NotImplementedError


@dataclass(frozen=True)
class ForwardTypes(_RowTypes):
    operands = ("x", "residual", "gate", "residual_out", *PARAMETERS, "y")
    rows = ("x", "residual", "gate", "y", "residual_out")

    x: DType
    y: DType
    residual: DType | None = None
    residual_out: DType | None = None

    def held(self) -> list[DType | None]:
        """Return what is held from the first pass to the last: p is s, or computed from a gate."""
        if self.formula.pre_gate:
            return [self.compute, self.weight, self.bias]
        return [self.residual_out or self.x, self.gate, self.weight, self.bias]


@dataclass(frozen=True)
class BackwardTypes(_RowTypes):
    rows = ("dy", "x", "dresidual_out", "gate", "dx", "dresidual", "dgate")
    operands = (*rows, *PARAMETERS)
    sums = SUMS

    dy: DType
    x: DType | None = None
    dresidual_out: DType | None = None
    dx: DType | None = None
    dresidual: DType | None = None
    dgate: DType | None = None
    dweight: bool = False
    dbias: bool = False

    def held(self) -> list[DType | None]:
        return [self.dy, self.x, self.dresidual_out, self.gate, self.weight, self.bias]


RowTypes = ForwardTypes | BackwardTypes


class RowKernel(NamedTuple):
    """A row norm's kernel with its operands, for arrays anywhere."""

    types: RowTypes
    where: Geometry
    layouts: dict[str, RowLayout]  # of the operands with rows
    arrays: dict[str, int]  # the places of the arrays that are present, by the kernel's names
    numbers: tuple[float, ...]

    def args(self, launch: Launch) -> KernelArgs:
        """Return `struct Arguments`."""
        writer = ArgsWriter(self.arrays)
        for name, layout in self.layouts.items():
            writer.pointer(name)
            writer.integers(*layout)
        for name in (*PARAMETERS, "mean", "rstd"):
            writer.pointer(name)
        if self.types.sums:
            writer.pointers_at("workspace", self.sums(launch))
        rows, width, groups = self.where.rows
        writer.integers(rows, groups, width)
        return writer.finish(numbers_of(self.types.compute, self.numbers))

    def sums(self, launch: Launch) -> tuple[int | None, int | None]:
        """Return where in the workspace the partial sums for dweight and for dbias begin."""
        types = self.types
        assert isinstance(types, BackwardTypes)
        size = launch.sums_size * types.compute.itemsize
        return (0 if types.dweight else None, size * types.dweight if types.dbias else None)

    @property
    def axes(self) -> int:
        """Return the most leading axes of an operand: 1, or up to 3."""
        return max(layout.axes for layout in self.layouts.values())

    def access(self, alignments: Alignments) -> int:
        """Return how many elements alignment lets a GPU's thread move at once."""
        strides: dict[str, tuple[int, ...]] = dict.fromkeys(PARAMETERS, ())
        strides |= {name: layout.strides for name, layout in self.layouts.items()}
        return self.types.access(self.where.rows.width, strides, self.arrays, alignments)


def row_kernel(
    types: RowTypes, where: Geometry, operands: Specs, numbers: tuple[float, ...]
) -> RowKernel:
    """Return a kernel of operands, which are named as the kernel names them."""
    layouts = {name: where.axes_of(name).layout_of_input(operands[name]) for name in types.rows}
    return RowKernel(types, where, layouts, places_of(operands), numbers)
