# SPDX-License-Identifier: MIT
"""What is compiled and started, and the operands that it is compiled for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from cunorm._dtypes import DType

Macros = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Build:
    """A kernel and the macros that specialise it; `kernel` names the source and its entry point."""

    kernel: str
    macros: Macros
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.kernel, self.macros)))

    def __hash__(self) -> int:
        return self._hash  # asked for at every launch

    def __reduce__(self) -> tuple[type[Build], tuple[str, Macros]]:
        return Build, (self.kernel, self.macros)  # another process hashes otherwise

    @property
    def cluster(self) -> int:
        """Return how many blocks form a cluster."""
        return int(dict(self.macros).get("CLUSTER", 1))

    def __str__(self) -> str:
        return " ".join((self.kernel, *(f"{name}={value}" for name, value in self.macros)))


@dataclass(frozen=True, slots=True)
class Launch:
    """A build, and how many blocks of how many threads to start.

    Of row_norm_backward, also how many rows of partial sums there are for a parameter, and how many
    elements lie from one to the next.
    """

    build: Build
    grid: int
    block: int
    parts: int = 0
    sums_pitch: int = 0
    shared: int = 0  # bytes of a block's shared memory, beside what its kernel declares

    @property
    def sums_size(self) -> int:
        """Return how many elements the partial sums for one parameter have."""
        return self.parts * self.sums_pitch


class Formula(NamedTuple):
    """Which of the row norms' formulas a build computes, beside what its operands say."""

    center: bool = False
    activation: str = "identity"  # of the gate
    pre_gate: bool = False
    weight_offset: bool = False
    rounded: DType | None = None  # to which k * r is rounded before weight

    def macros(self) -> Macros:
        """Return the part of the build that says so."""
        return (
            ("CENTER", cuda_bool(self.center)),
            ("GATE_ACTIVATION", self.activation),
            ("PRE_GATE", cuda_bool(self.pre_gate)),
            ("WEIGHT_OFFSET", cuda_bool(self.weight_offset)),
            ("ROUNDED_T", cuda_type(self.rounded)),
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
        """Return the part of the build that says which operands there are."""
        return (
            ("COMPUTE_T", self.compute.cuda),
            ("X_T", self.x.cuda),
            ("RESIDUAL_T", cuda_type(self.residual)),
            ("GATE_T", cuda_type(self.gate)),
            ("NEW_RESIDUAL_T", cuda_type(self.new_residual)),
            ("WEIGHT_T", cuda_type(self.weight)),
            ("BIAS_T", cuda_type(self.bias)),
            ("Y_T", self.y.cuda),
            *self.formula.macros(),
        )

    def row_operands(self) -> tuple[DType | None, ...]:
        """Return the operands that have a row for each row of x."""
        return (self.x, self.residual, self.gate, self.y, self.new_residual)

    def held_operands(self) -> list[int]:
        """Return the bytes of what a thread holds of an element of a row."""
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
        """Return the part of the build that says which operands there are."""
        return (
            ("COMPUTE_T", self.compute.cuda),
            ("DY_T", self.dy.cuda),
            ("X_T", cuda_type(self.x)),
            ("D_RESIDUAL_T", cuda_type(self.d_residual)),
            ("GATE_T", cuda_type(self.gate)),
            ("DX_T", cuda_type(self.dx)),
            ("DRESIDUAL_T", cuda_type(self.dresidual)),
            ("DGATE_T", cuda_type(self.dgate)),
            ("WEIGHT_T", cuda_type(self.weight)),
            ("BIAS_T", cuda_type(self.bias)),
            ("DWEIGHT", cuda_bool(self.dweight)),
            ("DBIAS", cuda_bool(self.dbias)),
            *self.formula.macros(),
        )

    def row_operands(self) -> tuple[DType | None, ...]:
        """Return the operands that have a row for each row of x."""
        inputs = (self.dy, self.x, self.d_residual, self.gate)
        return (*inputs, self.dx, self.dresidual, self.dgate)

    def held_operands(self) -> list[int]:
        """Return the bytes of what a thread holds of an element of a row, and of its sums."""
        operands = (self.dy, self.x, self.d_residual, self.gate, self.weight, self.bias)
        held = [_held_itemsize(dtype, self.compute) for dtype in operands if dtype is not None]
        return held + [self.compute.itemsize] * (self.dweight + self.dbias)


class ParamGradTypes(NamedTuple):
    """The results of param_grad: their dtypes, None where not wanted."""

    compute: DType
    dweight: DType | None
    dbias: DType | None
    accumulate: bool = False

    def macros(self) -> Macros:
        """Return the part of the build that says which results there are."""
        return (
            ("COMPUTE_T", self.compute.cuda),
            ("DWEIGHT_T", cuda_type(self.dweight)),
            ("DBIAS_T", cuda_type(self.dbias)),
            ("ACCUMULATE", cuda_bool(self.accumulate)),
        )


def _held_itemsize(dtype: DType, compute: DType) -> int:
    """Return the bytes of a held element: as stored, but compilers hold float64 converted."""
    return compute.itemsize if compute.itemsize == 8 else dtype.itemsize


def cuda_type(dtype: DType | None) -> str:
    """Return the name in the sources of a dtype, None where the operand is absent."""
    return "absent" if dtype is None else dtype.cuda


def cuda_bool(value: bool) -> str:
    """Return a truth value as the sources have it."""
    return "true" if value else "false"
