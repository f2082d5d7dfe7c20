# SPDX-License-Identifier: MIT
"""The operands of a row norm with a quantised result, and its kernel with its operands."""

import struct
from dataclasses import dataclass, replace
from typing import Any

from cunorm._core.build import ArgsWriter, Macros, cuda_bool, numbers_of
from cunorm._core.dtypes import FLOAT16, FLOAT32, DType
from cunorm._core.operands import Kind, Operand, OperandTable, Slot, Specs, present, type_macros
from cunorm._core.param_grad import Offsets
from cunorm._core.tensor import RowLayout, StridedLayout, TensorSpec
from cunorm._row_norm.geometry import Geometry
from cunorm._row_norm.kernels import FORWARD_INPUTS, ForwardTypes
from cunorm._row_norm.row_kernel import RowKernel

TABLE = OperandTable(
    inputs=(*FORWARD_INPUTS, Operand("given_scale", Kind.SCALE, argument="scale")),
    results=(
        Operand("q", Kind.LIKE_X, is_required=True),
        Operand("scale", Kind.SCALE),
        Operand("y", Kind.LIKE_X),
        Operand("residual_out", Kind.LIKE_X, argument="residual"),
    ),
)


@dataclass(frozen=True, kw_only=True)
class QuantizedTypes(ForwardTypes):
    """The dtypes of a build. y has the dtype to which it is rounded, even if it is not written."""

    inputs, results = TABLE.forward_inputs, TABLE.forward_results

    q: DType
    scale: DType
    gives_scale: bool
    block: int  # columns; 0: the row has one scale
    is_bounded: bool
    writes_y: bool = False

    @classmethod
    def from_specs(cls, operands: Specs, compute: DType, **scalars: Any) -> "QuantizedTypes":
        y, rounded_y = operands["y"], scalars.pop("rounded_y")
        types = super().from_specs(operands, compute, **scalars)
        return replace(types, y=rounded_y, writes_y=y is not None)

    def more_registers(self, threads: int, capability: int) -> int:
        """Return an estimate; rows have the team of a norm without q all the same."""
        takes_more = self.block or self.formula.center or self.gate or self.y is FLOAT16
        takes_more = takes_more or self.scale is not FLOAT32  # powers of two
        if capability < 90:  # ptxas takes more registers there
            takes_more = takes_more or self.residual or threads & (threads - 1)
        return 8 if takes_more else 0

    def written(self) -> list[DType | None]:
        return [self.y] if self.writes_y else []

    def macros(self) -> Macros:
        return (
            *super().macros(),
            *type_macros(self, "scale"),
            ("SCALE_BLOCK", str(self.block)),
            ("GIVEN_SCALE", cuda_bool(self.gives_scale)),
            ("ABSMAX_BOUND", cuda_bool(self.is_bounded)),
            ("WRITES_Y", cuda_bool(self.writes_y)),
        )


class QuantizedKernel(RowKernel):
    """A row norm's kernel with the operands of a quantised result."""

    forward_types = QuantizedTypes

    def __init__(
        self,
        types: QuantizedTypes,
        geometry: Geometry,
        operands: Specs,
        numbers: tuple[float, ...],
        **scalars: Any,
    ) -> None:
        *of_norm, given, bound = numbers
        super().__init__(types, geometry, operands, tuple(of_norm), **scalars)
        self._scale_numbers = given, bound
        self._scale = "given_scale" if types.gives_scale else "scale"
        scale = operands[self._scale]
        layout, self._scale_step = geometry.scale_layout(scale)
        if layout is None:  # the scale is copied
            layout, self._scale_step = geometry.scale_layout(present(scale).dense())
        self._scale_layout = present(layout)
        self.base_layouts = {"q": geometry.layout_of_input(operands["q"])}

    def _is_copied(self, slot: Slot, spec: TensorSpec) -> bool:
        if slot.kind is Kind.SCALE:
            return self.geometry.scale_layout(spec)[0] is None
        return super()._is_copied(slot, spec)

    def row_layouts(self) -> list[RowLayout | StridedLayout]:
        return [*super().row_layouts(), self._scale_layout]

    def write_args(self, writer: ArgsWriter, sums: Offsets) -> None:
        super().write_args(writer, sums)
        no_mean_and_rstd = (0, 0)
        writer.integers(*no_mean_and_rstd)

    def write_base(self, writer: ArgsWriter, sums: Offsets) -> None:
        """Write `struct QuantizedArguments`."""
        for name, layout in ("q", self.base_layouts["q"]), (self._scale, self._scale_layout):
            writer.pointer(name)
            writer.integers(*layout)
        writer.integers(self._scale_step)
        numbers = numbers_of(self.types.compute, self._scale_numbers)
        writer.integers(*struct.unpack(f"<{len(numbers) // 8}q", numbers))
