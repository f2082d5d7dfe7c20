# SPDX-License-Identifier: MIT
"""The types of public arguments, for type checkers, and the names that these arguments take."""

from collections.abc import Collection
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

import numpy as np


class SupportsDLPack(Protocol):
    """An array of any library. The operands of a call may be of several."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> object: ...


# x and the results. A dtype argument may give NumPy's another dtype than x has, and a subclass
# gives its base; an object that has only __dlpack__ gives an array of NumPy or CuPy.
ArrayT = TypeVar("ArrayT", bound=SupportsDLPack)


class TorchDType(Protocol):
    """A torch.dtype, named without torch, which may not be installed."""

    @property
    def is_floating_point(self) -> bool: ...


DTypeName = Literal["float16", "bfloat16", "float32", "float64"]
DTypeLike = DTypeName | np.dtype[Any] | type[np.generic] | TorchDType

Activation = Literal["identity", "sigmoid", "silu", "swish", "tanh", "relu", "gelu", "gelu_tanh"]
GatePosition = Literal["pre", "post"]
Layout = Literal["channels_last", "channels_first"]
Need = Literal["x", "weight", "bias", "gate"]
GroupNeed = Literal["x", "weight", "bias"]

T = TypeVar("T")
Several: TypeAlias = T | Collection[T] | tuple[T, ...]  # for mypy ("x",) is of the latter only
Needs = Collection[Need] | tuple[Need, ...]
GroupNeeds = Collection[GroupNeed] | tuple[GroupNeed, ...]
