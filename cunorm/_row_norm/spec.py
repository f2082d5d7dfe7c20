# SPDX-License-Identifier: MIT
"""The scalars of a row norm's call, checked: RowForwardSpec and RowBackwardSpec."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from cunorm._core import validate
from cunorm._core.dtypes import DType, parse_optional_dtype, promoted
from cunorm._core.memo import TypedKey, memoize
from cunorm._row_norm.kernels import Formula
from cunorm.results import NormForward, NormGrads

NEEDS = ("x", "weight", "bias", "gate")
# Options of `rms_norm` with which published models use it.
MODELS: dict[str, dict[str, Any]] = {
    "Gemma": {"weight_offset": 1.0},
    "Llama": {"round_before_weight": True},
}
_POSITIONS = ("pre", "post")


@dataclass(frozen=True, slots=True, eq=False)
class RowNormSpec:
    """The scalars of both directions of a row norm."""

    function: str
    center: bool
    axis: int
    groups: int
    round_before_weight: bool
    gate_activation: str
    gate_position: str
    c: float | None
    weight_offset: float

    def formula(self, *, gate: bool, weight: bool, x_dtype: DType, compute: DType) -> Formula:
        """Return the formula of a build, with or without a gate and a weight."""
        return Formula(
            center=self.center,
            activation=self.gate_activation if gate else "identity",
            pre_gate=gate and self.gate_position == "pre",
            weight_offset=weight and self.weight_offset != 0.0,
            rounded=x_dtype if self.round_before_weight and x_dtype is not compute else None,
        )

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments that both directions of `normalize` have."""
        return {name: getattr(self, name) for name in NORM_PARAMS[:-1]}

    def scale(self, width: int) -> float:
        """Return k = c / sqrt(width), by which the normalised row is multiplied."""
        return 1.0 if self.c is None else self.c / math.sqrt(width)


@dataclass(frozen=True, slots=True, eq=False)
class RowForwardSpec(RowNormSpec):
    """The scalars of a forward."""

    eps: float
    eps_of_sum: bool  # eps is added to the sum of squares, not to their mean
    dtype: DType | None
    residual_dtype: DType | None
    saves: bool  # mean and rstd are outputs
    # Whether without residual x is the new residual stream; None where there is never a stream.
    streams: bool | None

    def y_dtype(self, x: DType, weight: DType | None) -> DType:
        """Return y's dtype, where no array is given for it."""
        if self.dtype is None and self.round_before_weight and weight is not None:
            return promoted(x, weight)
        return self.dtype or x

    @property
    def output_names(self) -> tuple[str, ...]:
        """Return the caller's name for each output's array."""
        is_tuple = self.saves or self.streams
        return tuple(f"out.{name}" if is_tuple else "out" for name in NormForward._fields)

    @property
    def has_stream(self) -> bool:
        """Whether a residual stream is an output even if none is written: then it is x itself."""
        return bool(self.streams) or self.residual_dtype is not None

    def mean_eps(self, width: int) -> float:
        """Return the eps that is added to the mean of squares."""
        return self.eps / width if self.eps_of_sum else self.eps


@dataclass(frozen=True, slots=True, eq=False)
class RowBackwardSpec(RowNormSpec):
    """The scalars of a backward."""

    x_dtype: DType | None
    needs: tuple[str, ...]
    accumulate: bool

    @property
    def output_names(self) -> tuple[str, ...]:
        """Return the caller's name for each output's array."""
        return tuple(f"out.{name}" for name in NormGrads._fields)


# The scalars of both directions, after the function, in the order of `parse_forward`.
NORM_PARAMS = (*(one.name for one in fields(RowNormSpec)[1:]), "has_weight")


@memoize(typed=True)
def parse_forward(
    function: str,
    center: Any,
    axis: Any,
    groups: Any,
    round_before_weight: Any,
    gate_activation: Any,
    gate_position: Any,
    c: TypedKey,
    weight_offset: Any,
    has_weight: bool,
    eps: Any,
    dtype: Any = None,
    residual_dtype: Any = None,
    saves: bool = False,
    streams: bool | None = False,
    eps_of_sum: bool = False,
) -> RowForwardSpec:
    """Check a forward's scalars, as the caller gives them."""
    norm = (center, axis, groups, round_before_weight, gate_activation, gate_position)
    return RowForwardSpec(
        **_parse_norm(function, norm, c, weight_offset, has_weight),
        eps=validate.epsilon(function, eps),
        eps_of_sum=eps_of_sum,
        dtype=parse_optional_dtype(function, "dtype", dtype),
        residual_dtype=parse_optional_dtype(function, "residual_dtype", residual_dtype),
        saves=saves,
        streams=streams,
    )


@memoize(typed=True)
def parse_backward(
    function: str,
    center: Any,
    axis: Any,
    groups: Any,
    round_before_weight: Any,
    gate_activation: Any,
    gate_position: Any,
    c: TypedKey,
    weight_offset: Any,
    has_weight: bool,
    x_dtype: Any = None,
    needs: Any = NEEDS,
    accumulate: Any = False,
) -> RowBackwardSpec:
    """Check a backward's scalars, as the caller gives them."""
    norm = (center, axis, groups, round_before_weight, gate_activation, gate_position)
    return RowBackwardSpec(
        **_parse_norm(function, norm, c, weight_offset, has_weight),
        x_dtype=parse_optional_dtype(function, "x_dtype", x_dtype),
        needs=validate.names(function, "needs", needs, NEEDS),
        accumulate=validate.flag(function, "accumulate", accumulate),
    )


@memoize()
def backward_spec(
    forward: RowForwardSpec, x_dtype: DType | None, needs: tuple[str, ...]
) -> RowBackwardSpec:
    """Return the spec of the backward of a forward, which errors name by the forward's function."""
    norm = {one.name: getattr(forward, one.name) for one in fields(RowNormSpec)}
    return RowBackwardSpec(**norm, x_dtype=x_dtype, needs=needs, accumulate=False)


def _parse_norm(
    function: str, norm: tuple[Any, ...], c: TypedKey, weight_offset: Any, has_weight: bool
) -> dict[str, Any]:
    """Return the fields of RowNormSpec."""
    center, axis, groups, rounds, gate_activation, gate_position = norm
    return {
        "function": function,
        "center": validate.flag(function, "center", center),
        "axis": validate.integer(function, "axis", axis),
        "groups": validate.integer(function, "groups", groups),
        "round_before_weight": validate.flag(function, "round_before_weight", rounds),
        "gate_activation": validate.activation(function, "gate_activation", gate_activation),
        "gate_position": validate.choice(function, "gate_position", gate_position, _POSITIONS),
        "c": validate.length(function, c and c[0]),
        "weight_offset": _parse_offset(function, weight_offset, has_weight),
    }


def _parse_offset(function: str, weight_offset: object, has_weight: bool) -> float:
    """Return weight_offset as a float; without weight it has to be 0."""
    value = validate.finite(function, "weight_offset", weight_offset)
    if value != 0.0 and not has_weight:
        raise ValueError(
            f"{function}: weight_offset is {weight_offset!r}, expected 0 without a weight"
        )
    return value + 0.0  # -0.0 equals 0.0
