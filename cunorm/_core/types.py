# SPDX-License-Identifier: MIT
"""The types of public arguments, for type checkers."""

from collections.abc import Collection
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

import numpy as np


class SupportsDLPack(Protocol):
    """An array of any library; the operands of a call may come from several libraries."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> object: ...


# The type of x and of the results. Results may have another dtype than x. If x is of a subclass,
# they are of the base class. An object with only __dlpack__ gives a NumPy or CuPy array. If `out`
# has an array for a result, the result is that array, of any library.
ArrayT = TypeVar("ArrayT", bound=SupportsDLPack)


class TorchDType(Protocol):
    """A torch.dtype. The name torch is not used here, as torch may not be installed."""

    @property
    def is_floating_point(self) -> bool: ...


DTypeName = Literal["float16", "bfloat16", "float32", "float64"]
DTypeLike = DTypeName | np.dtype[Any] | type[np.generic] | TorchDType

QuantizedDTypeName = Literal["float8_e4m3fn", "float8_e5m2", "int8"]
QuantizedDType = QuantizedDTypeName | np.dtype[Any] | type[np.generic] | TorchDType
ScaleDTypeName = Literal["float32", "float8_e8m0fnu"]
ScaleDType = ScaleDTypeName | np.dtype[Any] | type[np.generic] | TorchDType

Axis = int | tuple[int, ...]  # the first axis of a row, or all its axes
Activation = Literal["identity", "sigmoid", "silu", "swish", "tanh", "relu", "gelu", "gelu_tanh"]
GatePosition = Literal["pre", "post", "branch"]
Per = Literal["all", "sample", "row"]
GatePer = Literal["all", "sample", "row", "sample scalar", "row scalar"]
Layout = Literal["channels_last", "channels_first"]
Need = Literal["x", "weight", "bias", "gate"]
GroupNeed = Literal["x", "weight", "bias"]

T = TypeVar("T")
Several: TypeAlias = T | Collection[T] | tuple[T, ...]  # without tuple, mypy refuses ("x",)
Needs = Collection[Need] | tuple[Need, ...]
GroupNeeds = Collection[GroupNeed] | tuple[GroupNeed, ...]
