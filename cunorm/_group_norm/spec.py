# SPDX-License-Identifier: MIT
"""The scalars of a group norm's call, checked: GroupForwardSpec and GroupBackwardSpec."""

from dataclasses import dataclass, fields
from enum import Enum, auto
from typing import Any, Final

from cunorm._core import validate
from cunorm._core.dtypes import DType, compute_type, parse_optional_dtype
from cunorm._core.memo import memoize
from cunorm._core.operands import DTypes, operand_of, present
from cunorm._core.tensor import Shape
from cunorm._core.types import GroupNeed
from cunorm._group_norm.kernels import TABLE
from cunorm.results import GroupNormForward, GroupNormGrads

# The table has names of any kind, of which these are the literals.
NEEDS: tuple[GroupNeed, ...] = tuple(map(operand_of, TABLE.backward_results))  # type: ignore[arg-type]


Scalars = tuple[Any, ...]  # what `forward_scalars` and `backward_scalars` return


class _NumGroups(Enum):
    EACH_CHANNEL = auto()


# In place of a number of groups: as many as channels. torch.compile takes no bare object for this.
EACH_CHANNEL: Final = _NumGroups.EACH_CHANNEL


@dataclass(frozen=True, slots=True, eq=False)
class GroupNormSpec:
    """The scalars of both directions of a group norm."""

    function: str
    num_groups: int | None  # None: EACH_CHANNEL
    activation: str
    channel_axis: int

    def statistics_shape(self, x_shape: Shape) -> Shape:
        groups = x_shape[self.channel_axis] if self.num_groups is None else self.num_groups
        return (x_shape[0], groups)

    def leading_axes(self, ndim: int) -> int:
        return 0

    def options(self, x: Any) -> dict[str, Any]:
        """Return the keyword arguments that both directions of `group_norm` have, for an x."""
        groups = x.shape[self.channel_axis] if self.num_groups is None else self.num_groups
        options = {"num_groups": groups, "activation": self.activation}
        return options | {"channel_axis": self.channel_axis}


@dataclass(frozen=True, slots=True, eq=False)
class GroupForwardSpec(GroupNormSpec):
    eps: float
    dtype: DType | None
    saves: bool  # mean and rstd are outputs

    def result_dtypes(self, dtypes: DTypes) -> dict[str, DType]:
        """Return the dtypes of the results that are written, of those of the inputs."""
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

    def result_dtypes(self, dtypes: DTypes) -> dict[str, DType]:
        """Return the dtypes of the gradients that are written, of those of the inputs."""
        return {f"d{name}": dtype for name in self.needs if (dtype := dtypes[name])}

    @property
    def output_names(self) -> tuple[str, ...]:
        return tuple(f"out.{name}" for name in GroupNormGrads._fields)


def forward_scalars(
    function: str,
    num_groups: object,
    activation: object,
    channel_axis: int,
    *,
    eps: float = 0.0,
    dtype: object = None,
    saves: bool = False,
) -> Scalars:
    """Return a forward's scalars as the caller gives them, for `parse_forward`."""
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
    """Return a backward's scalars, as `forward_scalars` does."""
    return (function, num_groups, activation, channel_axis, needs, accumulate)


@memoize(typed=True)
def parse_forward(
    function: str,
    num_groups: object,
    activation: object,
    channel_axis: object,
    eps: object,
    dtype: object,
    saves: bool,
) -> GroupForwardSpec:
    """Check a forward's scalars, as the caller gives them; `num_groups` may be EACH_CHANNEL."""
    norm = _parse_norm(function, num_groups, activation, channel_axis)
    eps = validate.epsilon(function, eps)
    dtype = parse_optional_dtype(function, "dtype", dtype)
    return GroupForwardSpec(**norm, eps=eps, dtype=dtype, saves=saves)


@memoize(typed=True)
def parse_backward(
    function: str,
    num_groups: object,
    activation: object,
    channel_axis: object,
    needs: object,
    accumulate: object,
) -> GroupBackwardSpec:
    """Check a backward's scalars, as `parse_forward` does."""
    norm = _parse_norm(function, num_groups, activation, channel_axis)
    needs = validate.names(function, "needs", needs, NEEDS)
    accumulate = validate.flag(function, "accumulate", accumulate)
    return GroupBackwardSpec(**norm, needs=needs, accumulate=accumulate)


@memoize()
def backward_spec(
    forward: GroupForwardSpec, _: object, needs: tuple[str, ...]
) -> GroupBackwardSpec:
    """Return the spec of a forward's backward, as that of row norms, but without x's dtype."""
    norm = {one.name: getattr(forward, one.name) for one in fields(GroupNormSpec)}
    return GroupBackwardSpec(**norm, needs=needs, accumulate=False)


def _parse_norm(
    function: str, num_groups: object, activation: object, channel_axis: object
) -> dict[str, Any]:
    """Return the fields of GroupNormSpec."""
    each = num_groups is EACH_CHANNEL
    name = "identity" if activation is None else activation
    return {
        "function": function,
        "num_groups": None if each else validate.integer(function, "num_groups", num_groups),
        "activation": validate.activation(function, "activation", name),
        "channel_axis": validate.integer(function, "channel_axis", channel_axis),
    }
