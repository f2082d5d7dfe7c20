# SPDX-License-Identifier: MIT
"""What the group-norm kernels are compiled for."""

from __future__ import annotations

from typing import NamedTuple

from cunorm._builds import Macros, cuda_bool, cuda_type
from cunorm._dtypes import DType


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
        """Return the part of the build that says which operands there are."""
        return (
            ("COMPUTE_T", self.compute.cuda),
            ("X_T", self.x.cuda),
            ("WEIGHT_T", cuda_type(self.weight)),
            ("BIAS_T", cuda_type(self.bias)),
            ("Y_T", self.y.cuda),
            ("ACTIVATION", self.activation),
        )

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
        """Return the part of the build that says which operands there are."""
        return (
            ("COMPUTE_T", self.compute.cuda),
            ("DY_T", self.dy.cuda),
            ("X_T", self.x.cuda),
            ("DX_T", cuda_type(self.dx)),
            ("WEIGHT_T", cuda_type(self.weight)),
            ("BIAS_T", cuda_type(self.bias)),
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
