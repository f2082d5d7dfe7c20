# SPDX-License-Identifier: MIT
"""The row norms' operands, the macros of their kernels' builds, and the argument structs."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import NamedTuple

from cunorm._core.build import ArgsWriter, KernelArgs, Macros, cuda_bool, numbers_of
from cunorm._core.calls import Kernel
from cunorm._core.dtypes import DType
from cunorm._core.operands import (
    KernelTypes,
    Kind,
    Operand,
    OperandTable,
    Specs,
    names_of,
    type_macros,
)
from cunorm._core.param_grad import Offsets, Parts
from cunorm._core.plan import Alignments
from cunorm._core.tensor import SINGLE_ROW, Arrays, RowLayout, optional_dtype
from cunorm._row_norm.geometry import Geometry, RowShape
from cunorm._row_norm.modulation import Segments
from cunorm.results import NormForward

# The x of a backward is the new residual stream, if the forward had a stream.
TABLE = OperandTable(
    inputs=(
        Operand("x", Kind.LIKE_X, is_required=True, is_saved=True, has_gradient=True),
        Operand("weight", Kind.PARAMETER, is_saved=True, has_gradient=True),
        Operand("bias", Kind.PARAMETER, is_saved=True, has_gradient=True),
        Operand("gate", Kind.LIKE_X, is_saved=True, has_gradient=True),
        Operand("residual", Kind.LIKE_X, has_gradient=True),
    ),
    results=(
        Operand("y", Kind.LIKE_X, is_required=True, has_gradient=True),
        Operand(
            *("residual_out", Kind.LIKE_X),
            has_gradient=True,
            argument="residual",
            gradient_argument="d_residual",
        ),
        Operand("mean", Kind.STATISTIC, is_saved=True),
        Operand("rstd", Kind.STATISTIC, is_required=True, is_saved=True),
    ),
)


def forward_inputs(
    x: object,
    *,
    weight: object = None,
    bias: object = None,
    gate: object = None,
    residual: object = None,
) -> Arrays:
    """Return the inputs of a forward in the order of the table."""
    return (x, weight, bias, gate, residual)


def forward_arrays(
    x: object,
    *,
    weight: object = None,
    bias: object = None,
    gate: object = None,
    residual: object = None,
    y: object = None,
    out: NormForward[object] | None = None,
) -> Arrays:
    """Return a forward's arrays: inputs, results (`out`, or only `y`), and None as workspace."""
    if out is not None:
        return (x, weight, bias, gate, residual, *out, None)
    return (x, weight, bias, gate, residual, y, None, None, None, None)


def backward_inputs(
    dy: object,
    x: object,
    *,
    weight: object = None,
    bias: object = None,
    gate: object = None,
    d_residual: object = None,
    mean: object = None,
    rstd: object,
) -> Arrays:
    """Return the inputs of a backward in the order of the table."""
    return (dy, d_residual, x, weight, bias, gate, mean, rstd)


class Formula(NamedTuple):
    """The part of a build's formula that the presence of operands does not decide."""

    center: bool = False
    activation: str = "identity"  # the activation of the gate
    pre_gate: bool = False
    weight_offset: bool = False
    rounded: DType | None = None  # k * r is rounded to this dtype before it is multiplied by weight

    def macros(self) -> Macros:
        return (
            ("CENTER", cuda_bool(self.center)),
            ("GATE_ACTIVATION", self.activation),
            ("PRE_GATE", cuda_bool(self.pre_gate)),
            ("WEIGHT_OFFSET", cuda_bool(self.weight_offset)),
            *type_macros(self, "rounded"),
        )


_PLAIN = Formula()


@dataclass(frozen=True, kw_only=True)
class _RowTypes(KernelTypes, ABC):
    gate: DType | None = None
    formula: Formula = _PLAIN

    def macros(self) -> Macros:
        return (*super().macros(), *self.formula.macros())

    def held_itemsizes(self) -> list[int]:
        """Return how many bytes a thread holds for an element of a row, for each operand and sum.

        Operands are held as they are stored, or as float64 if float64 is the compute type.
        """
        compute = self.compute.itemsize
        dtypes = [dtype for dtype in self.held() if dtype]
        held = [compute if compute == 8 else dtype.itemsize for dtype in dtypes]
        return held + [compute] * sum(getattr(self, name) for name in self.sums())

    @abstractmethod
    def held(self) -> list[DType | None]:
        """Return the dtypes of the operands that a thread holds of a row."""


@dataclass(frozen=True)
class ForwardTypes(_RowTypes):
    inputs, results = TABLE.forward_inputs, TABLE.forward_results

    x: DType
    y: DType
    residual: DType | None = None
    residual_out: DType | None = None

    def held(self) -> list[DType | None]:
        """Return the dtypes held between the passes: p with a pre-gate, else s and the gate."""
        if self.formula.pre_gate:
            return [self.compute, self.weight, self.bias]
        return [self.residual_out or self.x, self.gate, self.weight, self.bias]


