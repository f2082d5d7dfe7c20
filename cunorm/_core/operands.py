# SPDX-License-Identifier: MIT
"""The table of a family's operands, from which the arrays of its calls are derived."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple, TypeVar

from cunorm._core.dtypes import DType
from cunorm._core.tensor import OptionalSpec

T = TypeVar("T")
Specs = dict[str, OptionalSpec]  # the keys are the kernels' names, in the order of a call's arrays
DTypes = Mapping[str, DType | None]  # the keys are the kernels' names


class Kind(Enum):
    """A kind of operand; each kind says what the operand has an element for."""

    LIKE_X = auto()  # for each element of x
    PARAMETER = auto()  # for each element of a row, or for each channel; all rows share it
    STATISTIC = auto()  # for each row, or for each group of a sample; it has the compute type


@dataclass(frozen=True)
class Operand:
    """An input or a result of a forward, from which the arrays of the backward are derived.

    The name of a gradient is d and the name of its operand.
    """

    name: str  # the kernels' name
    kind: Kind
    is_required: bool = False  # a call needs it if its inputs include it or its gradient
    is_saved: bool = False  # the backward takes the operand
    has_gradient: bool = False  # the backward returns it or, if the operand is a result, takes it
    argument: str = ""  # the caller's name, if it differs from the kernels' name
    gradient_argument: str = ""  # the caller's name of the gradient, if it differs


class Slot(NamedTuple):
    """An array of a call. All calls of an operator have the same slots in the same order."""

    name: str  # the kernels' name
    argument: str  # the caller's name of an argument, or of a field of the results
    kind: Kind
    is_required: bool


class OperandTable:
    """The operands of a family: the inputs and results of a forward, in the order of its arrays."""

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
    """Return the names of the slots that have one of these kinds."""
    return tuple(slot.name for slot in slots if slot.kind in kinds)


def named(slots: tuple[Slot, ...], specs: tuple[OptionalSpec, ...]) -> Specs:
    return {slot.name: spec for slot, spec in zip(slots, specs, strict=True)}


def arguments(
    inputs: tuple[Slot, ...], results: tuple[Slot, ...], arrays: Sequence[Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arrays of inputs and those of results, both by the caller's names."""
    count = len(inputs)
    return (
        {slot.argument: array for slot, array in zip(inputs, arrays[:count], strict=True)},
        {slot.argument: array for slot, array in zip(results, arrays[count:], strict=True)},
    )


def operand_of(gradient: Slot) -> str:
    """Return the operand of a gradient, as `needs` names it; the operand of dresidual is x."""
    name = gradient.name[1:]
    return "x" if name == "residual" else name


def dtypes_of(specs: Specs) -> DTypes:
    return {name: spec and spec.dtype for name, spec in specs.items()}


def present(spec: T | None) -> T:
    """Return a spec or dtype that is not None, because all calls have its operand."""
    assert spec is not None
    return spec


def slots_by_name(operands: Specs) -> dict[str, int]:
    """Return the slots of the operands that are present, and the workspace's slot, the last one."""
    slots = {name: slot for slot, name in enumerate(operands) if operands[name] is not None}
    return slots | {"workspace": len(operands)}


def check_compute(
    function: str, argument: str, spec: OptionalSpec, compute: DType, float64_source: str
) -> None:
    """Check that a statistic has the compute type, float64 if an array of `float64_source` is."""
    if spec is not None and spec.dtype is not compute:
        raise TypeError(
            f"{function}: {argument} has dtype {spec.dtype}, expected {compute}, the compute type: "
            f"float64 if {float64_source} is, else float32"
        )
