# SPDX-License-Identifier: MIT
"""The table of a family's operands; the arrays of its calls, by direction, follow from it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple, TypeVar

from cunorm._core.dtypes import DType
from cunorm._core.tensor import OptionalSpec, Shape

T = TypeVar("T")
Specs = dict[str, OptionalSpec]  # by the kernels' names, in the order of a call's arrays
DTypes = Mapping[str, DType | None]  # by the kernels' names


class Kind(Enum):
    """What an operand has an element for."""

    LIKE_X = auto()  # each element of x
    PARAMETER = auto()  # each element of a row, or each channel: all rows share it
    STATISTIC = auto()  # each row, or each group of a sample; it has the compute type


@dataclass(frozen=True)
class Operand:
    """An input or a result of a forward, from which the arrays of the backward follow.

    A gradient is named as its operand, with a d before it.
    """

    name: str  # in the kernels
    kind: Kind
    is_required: bool = False  # calls that take it, or its gradient, as an input need it
    is_saved: bool = False  # the backward takes it
    has_gradient: bool = False  # the backward returns it or, for a result, takes it
    argument: str = ""  # the caller's name, if it is another
    gradient_argument: str = ""  # the caller's name of its gradient, if it is another


class Slot(NamedTuple):
    """An array of a call. All calls of an operator have the same slots, in one order."""

    name: str  # in the kernels
    argument: str  # as an argument, or a field of the results
    kind: Kind
    is_required: bool


class OperandTable:
    """The operands of a family: inputs and results of a forward, in the order of its arrays."""

    def __init__(self, inputs: Sequence[Operand], results: Sequence[Operand]) -> None:
        self.forward_inputs = tuple(map(_slot, inputs))
        self.forward_results = tuple(map(_slot, results))
        self.backward_inputs = (
            *(_gradient(one, one.is_required) for one in results if one.has_gradient),
            *(_slot(operand) for operand in (*inputs, *results) if operand.is_saved),
        )
        gradients = (_gradient(one, is_required=False) for one in inputs if one.has_gradient)
        self.backward_results = tuple(gradients)


def _slot(operand: Operand) -> Slot:
    argument = operand.argument or operand.name
    return Slot(operand.name, argument, operand.kind, operand.is_required)


def _gradient(operand: Operand, is_required: bool) -> Slot:
    name = f"d{operand.name}"
    return Slot(name, operand.gradient_argument or name, operand.kind, is_required)


def names_of(slots: tuple[Slot, ...], *kinds: Kind) -> tuple[str, ...]:
    """Return the names of the slots of some kinds."""
    return tuple(slot.name for slot in slots if slot.kind in kinds)


def named(slots: tuple[Slot, ...], specs: tuple[OptionalSpec, ...]) -> Specs:
    return {slot.name: spec for slot, spec in zip(slots, specs, strict=True)}


def arguments(
    inputs: tuple[Slot, ...], results: tuple[Slot, ...], arrays: Sequence[Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arrays of inputs and of results by the caller's names."""
    count = len(inputs)
    return (
        {slot.argument: array for slot, array in zip(inputs, arrays[:count], strict=True)},
        {slot.argument: array for slot, array in zip(results, arrays[count:], strict=True)},
    )


def operand_of(gradient: Slot) -> str:
    """Return the operand whose gradient this is, as `needs` names it: x for dresidual, too."""
    name = gradient.name[1:]
    return "x" if name == "residual" else name


def dtypes_of(specs: Specs) -> DTypes:
    return {name: spec and spec.dtype for name, spec in specs.items()}


def present(spec: T | None) -> T:
    """Return the spec, or dtype, of an operand that a call always has."""
    assert spec is not None
    return spec


def slots_by_name(operands: Specs) -> dict[str, int]:
    """Return the slots of the operands that are present, and of the workspace, the last."""
    slots = {name: slot for slot, name in enumerate(operands) if operands[name] is not None}
    return slots | {"workspace": len(operands)}


def check_shape(function: str, argument: str, spec: OptionalSpec, shape: Shape, hint: str) -> None:
    """Check the shape of an operand; `hint` says what it has to match."""
    if spec is not None and spec.shape != shape:
        raise ValueError(f"{function}: {argument} has shape {spec.shape}, expected {shape}{hint}")


def check_compute(
    function: str, argument: str, spec: OptionalSpec, compute: DType, float64_source: str
) -> None:
    """Check that a statistic has the compute type: float64 if `float64_source` is."""
    if spec is not None and spec.dtype is not compute:
        raise TypeError(
            f"{function}: {argument} has dtype {spec.dtype}, expected {compute}, the compute type: "
            f"float64 if {float64_source} is, else float32"
        )
