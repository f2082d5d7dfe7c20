# SPDX-License-Identifier: MIT
"""The scalars of a row norm's call, checked: RowForwardSpec and RowBackwardSpec."""

import math
from dataclasses import dataclass, fields
from typing import Any

from cunorm._core import validate
from cunorm._core.dtypes import DType, parse_optional_dtype, promoted
from cunorm._core.memo import memoize, typed_key
from cunorm._core.operands import Specs
from cunorm._core.tensor import OptionalSpec
from cunorm._row_norm.kernels import Formula
from cunorm.results import NormForward, NormGrads

NEEDS = ("x", "weight", "bias", "gate")
GATE_DEFAULTS = {"gate_activation": "silu", "gate_position": "post"}
# Options of `rms_norm` with which published models use it.
MODELS: dict[str, dict[str, Any]] = {
    "Gemma": {"weight_offset": 1.0},
    "Llama": {"round_before_weight": True},
}


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

    def formula(self, operands: Specs, x_dtype: DType, compute: DType) -> Formula:
        """Return the formula of a build, with or without a gate and a weight."""
        gate, weight = operands["gate"] is not None, operands["weight"] is not None
        return Formula(
            center=self.center,
            activation=self.gate_activation if gate else "identity",
            pre_gate=gate and self.gate_position == "pre",
            weight_offset=weight and self.weight_offset != 0.0,
            rounded=x_dtype if self.round_before_weight and x_dtype is not compute else None,
        )

    def check_gate(self, gate: OptionalSpec) -> None:
        """Check that the options of a gate are not set without one."""
        for name, default in GATE_DEFAULTS.items() if gate is None else ():
            value = getattr(self, name)
            if value != default:
                raise ValueError(
                    f"{self.function}: {name} is {value!r}, expected {default!r} as gate is None"
                )

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments that both directions of `normalize` have."""
        return {name: getattr(self, name) for name in NORM_PARAMS[:-1]}

    def scale(self, width: int) -> float:
        """Return k = c / sqrt(width), by which the normalised row is multiplied."""
        return 1.0 if self.c is None else self.c / math.sqrt(width)


@dataclass(frozen=True, slots=True, eq=False)
class RowForwardSpec(RowNormSpec):
    eps: float
    dtype: DType | None
    residual_dtype: DType | None = None
    saves: bool = False  # mean and rstd are outputs
    # Whether without residual x is the new residual stream; None where there is never a stream.
    streams: bool | None = False
    eps_of_sum: bool = False  # eps is added to the sum of squares, not to their mean

    def y_dtype(self, x: DType, weight: DType | None) -> DType:
        """Return y's dtype, where no array is given for it."""
        if self.dtype is None and self.round_before_weight and weight is not None:
            return promoted(x, weight)
        return self.dtype or x

    @property
    def output_names(self) -> tuple[str, ...]:
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
    x_dtype: DType | None
    needs: tuple[str, ...]
    accumulate: bool

    @property
    def output_names(self) -> tuple[str, ...]:
        return tuple(f"out.{name}" for name in NormGrads._fields)


# The scalars after the function: those of both directions, then those that a forward adds.
NORM_PARAMS = (*(one.name for one in fields(RowNormSpec)[1:]), "has_weight")
_FORWARD_PARAMS = tuple(one.name for one in fields(RowForwardSpec)[len(fields(RowNormSpec)) :])
# The last scalars of a forward: `saves` and `streams`; of l2_norm all from `residual_dtype` on.
ADD_NORM, NORM_FORWARD = (False, True), (True, False)
L2_NORM, L2_NORM_FORWARD = (None, False, False, True), (None, True, None, True)
# The scalars of l2_norm in both directions, from `round_before_weight` on: rows of length 1.
L2_ROWS = (False, *GATE_DEFAULTS.values(), typed_key(1.0), 0.0, False)


@memoize(typed=True)
def parse_forward(function: str, *scalars: Any) -> RowForwardSpec:
    """Check a forward's scalars, as the caller gives them; c is its `typed_key`."""
    norm, rest = _parse_norm(function, scalars)
    own = dict(zip(_FORWARD_PARAMS[: len(rest)], rest, strict=True))  # the last have defaults
    own["eps"] = validate.epsilon(function, own["eps"])
    for name in ("dtype", "residual_dtype"):
        own[name] = parse_optional_dtype(function, name, own.get(name))
    return RowForwardSpec(**norm, **own)


@memoize(typed=True)
def parse_backward(function: str, *scalars: Any) -> RowBackwardSpec:
    """Check a backward's scalars, as `parse_forward` does; all but the norm's may be left out."""
    norm, rest = _parse_norm(function, scalars)
    x_dtype, needs, accumulate = rest or (None, NEEDS, False)
    return RowBackwardSpec(
        **norm,
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


def _parse_norm(function: str, scalars: tuple[Any, ...]) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """Return the fields of RowNormSpec, and the scalars that are not of both directions."""
    norm, rest = scalars[: len(NORM_PARAMS)], scalars[len(NORM_PARAMS) :]
    center, axis, groups, rounds, activation, position, c, weight_offset, has_weight = norm
    found = {
        "function": function,
        "center": validate.flag(function, "center", center),
        "axis": validate.integer(function, "axis", axis),
        "groups": validate.integer(function, "groups", groups),
        "round_before_weight": validate.flag(function, "round_before_weight", rounds),
        "gate_activation": validate.activation(function, "gate_activation", activation),
        "gate_position": validate.choice(function, "gate_position", position, ("pre", "post")),
        "c": validate.parse_c(function, c and c[0]),
    }
    offset = validate.finite(function, "weight_offset", weight_offset)
    if offset != 0.0 and not has_weight:
        raise ValueError(
            f"{function}: weight_offset is {weight_offset!r}, expected 0 without a weight"
        )
    return found | {"weight_offset": offset + 0.0}, rest  # -0.0 equals 0.0
