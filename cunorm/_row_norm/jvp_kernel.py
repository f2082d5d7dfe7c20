# SPDX-License-Identifier: MIT
"""The operands of row norms in forward mode, and their builds: of y, and of a backward's dx."""

from dataclasses import dataclass
from typing import ClassVar

from cunorm._core.dtypes import DType
from cunorm._core.operands import Kind, Slot, names_of
from cunorm._row_norm.kernels import TABLE, ForwardTypes
from cunorm._row_norm.row_kernel import RowKernel

_OF_TABLE = {slot.name: slot for slot in (*TABLE.backward_inputs, *TABLE.forward_inputs)}


def _tangent(name: str, *, is_required: bool = False) -> Slot:
    return Slot(f"{name}_tangent", f"{name}_tangent", _OF_TABLE[name].kind, is_required)


_X, _WEIGHT, _BIAS, _GATE, _MEAN, _RSTD, _DY = (
    _OF_TABLE[name] for name in ("x", "weight", "bias", "gate", "mean", "rstd", "dy")
)
_OF_WEIGHT, _OF_BIAS, _OF_GATE = map(_tangent, ("weight", "bias", "gate"))
_OPERANDS = (_X, _WEIGHT, _BIAS, _GATE, _MEAN, _RSTD)
_RESULT = Slot("y_tangent", "y_tangent", Kind.LIKE_X, is_required=True)


@dataclass(frozen=True, kw_only=True)
class JvpTypes(ForwardTypes):
    """The dtypes of a build that finds the tangent of y."""

    kernel = "row_norm_jvp"
    inputs: ClassVar[tuple[Slot, ...]] = (*_OPERANDS, _tangent("x"), _OF_WEIGHT, _OF_BIAS, _OF_GATE)
    results = (_RESULT,)
    # In the order of `struct Arguments`.
    slots = (_X, _GATE, _tangent("x"), _OF_GATE, _DY, _RESULT, _WEIGHT, _BIAS, _OF_WEIGHT, _OF_BIAS)

    y: None = None
    y_tangent: DType
    x_tangent: DType | None = None
    gate_tangent: DType | None = None
    dy: DType | None = None
    weight_tangent: DType | None = None
    bias_tangent: DType | None = None

    @classmethod
    def parameters(cls) -> tuple[str, ...]:
        return names_of(cls.slots, Kind.PARAMETER)

    def held(self) -> list[DType | None]:
        return [*self.read_again(), *(getattr(self, name) for name in self.parameters())]

    def loaded(self) -> list[DType | None]:
        return self.read_again()

    def read_again(self) -> list[DType | None]:
        return [self.x, self.x_tangent, self.dy, self.gate, self.gate_tangent]

    def of_conversions(self) -> float:
        if self.gate is not None:
            return 2.5
        return 0.5 if self.dy is not None or self.weight_tangent is not None else 1.25

    def begins_with_pack(self) -> bool:
        return False

    def written(self) -> list[DType | None]:
        return [self.y_tangent]


@dataclass(frozen=True, kw_only=True)
class SecondTypes(JvpTypes):
    """The dtypes of a build that finds the tangent of a backward's dx."""

    inputs: ClassVar[tuple[Slot, ...]] = (
        _DY,
        _X,
        _WEIGHT,
        _MEAN,
        _RSTD,
        _tangent("x", is_required=True),
    )
    results = (_RESULT._replace(argument="dx"),)


class JvpKernel(RowKernel):
    """A row norm's kernel of forward mode."""

    forward_types = JvpTypes