@dataclass(frozen=True)
class BackwardTypes(_RowTypes):
    inputs, results = TABLE.backward_inputs, TABLE.backward_results

    dy: DType
    x: DType | None = None
    dresidual_out: DType | None = None
    dx: DType | None = None
    dresidual: DType | None = None
    dgate: DType | None = None
    dweight: bool = False
    dbias: bool = False
    # The gradients of parameters of which each row has its own: the row's kernel writes them.
    own_dweight: DType | None = None
    own_dbias: DType | None = None

    def held(self) -> list[DType | None]:
        return [self.dy, self.x, self.dresidual_out, self.gate, self.weight, self.bias]


RowTypes = ForwardTypes | BackwardTypes


class RowKernel(Kernel[RowTypes, Geometry]):
    """A row norm's kernel with its operands."""

    def __init__(
        self,
        types: RowTypes,
        geometry: Geometry,
        operands: Specs,
        numbers: tuple[float, ...],
        *,
        parameters: Specs,  # weight and bias, even if the kernel does not read them
        accumulate: bool = False,
    ) -> None:
        self.segments: Segments | None = None  # of a backward whose parameters have several rows
        self.own: tuple[str, ...] = ()  # the gradients that the row's kernel writes
        row = geometry.shape_of(Kind.PARAMETER)
        given = {name: spec for name, spec in parameters.items() if spec}
        self.has_rows = any(spec.shape != row for spec in given.values())
        if self.has_rows and isinstance(types, BackwardTypes):
            self.segments = geometry.segments(given)
            self.own = tuple(f"d{name}" for name in self.segments.of_row if operands[f"d{name}"])
            dtypes = {f"own_{name}": optional_dtype(operands[name]) for name in self.own}
            types = replace(types, **dict.fromkeys(self.own, False), **dtypes)  # type: ignore[arg-type]
        super().__init__(types, geometry, operands, numbers, accumulate=accumulate)
        self.params = self.params._replace(**dict.fromkeys(self.own))  # type: ignore[arg-type]
        if self.has_rows:
            self.parameter_layouts = {
                name: geometry.layout_of_input(operands[name]) for name in parameters
            }

    def macros(self, *, is_cpu: bool) -> Macros:
        """Return the macros of a build whose parameters have several rows."""
        if not self.has_rows:
            return ()
        axes = [RowLayout(*one).axes for one in self.parameter_layouts.values()]
        found = (("PARAMETER_AXES", "3" if is_cpu else str(max(axes, default=1))),)
        if self.segments is None:
            return found
        read = [name for name in self.segments.of_row if getattr(self.types, name)]
        return (
            *found,
            ("SEGMENT_AXES", "2" if is_cpu else str(self.segments.axes)),
            ("OWN_PARAMETERS", cuda_bool(bool(read))),
            *type_macros(self.types, "own_dweight", "own_dbias"),
            ("ACCUMULATE", cuda_bool(bool(self.own) and self.params.accumulate)),
        )

    @property
    def shape(self) -> RowShape:
        """Return the shape of the rows of a segment, or of all rows."""
        rows = self.geometry.rows
        return rows if self.segments is None else rows._replace(rows=self.segments.rows)

    def parts(self, parts: int) -> tuple[Parts | None, ...]:
        """Return, for param_grad, which rows of sums each gradient adds up, if there are segments.

        A segment has `parts` rows of sums.
        """
        segments, params = self.segments, self.params
        if segments is None:
            return ()
        wanted = {"weight": params.dweight, "bias": params.dbias, "gate": params.dgate}
        return tuple(
            None if dtype is None else segments.parts_of(name, parts)
            for name, dtype in wanted.items()
        )

    def args(self, sums: Offsets) -> KernelArgs:
        """Return the bytes of `struct Arguments`."""
        writer = self.args_writer(sums)
        rows, width, groups = self.shape
        writer.sized(rows)
        writer.integers(groups, width)
        return writer.finish(numbers_of(self.types.compute, self.numbers))

    def args_writer(self, sums: Offsets) -> ArgsWriter:
        writer = ArgsWriter(self.slots)
        if self.segments is not None:
            count, _, first, inside, *_ = self.segments
            writer.integers(count, *first, *inside)
            row = SINGLE_ROW._replace(inner_stride=self.geometry.rows.width)
            for name in ("dweight", "dbias"):
                writer.pointer(name if name in self.own else "")
                writer.integers(*row)
        self.write_args(writer, sums)
        return writer

    def sums(self, sums_size: int) -> Offsets:
        """Return the offsets of the sums for dweight, dbias and dgate, of `sums_size` elements."""
        types = self.types
        if isinstance(types, ForwardTypes):
            return None, None, None
        size = sums_size * types.compute.itemsize
        wanted = (types.dweight, types.dbias, False)
        return [size * sum(wanted[:i]) if want else None for i, want in enumerate(wanted)]

    def access(self, alignments: Alignments) -> int:
        parameters = names_of(self.types.inputs, Kind.PARAMETER)
        strides: dict[str, tuple[int, ...]] = dict.fromkeys(parameters, ())
        strides |= dict.fromkeys(self.own, ())
        layouts = self.layouts | self.parameter_layouts
        strides |= {name: RowLayout(*layout).strides for name, layout in layouts.items()}
        return self.access_to(self.geometry.rows.width, strides, alignments)
