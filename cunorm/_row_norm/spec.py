# SPDX-License-Identifier: MIT
"""The checked scalars of a row norm's call: RowForwardSpec and RowBackwardSpec."""

import math
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, NamedTuple, get_args

from cunorm._core import validate
from cunorm._core.dtypes import DType, compute_type, parse_optional_dtype, promoted
from cunorm._core.memo import axis_key, axis_of, typed_key
from cunorm._core.operands import DTypes, Specs, operand_of, present
from cunorm._core.plan import Checks
from cunorm._core.tensor import Shape
from cunorm._core.types import Axis, GatePosition, Need
from cunorm._row_norm.kernels import TABLE, Formula
from cunorm._row_norm.order import row_order
from cunorm.results import NormForward, NormGrads

# mypy does not know that these are the literals of `Need`.
NEEDS: tuple[Need, ...] = tuple(dict.fromkeys(map(operand_of, TABLE.backward_results)))  # type: ignore[arg-type]
GATE_POSITIONS: tuple[GatePosition, ...] = get_args(GatePosition)
GATE_DEFAULTS = {"gate_activation": "silu", "gate_position": "post"}
# The options with which published models use `rms_norm`.
MODELS: dict[str, dict[str, Any]] = {
    "Gemma": {"weight_offset": 1.0},
    "Llama": {"round_before_weight": True},
}


WITHOUT_BRANCH = ("rms_norm", "layer_norm", "normalize")


