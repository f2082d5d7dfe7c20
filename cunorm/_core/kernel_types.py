# SPDX-License-Identifier: MIT
"""The dtypes of the operands for which a kernel is built."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, TypeVar

from cunorm._core.build import Macros, cuda_bool, cuda_type
from cunorm._core.dtypes import DType
from cunorm._core.operands import Kind, Slot, Specs, names_of
from cunorm._core.plan import Alignments, vector_width
from cunorm._core.tensor import optional_dtype

T = TypeVar("T", bound="KernelTypes")


def type_macros(types: object, *names: str) -> Macros:
    """Return the macros of a build that name the dtypes of some operands, as X_T does for x."""
    return tuple((f"{name.upper()}_T", cuda_type(getattr(types, name))) for name in names)


@dataclass(frozen=True)
class KernelTypes:
    """The dtypes of the operands of a kernel; None is the dtype of an absent operand.

    The field of an operand has the name of its slot. Gradients of parameters are sums over all
    rows, which another kernel rounds, so their fields only say whether they are wanted.
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
    def sums(cls) -> tuple[str, ...]:
        return names_of(cls.results, Kind.PARAMETER)

    @classmethod
    def from_specs(cls: type[T], operands: Specs, compute: DType, **scalars: object) -> T:
        """Return the types of the operands of a call."""
        scalars |= {name: optional_dtype(operands[name]) for name in cls._with_macros()}
        scalars |= {name: operands[name] is not None for name in cls.sums()}
        return cls(compute, **scalars)  # type: ignore[arg-type]  # fields by name

    @classmethod
    def _with_macros(cls) -> list[str]:
        names = names_of(cls.inputs + cls.results, Kind.LIKE_X, Kind.PARAMETER)
        return [name for name in names if name not in cls.sums()]

    def macros(self) -> Macros:
        """Return the macros of a build that say which operands are present."""
        sums = ((name.upper(), cuda_bool(getattr(self, name))) for name in self.sums())
        return (*type_macros(self, "compute", *self._with_macros()), *sums)

    def access(
        self,
        line: int,
        strides: Mapping[str, tuple[int, ...]],
        slots: dict[str, int],
        alignments: Alignments,
    ) -> int:
        """Return how many elements of a line a GPU's thread can move at once with these alignments.

        `strides` has the strides between the lines of each operand, none if an operand is one line.
        """
        if alignments is None:
            return vector_width(line)
        operands = [
            (alignments[slots[name]], getattr(self, name).itemsize, steps)
            for name, steps in strides.items()
            if name in slots
        ]
        return vector_width(line, operands)
