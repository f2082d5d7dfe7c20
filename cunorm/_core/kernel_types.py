# SPDX-License-Identifier: MIT
"""The dtypes of the operands that a kernel is built for."""

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
    """Return the macros of a build that name the dtypes of some operands: X_T for x."""
    return tuple((f"{name.upper()}_T", cuda_type(getattr(types, name))) for name in names)


@dataclass(frozen=True)
class KernelTypes:
    """The operands of a kernel: their dtypes, None where absent.

    An operand's field has the name of its slot. Gradients of parameters are sums over all rows,
    which another kernel rounds: their fields say whether they are wanted.
    """

    inputs: ClassVar[tuple[Slot, ...]]
    results: ClassVar[tuple[Slot, ...]]

    compute: DType
    _: KW_ONLY
    weight: DType | None = None
    bias: DType | None = None

    @classmethod
    def lines(cls) -> tuple[str, ...]:
        """Return the operands with an element for each of x."""
        return names_of(cls.inputs + cls.results, Kind.LIKE_X)

    @classmethod
    def sums(cls) -> tuple[str, ...]:
        return names_of(cls.results, Kind.PARAMETER)

    @classmethod
    def from_specs(cls: type[T], operands: Specs, compute: DType, **scalars: object) -> T:
        """Return the types of a call's operands."""
        scalars |= {name: optional_dtype(operands[name]) for name in cls._with_macros()}
        scalars |= {name: operands[name] is not None for name in cls.sums()}
        return cls(compute, **scalars)  # type: ignore[arg-type]  # fields by name

    @classmethod
    def _with_macros(cls) -> list[str]:
        names = names_of(cls.inputs + cls.results, Kind.LIKE_X, Kind.PARAMETER)
        return [name for name in names if name not in cls.sums()]

    def macros(self) -> Macros:
        """Return the part of a build that says which operands there are."""
        sums = ((name.upper(), cuda_bool(getattr(self, name))) for name in self.sums())
        return (*type_macros(self, "compute", *self._with_macros()), *sums)

    def access(
        self,
        line: int,
        strides: Mapping[str, tuple[int, ...]],
        slots: dict[str, int],
        alignments: Alignments,
    ) -> int:
        """Return how many elements of a line alignment lets a GPU's thread move at once.

        `strides` has, for each operand, those between its lines; none if it is one line.
        """
        if alignments is None:
            return vector_width(line)
        operands = [
            (alignments[slots[name]], getattr(self, name).itemsize, steps)
            for name, steps in strides.items()
            if name in slots
        ]
        return vector_width(line, operands)
