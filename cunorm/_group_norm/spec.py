# SPDX-License-Identifier: MIT
"""The scalars of a group norm's call, checked: GroupForwardSpec and GroupBackwardSpec."""

from dataclasses import dataclass, fields
from enum import Enum, auto
from typing import Any, Final

from cunorm._core import validate
from cunorm._core.dtypes import DType, parse_optional_dtype
from cunorm._core.memo import memoize
from cunorm.results import GroupNormForward, GroupNormGrads

NEEDS = ("x", "weight", "bias")


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

    @property
    def output_names(self) -> tuple[str, ...]:
        return tuple(f"out.{name}" if self.saves else "out" for name in GroupNormForward._fields)


@dataclass(frozen=True, slots=True, eq=False)
class GroupBackwardSpec(GroupNormSpec):
    needs: tuple[str, ...]
    accumulate: bool

    @property
    def output_names(self) -> tuple[str, ...]:
        return tuple(f"out.{name}" for name in GroupNormGrads._fields)


@memoize(typed=True)
def parse_forward(
    function: str,
    num_groups: Any,
    activation: Any,
    channel_axis: Any,
    eps: Any,
    dtype: Any,
    saves: bool = False,
) -> GroupForwardSpec:
    """Check a forward's scalars, as the caller gives them; `num_groups` may be EACH_CHANNEL."""
    norm = _parse_norm(function, num_groups, activation, channel_axis)
    eps = validate.epsilon(function, eps)
    dtype = parse_optional_dtype(function, "dtype", dtype)
    return GroupForwardSpec(**norm, eps=eps, dtype=dtype, saves=saves)


@memoize(typed=True)
def parse_backward(
    function: str,
    num_groups: Any,
    activation: Any,
    channel_axis: Any,
    needs: Any,
    accumulate: Any = False,
) -> GroupBackwardSpec:
    """Check a backward's scalars, as `parse_forward` does."""
    norm = _parse_norm(function, num_groups, activation, channel_axis)
    needs = validate.names(function, "needs", needs, NEEDS)
    accumulate = validate.flag(function, "accumulate", accumulate)
    return GroupBackwardSpec(**norm, needs=needs, accumulate=accumulate)


@memoize()
def backward_spec(forward: GroupForwardSpec, _: Any, needs: tuple[str, ...]) -> GroupBackwardSpec:
    """Return the spec of a forward's backward, as that of row norms, but without x's dtype."""
    norm = {one.name: getattr(forward, one.name) for one in fields(GroupNormSpec)}
    return GroupBackwardSpec(**norm, needs=needs, accumulate=False)


def _parse_norm(
    function: str, num_groups: Any, activation: Any, channel_axis: Any
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
