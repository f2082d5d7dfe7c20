# SPDX-License-Identifier: MIT
"""The checked scalars of a group norm's call: GroupForwardSpec and GroupBackwardSpec."""

from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Any, Final

from cunorm._core import validate
from cunorm._core.dtypes import DType, compute_type, parse_optional_dtype
from cunorm._core.memo import memoize
from cunorm._core.operands import DTypes, operand_of, present
from cunorm._core.plan import Checks
from cunorm._core.tensor import Shape
from cunorm._core.types import GroupNeed
from cunorm._group_norm.kernels import TABLE
from cunorm.results import GroupNormForward, GroupNormGrads

# mypy does not know that these are the literals of `GroupNeed`.
NEEDS: tuple[GroupNeed, ...] = tuple(map(operand_of, TABLE.backward_results))  # type: ignore[arg-type]
Scalars = tuple[Any, ...]  # what `forward_scalars` and `backward_scalars` return


class _NumGroups(Enum):
    EACH_CHANNEL = auto()


# A num_groups that is the number of channels. torch.compile takes an Enum, but no bare object.
EACH_CHANNEL: Final = _NumGroups.EACH_CHANNEL


@dataclass(frozen=True, slots=True, eq=False)
class GroupNormSpec:
    """The scalars that both directions of a group norm have."""

    function: str
    num_groups: int | None  # None is EACH_CHANNEL
    activation: str
    channel_axis: int

    def statistics_shape(self, x_shape: Shape) -> Shape:
        groups = x_shape[self.channel_axis] if self.num_groups is None else self.num_groups
        return (x_shape[0], groups)

    def leading_axes(self, ndim: int) -> int:
        return 0

    def options(self, x: Any) -> dict[str, Any]:
        """Return the keyword arguments that both directions of `group_norm` take for an x."""
        options = {"activation": self.activation, "channel_axis": self.channel_axis}
        return options | {"num_groups": self.statistics_shape(x.shape)[1]}


@dataclass(frozen=True, slots=True, eq=False)
class GroupForwardSpec(GroupNormSpec):
    eps: float
    dtype: DType | None
    saves: bool  # mean and rstd are outputs

    def result_dtypes(self, dtypes: DTypes) -> dict[str, DType]:
        x = present(dtypes["x"])
        results = {"y": self.dtype or x}
        return results | dict.fromkeys(("mean", "rstd") if self.saves else (), compute_type(x))

    @property
    def output_names(self) -> tuple[str, ...]:
        return tuple(f"out.{name}" if self.saves else "out" for name in GroupNormForward._fields)


@dataclass(frozen=True, slots=True, eq=False)
class GroupBackwardSpec(GroupNormSpec):
    needs: tuple[str, ...]
    accumulate: bool

    output_names = tuple(f"out.{name}" for name in GroupNormGrads._fields)

    def result_dtypes(self, dtypes: DTypes) -> dict[str, DType]:
        return {f"d{name}": dtype for name in self.needs if (dtype := dtypes[name])}


@dataclass(frozen=True, slots=True, eq=False)
class GroupJvpSpec(GroupNormSpec):
    dtype: DType | None

    output_names = ("out",)

    def result_dtypes(self, dtypes: DTypes) -> dict[str, DType]:
        return {"y_tangent": dtypes["y_tangent"] or self.dtype or present(dtypes["x"])}


@memoize()
def jvp_spec(spec: GroupNormSpec, dtype: DType | None = None) -> GroupJvpSpec:
    """Return the spec of the tangent of a forward's y."""
    return GroupJvpSpec(spec.function, spec.num_groups, spec.activation, spec.channel_axis, dtype)


def forward_scalars(
    function: str,
    num_groups: object,
    activation: object,
    channel_axis: int,
    eps: float = 0.0,
    dtype: object = None,
    saves: bool = False,
) -> Scalars:
    """Return a forward's scalars as the caller gives them, for the OpDef's `parse`."""
    return (function, num_groups, activation, channel_axis, eps, dtype, saves)


def backward_scalars(
    function: str,
    num_groups: object,
    activation: object,
    channel_axis: int,
    *,
    needs: object = NEEDS,
    accumulate: bool = False,
) -> Scalars:
    return (function, num_groups, activation, channel_axis, needs, accumulate)


def jvp_scalars(
    function: str, num_groups: object, activation: object, channel_axis: int, dtype: object = None
) -> Scalars:
    return (function, num_groups, activation, channel_axis, dtype)


# The checks of scalars by name. Scalars that the caller does not give have no check.
CHECKS: Checks = {
    "num_groups": lambda function, argument, value: (
        None if value is EACH_CHANNEL else validate.integer(function, argument, value)
    ),
    "activation": lambda function, argument, value: validate.activation(
        function, argument, "identity" if value is None else value
    ),
    "channel_axis": validate.integer,
    "eps": lambda function, _, eps: validate.epsilon(function, eps),
    "dtype": parse_optional_dtype,
    "needs": partial(validate.names, allowed=NEEDS),
    "accumulate": validate.flag,
}
