# SPDX-License-Identifier: MIT
"""The table of a family's operands, and the dtypes of operands for which a kernel is built."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from enum import Enum, auto
from typing import Any, ClassVar, NamedTuple, TypeVar

from cunorm._core.build import Macros, cuda_bool, cuda_type
from cunorm._core.dtypes import DType
from cunorm._core.tensor import OptionalSpec, optional_dtype

T = TypeVar("T")
TypesT = TypeVar("TypesT", bound="KernelTypes")
Specs = dict[str, OptionalSpec]  # the keys are the kernels' names, in the order of a call's arrays
DTypes = Mapping[str, DType | None]  # the keys are the kernels' names


class Kind(Enum):
    """A kind of operand; each kind says what the operand has an element for."""

    LIKE_X = auto()  # for each element of x
    PARAMETER = auto()  # for each element of a row, or for each channel; all rows share it
    STATISTIC = auto()  # for each row, or for each group of a sample; it has the compute type
    SCALE = auto()  # for each row or block of columns of a quantised result, or one for all


@dataclass(frozen=True)
class Operand:
    """An input or a result of a forward, from which the arrays of the backward are derived."""

    name: str  # the kernels' name
    kind: Kind
    is_required: bool = False  # where the operand or its gradient is an input, it must be given
    is_saved: bool = False  # the backward takes the operand
    has_gradient: bool = False  # the backward returns that of an input, takes that of a result
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

    def __init__(
        self,
        inputs: Sequence[Operand],
        results: Sequence[Operand],
        of_backward: Sequence[Operand] = (),  # inputs that only the backward has
    ) -> None:
        self.forward_inputs = tuple(map(_slot, inputs))
        self.forward_results = tuple(map(_slot, results))
        self.backward_inputs = (
            *(_gradient(operand) for operand in results if operand.has_gradient),
            *(_slot(operand) for operand in (*inputs, *results) if operand.is_saved),
            *map(_slot, of_backward),
        )
        self.backward_results = tuple(_gradient(one) for one in inputs if one.has_gradient)


def _slot(operand: Operand) -> Slot:
    argument = operand.argument or operand.name
    return Slot(operand.name, argument, operand.kind, operand.is_required)


def _gradient(operand: Operand) -> Slot:
    name = f"d{operand.name}"
    return Slot(name, operand.gradient_argument or name, operand.kind, operand.is_required)


def names_of(slots: tuple[Slot, ...], *kinds: Kind) -> tuple[str, ...]:
    return tuple(slot.name for slot in slots if slot.kind in kinds)


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
    """Return the name that `needs` has for a gradient; for dx and dresidual it is "x"."""
    name = gradient.name[1:]
    return "x" if name == "residual" else name


def dtypes_of(specs: Specs) -> DTypes:
    return {name: spec and spec.dtype for name, spec in specs.items()}


def present(spec: T | None) -> T:
    """Return a value that cannot be None, and assert that it is not."""
    assert spec is not None
    return spec


def type_macros(types: object, *names: str) -> Macros:
    """Return the macros of a build that name the dtypes of some operands, as X_T does for x."""
    return tuple((f"{name.upper()}_T", cuda_type(getattr(types, name))) for name in names)


@dataclass(frozen=True)
class KernelTypes:
    """The dtypes of the operands of a kernel; None is the dtype of an absent operand.

    The field of an operand has the name of its slot. The fields of dweight and dbias only say
    whether these gradients are wanted, because param_grad.cu rounds them to their dtypes.
    """

    inputs: ClassVar[tuple[Slot, ...]]
    results: ClassVar[tuple[Slot, ...]]

    compute: DType
    _: KW_ONLY
    weight: DType | None = None
    bias: DType | None = None

    @classmethod
    def lines(cls) -> tuple[str, ...]:
        """Return the operands that have an element for each element of x."""
        return names_of(cls.inputs + cls.results, Kind.LIKE_X)

    @classmethod
    def parameters(cls) -> tuple[str, ...]:
        return names_of(cls.inputs, Kind.PARAMETER)

    @classmethod
    def sums(cls) -> tuple[str, ...]:
        return names_of(cls.results, Kind.PARAMETER)

    @classmethod
    def from_specs(cls: type[TypesT], operands: Specs, compute: DType, **scalars: object) -> TypesT:
        scalars |= {name: optional_dtype(operands.get(name)) for name in cls._with_macros()}
        scalars |= {name: operands.get(name) is not None for name in cls.sums()}
        return cls(compute, **scalars)  # type: ignore[arg-type]  # fields by name

    @classmethod
    def _with_macros(cls) -> list[str]:
        names = names_of(cls.inputs + cls.results, Kind.LIKE_X, Kind.PARAMETER)
        return [name for name in names if name not in cls.sums()]

    def macros(self) -> Macros:
        """Return the macros for the operands' dtypes, and for the sums that are wanted."""
        sums = ((name.upper(), cuda_bool(getattr(self, name))) for name in self.sums())
        return (*type_macros(self, "compute", *self._with_macros()), *sums)
