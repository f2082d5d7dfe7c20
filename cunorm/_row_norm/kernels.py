# SPDX-License-Identifier: MIT
"""The row norms' operands, the macros of their kernels' builds, and the argument structs."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from cunorm._core.build import Macros, cuda_bool
from cunorm._core.dtypes import DType
from cunorm._core.operands import (
    KernelTypes,
    Kind,
    Operand,
    OperandTable,
    Slot,
    names_of,
    type_macros,
)
from cunorm._core.tensor import Arrays
from cunorm.results import NormForward

PARAMETERS = ("weight", "bias")
# The x of a backward is the new residual stream, if the forward had a stream.
FORWARD_INPUTS = (
    Operand("x", Kind.LIKE_X, is_required=True, is_saved=True, has_gradient=True),
    Operand("weight", Kind.PARAMETER, is_saved=True, has_gradient=True),
    Operand("bias", Kind.PARAMETER, is_saved=True, has_gradient=True),
    Operand("gate", Kind.LIKE_X, is_saved=True, has_gradient=True),
    Operand("residual", Kind.LIKE_X, has_gradient=True),
)
TABLE = OperandTable(
    inputs=FORWARD_INPUTS,
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
    of_backward=(Operand("branch", Kind.LIKE_X),),  # the forward's x, if the gate is on the branch
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
    branch: object = None,
) -> Arrays:
    """Return the inputs of a backward in the order of the table."""
    return (dy, d_residual, x, weight, bias, gate, mean, rstd, branch)


class Formula(NamedTuple):
    """The part of a build's formula that the presence of operands does not decide."""

    center: bool = False
    activation: str = "identity"  # the activation of the gate
    pre_gate: bool = False
    branch_gate: bool = False
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
    """The dtypes of a build; `slots` are the operands of its kernel, which a call may not have."""

    kernel: ClassVar[str]  # the name of its source file and of its entry point
    slots: ClassVar[tuple[Slot, ...]]

    gate: DType | None = None
    formula: Formula = _PLAIN
    strided: bool = False  # rows lie side by side, and columns apart

    @classmethod
    def lines(cls) -> tuple[str, ...]:
        return names_of(cls.slots, Kind.LIKE_X)

    @classmethod
    def parameters(cls) -> tuple[str, ...]:
        return PARAMETERS

    @classmethod
    def sums(cls) -> tuple[str, ...]:
        names = {slot.name for slot in cls.slots}
        return tuple(f"d{name}" for name in PARAMETERS if f"d{name}" in names)

    @classmethod
    def _with_macros(cls) -> list[str]:
        kinds = Kind.LIKE_X, Kind.PARAMETER
        of_call = names_of(cls.inputs + cls.results, *kinds)
        names = dict.fromkeys((*names_of(cls.slots, *kinds), *of_call))
        return [name for name in names if name not in cls.sums()]

    @property
    def sum_count(self) -> int:
        """Return the number of sums over rows."""
        return sum(bool(getattr(self, name)) for name in self.sums())

    def macros(self) -> Macros:
        strided = (("STRIDED_ROWS", "true"),) if self.strided else ()
        return (*super().macros(), *self.formula.macros(), *strided)

    def held_itemsizes(self) -> list[int]:
        """Return how many bytes a thread holds for an element of a row, for each operand and sum.

        Operands are held as they are stored, or as float64 if float64 is the compute type.
        """
        compute = self.compute.itemsize
        dtypes = [dtype for dtype in self.held() if dtype]
        held = [compute if compute == 8 else dtype.itemsize for dtype in dtypes]
        return held + [compute] * self.sum_count

    @abstractmethod
    def held(self) -> list[DType | None]:
        """Return the dtypes of the operands that a thread holds of a row."""

    @abstractmethod
    def loaded(self) -> list[DType | None]:
        """Return the dtypes of the operands like x that a thread loads of a row."""


@dataclass(frozen=True)
class ForwardTypes(_RowTypes):
    kernel = "row_norm_forward"
    inputs, results = TABLE.forward_inputs, TABLE.forward_results
    slots = TABLE.forward_inputs + TABLE.forward_results

    x: DType
    y: DType | None
    residual: DType | None = None
    residual_out: DType | None = None

    def held(self) -> list[DType | None]:
        """Return the dtypes held between the passes: p with a pre-gate, else s and the gate."""
        if self.formula.pre_gate:
            return [self.compute, self.weight, self.bias]
        return [self.residual_out or self.x, self.gate, self.weight, self.bias]

    def loaded(self) -> list[DType | None]:
        return [self.x, self.residual, self.gate]

    def read_again(self) -> list[DType | None]:
        """Return the dtypes of the operands of which a streamed row is read twice."""
        return [self.residual_out or self.x, self.gate]

    def begins_with_pack(self) -> bool:
        """Return whether the first chunk of a CPU's row is one pack, whose mean is the shift."""
        return self.formula.center

    def of_conversions(self) -> float:
        """Return how many registers the conversion of narrow operands takes for each element."""
        return 0.5

    def more_registers(self, threads: int, capability: int) -> int:
        """Return how many registers a thread takes beyond those that its team was chosen for."""
        return 0

    def written(self) -> list[DType | None]:
        """Return the dtypes of the results that a CPU's stores may write past the caches."""
        return [self.y]


@dataclass(frozen=True)
class BackwardTypes(_RowTypes):
    kernel = "row_norm_backward"
    inputs, results = TABLE.backward_inputs, TABLE.backward_results
    slots = TABLE.backward_inputs + TABLE.backward_results

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
    branch: DType | None = None
    dgate_sums: bool = False  # dgate is a sum over the rows that share the gate, or over a row

    @property
    def sum_count(self) -> int:
        return super().sum_count + self.dgate_sums

    @classmethod
    def _with_macros(cls) -> list[str]:
        """Leave out the branch, because builds without segments have no macro for it."""
        return [name for name in super()._with_macros() if name != "branch"]

    def held(self) -> list[DType | None]:
        return [*self.loaded(), self.weight, self.bias]

    def loaded(self) -> list[DType | None]:
        return [self.dy, self.x, self.dresidual_out, self.gate, self.branch]


RowTypes = ForwardTypes | BackwardTypes
