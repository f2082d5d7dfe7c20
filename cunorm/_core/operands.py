# SPDX-License-Identifier: MIT
"""The operands of a call by name: their dtypes, places and shapes."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, TypeVar

from cunorm._core.build import Macros, cuda_bool, cuda_type
from cunorm._core.dtypes import DType
from cunorm._core.plan import Alignments, OutputSpec, vector_width
from cunorm._core.tensor import OptionalSpec, Shape, TensorSpec, optional_dtype

Specs = dict[str, OptionalSpec]  # in the order of a call's arrays

PARAMETERS, SUMS = ("weight", "bias"), ("dweight", "dbias")
STATISTICS = ("mean", "rstd")


def present(spec: OptionalSpec) -> TensorSpec:
    """Return the spec of an operand that a call always has."""
    assert spec is not None
    return spec


def type_macros(types: object, *names: str) -> Macros:
    """Return the macros of a build that name the dtypes of some operands: X_T for x."""
    return tuple((f"{name.upper()}_T", cuda_type(getattr(types, name))) for name in names)


def places_of(operands: Specs) -> dict[str, int]:
    """Return the places of the operands that are present, and of the workspace, the last."""
    places = {name: place for place, name in enumerate(operands) if operands[name] is not None}
    return places | {"workspace": len(operands)}


def with_new_outputs(
    given: Specs, wanted: dict[str, TensorSpec], first: int
) -> tuple[Specs, tuple[OutputSpec, ...]]:
    """Return all outputs of a call, whose places begin at `first`, and those to allocate."""
    new = {name: spec for name, spec in wanted.items() if given[name] is None}
    fields = [*given]
    outputs = (OutputSpec(first + fields.index(name), spec) for name, spec in new.items())
    return given | new, tuple(outputs)


def check_shape(function: str, argument: str, spec: OptionalSpec, shape: Shape, of: str) -> None:
    """Check the shape of an operand; `of` says what it has to match."""
    if spec is not None and spec.shape != shape:
        raise ValueError(f"{function}: {argument} has shape {spec.shape}, expected {shape}{of}")


def check_compute(
    function: str, argument: str, spec: OptionalSpec, compute: DType, wide: str
) -> None:
    """Check that a statistic has the compute type; `wide` names what makes that float64."""
    if spec is not None and spec.dtype is not compute:
        raise TypeError(
            f"{function}: {argument} has dtype {spec.dtype}, expected {compute}, the compute type: "
            f"float64 if {wide} is, else float32"
        )


T = TypeVar("T", bound="KernelTypes")


@dataclass(frozen=True)
class KernelTypes:
    """The operands of a kernel: their dtypes, None where absent."""

    operands: ClassVar[tuple[str, ...]]  # in the order of their macros
    sums: ClassVar[tuple[str, ...]] = ()  # outputs that are summed up: True where wanted

    compute: DType
    _: KW_ONLY
    weight: DType | None = None
    bias: DType | None = None

    @classmethod
    def of(cls: type[T], operands: Specs, compute: DType, **scalars: Any) -> T:
        """Return the types of a call's operands, which are named as the kernel names them."""
        scalars |= {name: optional_dtype(operands[name]) for name in cls.operands}
        scalars |= {name: operands[name] is not None for name in cls.sums}
        return cls(compute, **scalars)

    def macros(self) -> Macros:
        """Return the part of a build that says which operands there are."""
        sums = ((name.upper(), cuda_bool(getattr(self, name))) for name in self.sums)
        return (*type_macros(self, "compute", *self.operands), *sums)

    def access(
        self,
        line: int,
        strides: Mapping[str, tuple[int, ...]],
        places: dict[str, int],
        alignments: Alignments,
    ) -> int:
        """Return how many elements of a line alignment lets a GPU's thread move at once.

        `strides` has those between the lines of each operand, none where it is one line.
        """
        if alignments is None:
            return vector_width(line)
        operands = [
            (alignments[places[name]], getattr(self, name).itemsize, steps)
            for name, steps in strides.items()
            if name in places
        ]
        return vector_width(line, operands)