@dataclass(frozen=True, slots=True, eq=False)
class RowNormSpec:
    """The scalars that both directions of a row norm have, in the order of `RowOptions`."""

    function: str
    axis: Axis
    groups: int
    weight_offset: float
    round_before_weight: bool
    gate_activation: str
    gate_position: str
    center: bool
    c: float | None

    def formula(self, operands: Specs, x_dtype: DType, compute: DType) -> Formula:
        """Return the formula of a build for the operands that are present."""
        gate, weight = operands["gate"] is not None, operands.get("weight") is not None
        return Formula(
            center=self.center,
            activation=self.gate_activation if gate else "identity",
            pre_gate=gate and self.gate_position == "pre",
            branch_gate=gate and self.gate_position == "branch",
            weight_offset=weight and self.weight_offset != 0.0,
            rounded=x_dtype if self.round_before_weight and x_dtype is not compute else None,
        )

    def statistics_shape(self, x_shape: Shape) -> Shape:
        order, leading_axes = row_order(self.function, x_shape, self.axis)
        leading = [x_shape[axis] for axis in order or range(len(x_shape))][:leading_axes]
        return (*leading, *([self.groups] if self.groups > 1 else []))

    def leading_axes(self, ndim: int) -> int:
        return self.axis % ndim if isinstance(self.axis, int) else 0

    def check_options(self, inputs: Specs) -> None:
        """Check that options of a gate are set only if there is a gate."""
        for name, default in GATE_DEFAULTS.items() if inputs["gate"] is None else ():
            value = getattr(self, name)
            if value != default:
                raise ValueError(
                    f"{self.function}: {name} is {value!r}, expected {default!r} as gate is None: "
                    "leave it out"
                )

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments that both directions of `normalize` take."""
        return {one.name: getattr(self, one.name) for one in fields(RowNormSpec)[1:]}

    def k(self, width: int) -> float:
        """Return the factor of the normalised row, k = c / sqrt(width)."""
        return 1.0 if self.c is None else self.c / math.sqrt(width)


@dataclass(frozen=True, slots=True, eq=False)
class RowForwardSpec(RowNormSpec):
    eps: float
    dtype: DType | None
    residual_dtype: DType | None
    saves: bool  # mean and rstd are outputs
    # Whether x is the new stream if there is no residual. None: the function has no stream.
    streams: bool | None
    eps_of_sum: bool  # eps is added to the sum of squares, not to their mean

    def result_dtypes(self, dtypes: DTypes) -> dict[str, DType]:
        """Return the dtypes of the results that are written.

        y has the given array's dtype, else the spec's, else x's (promoted with weight's if rows are
        rounded before weight). The stream has the spec's, else residual's, else the given array's.
        """
        x, residual = present(dtypes["x"]), dtypes.get("residual")
        stream = self.residual_dtype or residual or dtypes.get("residual_out")
        is_gated = self.gate_position == "branch"
        stream = x if is_gated and stream is None else stream
        own = self.own_dtype(x, dtypes.get("weight"))
        results = {"y": dtypes.get("y") or self.dtype or own}
        if stream is not None and (residual is not None or is_gated or stream is not x):
            results["residual_out"] = stream
        if self.saves:
            compute = compute_type(x, stream)
            results |= {"mean": compute, "rstd": compute} if self.center else {"rstd": compute}
        return results

    def check_options(self, inputs: Specs) -> None:
        RowNormSpec.check_options(self, inputs)  # super() fails in a dataclass with slots
        if self.gate_position == "branch" and self.function in WITHOUT_BRANCH:
            raise ValueError(
                f"{self.function}: gate_position is 'branch', expected 'pre' or 'post': a branch "
                f"is what add_{self.function} adds to the stream"
            )

    def own_dtype(self, x: DType, weight: DType | None) -> DType:
        """Return y's dtype if neither an option nor a given array decides it."""
        return promoted(x, weight) if self.round_before_weight and weight else x

    def check_given(self, inputs: Specs, given: Specs) -> None:
        """Check the dtypes of results that options decide."""
        name, *_ = self.output_names
        validate.agreed_dtype(self.function, "dtype", self.dtype, name, given["y"])

    def build_fields(self, dtypes: DTypes) -> dict[str, Any]:
        """Return the fields of a build's types that operands do not decide."""
        return {}

    @property
    def output_names(self) -> tuple[str, ...]:
        is_tuple = self.saves or self.streams
        return tuple(f"out.{name}" if is_tuple else "out" for name in NormForward._fields)

    def rounding_dtype(self, x: DType) -> DType:
        """Return the dtype to which rows are rounded before weight, if they are."""
        return x

    def numbers(self, width: int) -> tuple[float, ...]:
        """Return the numbers in the kernel's arguments."""
        return (self.k(width), self.mean_eps(width), self.weight_offset)

    def mean_eps(self, width: int) -> float:
        """Return the eps that is added to the mean of squares."""
        return self.eps / width if self.eps_of_sum else self.eps


@dataclass(frozen=True, slots=True, eq=False)
class RowBackwardSpec(RowNormSpec):
    x_dtype: DType | None
    needs: tuple[str, ...]
    accumulate: bool

    output_names = tuple(f"out.{name}" for name in NormGrads._fields)

    def numbers(self, width: int) -> tuple[float, ...]:
        """Return the numbers in the kernel's arguments."""
        return (self.k(width), self.weight_offset)

    def result_dtypes(self, dtypes: DTypes) -> dict[str, DType]:
        """Return the dtypes of the gradients that are written.

        If both dx and dresidual have x's dtype, one is written and returned as both.
        """
        x = present(dtypes["x"])
        dx, results = self.x_dtype or dtypes["dx"] or x, {}
        are_two = dx is not x or (self.gate_position == "branch" and dtypes["gate"] is not None)
        if "x" in self.needs and (are_two or dtypes["dresidual"] is None):
            results["dx"] = dx
        for name in self.needs:
            if name != "x" and (operand := dtypes[name]) is not None:
                results[f"d{name}"] = operand
        if "x" in self.needs and are_two:
            results["dresidual"] = x
        return results


