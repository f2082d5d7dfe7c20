# SPDX-License-Identifier: MIT
"""The group-norm kernels: the macros of their builds, and their argument structs."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from cunorm._core.build import ArgsWriter, KernelArgs, Macros, cuda_bool
from cunorm._core.dtypes import DType
from cunorm._core.operands import PARAMETERS, Specs, places_of, type_macros
from cunorm._core.plan import Operand, vector_width
from cunorm._group_norm.layout import GroupGeometry, Lines, Samples

_EPS = struct.Struct("<d")


class GroupForwardTypes(NamedTuple):
    """The operands of group_norm_forward: their dtypes, None where absent."""

    compute: DType
    x: DType
    y: DType
    weight: DType | None = None
    bias: DType | None = None
    activation: str = "identity"

    @property
    def kernel(self) -> str:
        """Return the name of the kernel's source and of its entry point."""
        return "group_norm_forward"

    def macros(self) -> Macros:
        """Return their part of a build."""
        dtypes = type_macros(self, "compute", "x", *PARAMETERS, "y")
        return (*dtypes, ("ACTIVATION", self.activation))

    def loaded(self) -> tuple[DType, ...]:
        """Return the operands with an element for each of x that are read."""
        return (self.x,)

    def written(self) -> DType | None:
        """Return the operand with an element for each of x that is written."""
        return self.y


class GroupBackwardTypes(NamedTuple):
    """The operands of group_norm_backward: their dtypes, None where absent."""

    compute: DType
    dy: DType
    x: DType
    dx: DType | None = None
    weight: DType | None = None
    bias: DType | None = None
    dweight: bool = False
    dbias: bool = False
    activation: str = "identity"

    @property
    def kernel(self) -> str:
        """Return the name of the kernel's source and of its entry point."""
        return "group_norm_backward"

    def macros(self) -> Macros:
        """Return their part of a build."""
        return (
            *type_macros(self, "compute", "dy", "x", "dx", *PARAMETERS),
            ("DWEIGHT", cuda_bool(self.dweight)),
            ("DBIAS", cuda_bool(self.dbias)),
            ("ACTIVATION", self.activation),
        )

    def loaded(self) -> tuple[DType, ...]:
        """Return the operands with an element for each of x that are read."""
        return (self.dy, self.x)

    def written(self) -> DType | None:
        """Return the operand with an element for each of x that is written."""
        return self.dx


GroupTypes = GroupForwardTypes | GroupBackwardTypes


class GroupKernel(NamedTuple):
    """A group norm's kernel with its operands, for arrays anywhere."""

    types: GroupTypes
    where: Samples
    lines: dict[str, Lines]  # of x and y, or of dy, x and dx, in the kernel's order
    arrays: dict[str, int]  # the places of the arrays that there are, by the kernel's names
    eps: float | None = None  # of a forward

    def args(
        self, samples: tuple[int, int], cut: tuple[int, int], sums: Iterable[int]
    ) -> KernelArgs:
        """Return `struct Arguments`.

        `samples` are how many, and the first; `cut` are the positions of a part, and the parts of a
        sample; `sums` are where those for dweight and dbias begin in the workspace, in bytes.
        """
        writer, where = ArgsWriter(self.arrays), self.where
        for name, strides in self.lines.items():
            writer.pointer(name)
            writer.integers(*strides)
        for name in (*PARAMETERS, "mean", "rstd"):
            writer.pointer(name)
        writer.pointers_at("workspace", sums)
        writer.pointer("workspace")
        writer.integers(*samples, where.positions, where.channels, where.groups, *cut)
        return writer.finish(b"" if self.eps is None else _EPS.pack(self.eps))

    def access(self, alignments: Sequence[int] | None) -> int:
        """Return how many elements alignment lets a GPU's thread move at once."""
        where = self.where
        line = where.channels if where.channels_last else where.positions
        if alignments is None:
            return vector_width(line)
        operands: list[Operand] = []
        for name in (*self.lines, *(PARAMETERS if where.channels_last else ())):
            dtype = getattr(self.types, name)
            if dtype is not None:
                alignment = alignments[self.arrays[name]]
                operands.append((alignment, dtype.itemsize, self.lines.get(name, ())))
        return vector_width(line, operands)


def group_kernel(
    types: GroupTypes, where: GroupGeometry, operands: Specs, eps: float | None = None
) -> GroupKernel:
    """Return a kernel of operands, which are named as the kernel names them."""
    names = ("x", "y") if isinstance(types, GroupForwardTypes) else ("dy", "x", "dx")
    lines = {name: where.lines_of_input(operands[name]) for name in names}
    return GroupKernel(types, where.where, lines, places_of(operands), eps)
