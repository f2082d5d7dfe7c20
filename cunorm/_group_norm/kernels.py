# SPDX-License-Identifier: MIT
"""The group-norm kernels: the macros of their builds, and their argument structs."""

import struct
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, NamedTuple

from cunorm._core.build import ArgsWriter, KernelArgs, Macros
from cunorm._core.dtypes import DType
from cunorm._core.operands import PARAMETERS, SUMS, KernelTypes, Specs, places_of
from cunorm._core.plan import Alignments
from cunorm._group_norm.layout import GroupGeometry, Lines, Samples


@dataclass(frozen=True)
class GroupTypes(KernelTypes):
    """The operands of a group norm's kernel."""

    kernel: ClassVar[str]  # its source, and its entry point
    lines: ClassVar[tuple[str, ...]]  # operands with an element for each of x; the last is written

    _: KW_ONLY
    x: DType
    activation: str = "identity"

    @property
    def loaded(self) -> list[DType]:
        return [getattr(self, name) for name in self.lines[:-1]]

    @property
    def written(self) -> DType | None:
        return getattr(self, self.lines[-1])  # type: ignore[no-any-return]

    def macros(self) -> Macros:
        return (*super().macros(), ("ACTIVATION", self.activation))


@dataclass(frozen=True)
class GroupForwardTypes(GroupTypes):
    kernel = "group_norm_forward"
    lines = ("x", "y")
    operands = ("x", *PARAMETERS, "y")

    y: DType


@dataclass(frozen=True)
class GroupBackwardTypes(GroupTypes):
    kernel = "group_norm_backward"
    lines = ("dy", "x", "dx")
    operands = (*lines, *PARAMETERS)
    sums = SUMS

    dy: DType
    dx: DType | None = None
    dweight: bool = False
    dbias: bool = False


class GroupKernel(NamedTuple):
    """A group norm's kernel with its operands, for arrays anywhere."""

    types: GroupTypes
    where: Samples
    lines: dict[str, Lines]  # of x and y, or of dy, x and dx, in the kernel's order
    arrays: dict[str, int]  # the places of the arrays that are present, by the kernel's names
    eps: float | None = None  # of a forward

    def args(
        self, samples: int, first: int, part_positions: int, parts: int, sums: Iterable[int]
    ) -> KernelArgs:
        """Return `struct Arguments`, for so many samples from the first on.

        `sums` are where those for dweight and dbias begin in the workspace, in bytes.
        """
        writer, where = ArgsWriter(self.arrays), self.where
        for name, strides in self.lines.items():
            writer.pointer(name)
            writer.integers(*strides)
        for name in (*PARAMETERS, "mean", "rstd"):
            writer.pointer(name)
        if self.types.sums:
            writer.pointers_at("workspace", sums)
        writer.pointer("workspace")
        writer.integers(samples, first, where.positions, where.channels, where.groups)
        writer.integers(part_positions, parts)
        return writer.finish(b"" if self.eps is None else struct.pack("<d", self.eps))

    def access(self, alignments: Alignments) -> int:
        """Return how many elements alignment lets a GPU's thread move at once."""
        where, strides = self.where, dict[str, tuple[int, ...]](self.lines)
        if not where.channels_last:
            return self.types.access(where.positions, strides, self.arrays, alignments)
        strides |= dict.fromkeys(PARAMETERS, ())
        return self.types.access(where.channels, strides, self.arrays, alignments)


def group_kernel(
    types: GroupTypes, where: GroupGeometry, operands: Specs, eps: float | None = None
) -> GroupKernel:
    """Return a kernel of operands, which are named as the kernel names them."""
    lines = {name: where.lines_of_input(operands[name]) for name in types.lines}
    return GroupKernel(types, where.where, lines, places_of(operands), eps)