def check_mean(spec: RowNormSpec, inputs: Specs) -> None:
    """Check that the mean, and its correction, are given if rows are centred, and only then."""
    if spec.center and inputs["mean"] is None:
        source = "that combine_moments" if isinstance(spec, RowForwardSpec) else "that the forward"
        raise ValueError(
            f"{spec.function}: mean is None, expected the mean {source} returned, as rows are "
            "centred"
        )
    for name in ("mean", "correction", "sum_dr") if not spec.center else ():
        argument = f"sums.{name}" if name == "sum_dr" else name
        validate.absent(spec.function, argument, inputs.get(name), "center is False")


def check_sums(spec: RowNormSpec, reads: Specs) -> None:
    """Check that sum_dr is given if rows are centred and sums are read."""
    if spec.center and reads.get("sum_r_dr") is not None and reads["sum_dr"] is None:
        raise ValueError(
            f"{spec.function}: sums.sum_dr is None, expected that of normalize_backward_sums with "
            "center=True, as rows are centred"
        )


class RowOptions(NamedTuple):
    """The options that all row norms except l2_norm have, in the order of their keywords."""

    axis: Axis
    groups: int
    weight_offset: float = 0.0
    round_before_weight: bool = False
    gate_activation: str = GATE_DEFAULTS["gate_activation"]
    gate_position: str = GATE_DEFAULTS["gate_position"]


# A RowOptions, or a plain tuple, because a tuple is made in a tenth of the time.
Options = tuple[Axis, int, float, bool, str, str]
Scalars = tuple[Any, ...]  # the result of `forward_scalars` or `backward_scalars`

UNIT_LENGTH = typed_key(1.0)  # c of both directions of l2_norm
_UNIT = (*RowOptions(-1, 1)[2:], False, UNIT_LENGTH)  # from weight_offset to c


def forward_scalars(
    function: str,
    options: Options,
    eps: float = 0.0,
    dtype: object = None,
    residual_dtype: object = None,
    *,
    center: bool = False,
    c: object = None,
    saves: bool = False,
    streams: bool = False,
) -> Scalars:
    """Return a forward's scalars as the caller gives them, except c, which is a `typed_key`."""
    # A tuple of names is faster: "(function, *options, ...)" takes half as long again.
    axis, groups, offset, rounded, gate, position = options
    axis = axis if type(axis) is int else axis_key(axis)
    return (function, axis, groups, offset, rounded, gate, position, center, c, eps, dtype,
            residual_dtype, saves, streams, False)  # fmt: skip


def backward_scalars(
    function: str,
    options: Options,
    *,
    center: bool = False,
    c: object = None,
    x_dtype: object = None,
    needs: object = NEEDS,
    accumulate: bool = False,
) -> Scalars:
    return (function, axis_key(options[0]), *options[1:], center, c, x_dtype, needs, accumulate)


def l2_scalars(
    function: str, axis: Axis, groups: int, *, eps: float, dtype: object, saves: bool = False
) -> Scalars:
    """Return the scalars of an L2 norm's forward in the way that `forward_scalars` does."""
    # There is no stream, and eps is added to the sum of squares.
    return (function, axis_key(axis), groups, *_UNIT, eps, dtype, None, saves, None, True)


# The checks of scalars by name. Scalars that the caller does not give have no check.
CHECKS: Checks = {
    "axis": lambda function, argument, key: validate.axes(function, argument, axis_of(key)),
    "groups": validate.integer,
    "weight_offset": lambda *argument: validate.finite(*argument) + 0.0,  # -0.0 becomes 0.0
    "round_before_weight": validate.flag,
    "gate_activation": validate.activation,
    "gate_position": partial(validate.choice, allowed=GATE_POSITIONS),
    "center": validate.flag,
    "c": lambda function, _, c: (
        c and validate.finite(function, "c", c[0], "a finite number or None")
    ),
    "eps": lambda function, _, eps: validate.epsilon(function, eps),
    "dtype": parse_optional_dtype,
    "residual_dtype": parse_optional_dtype,
    "x_dtype": parse_optional_dtype,
    "needs": partial(validate.names, allowed=NEEDS),
    "accumulate": validate.flag,
}
