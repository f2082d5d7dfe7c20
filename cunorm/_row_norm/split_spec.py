# SPDX-License-Identifier: MIT
"""The checked scalars of calls for rows that are split."""

from dataclasses import dataclass, fields
from typing import Any

from cunorm._core import validate
from cunorm._core.dtypes import FLOAT32, FLOAT64, DType, compute_type, parse_optional_dtype
from cunorm._core.memo import axis_of, memoize
from cunorm._core.operands import DTypes, Specs, present
from cunorm._core.plan import Checks, SpecT
from cunorm._core.tensor import Shape
from cunorm._row_norm.spec import (
    CHECKS,
    GATE_DEFAULTS,
    RowBackwardSpec,
    RowForwardSpec,
    RowNormSpec,
    check_mean,
)
from cunorm.results import Moments, Statistics, Sums

_OF_MOMENTS = tuple(name for name in Moments._fields if name != "count")


@dataclass(frozen=True, slots=True, eq=False)
class RowMomentsSpec(RowForwardSpec):
    output_names = tuple(f"out.{name}" for name in _OF_MOMENTS)

    def result_dtypes(self, dtypes: DTypes) -> dict[str, DType]:
        found = RowForwardSpec.result_dtypes(self, dtypes)
        del found["y"]
        compute = compute_type(present(dtypes["x"]), found.get("residual_out"))
        names = ("mean", "m2", "correction") if self.center else ("m2",)
        return dict.fromkeys(names, compute) | found

    def check_options(self, inputs: Specs) -> None:
        position, function = self.gate_position, self.function
        if position == "post":
            raise ValueError(f"{function}: gate_position is 'post', expected 'pre' or 'branch'")
        if inputs["gate"] is None and (position != "pre" or self.gate_activation != "silu"):
            raise ValueError(
                f"{function}: gate_position is {position!r} and gate_activation is "
                f"{self.gate_activation!r}, expected 'pre' and 'silu' as gate is None: leave them "
                "out"
            )

    def check_given(self, inputs: Specs, given: Specs) -> None:
        """All given results have checks of their own."""


@dataclass(frozen=True, slots=True, eq=False)
class RowGivenSpec(RowForwardSpec):
    """The scalars of a forward that is given the statistics of rows."""

    count: int | None  # the number of elements of a whole row; only c needs it
    x_dtype: DType | None  # to which rows are rounded before weight, if not to x's

    output_names = ("out",)

    def rounding_dtype(self, x: DType) -> DType:
        return self.x_dtype or x

    def own_dtype(self, x: DType, weight: DType | None) -> DType:
        return RowForwardSpec.own_dtype(self, self.x_dtype or x, weight)

    def check_options(self, inputs: Specs) -> None:
        RowForwardSpec.check_options(self, inputs)
        check_statistics(self, inputs)
        if self.c is not None:
            _check_count(self.function, self.count)

    def k(self, width: int) -> float:
        return RowForwardSpec.k(self, self.count or width)


@dataclass(frozen=True, slots=True, eq=False)
class RowSumsSpec(RowNormSpec):
    output_names = tuple(f"out.{name}" for name in Sums._fields)

    def result_dtypes(self, dtypes: DTypes) -> dict[str, DType]:
        compute = present(dtypes["rstd"])
        return dict.fromkeys(("sum_dr", "sum_r_dr") if self.center else ("sum_r_dr",), compute)


@dataclass(frozen=True, slots=True, eq=False)
class RowGivenSumsSpec(RowBackwardSpec):
    count: int | None

    def check_options(self, inputs: Specs) -> None:
        RowBackwardSpec.check_options(self, inputs)
        _check_count(self.function, self.count)

    def k(self, width: int) -> float:
        return RowBackwardSpec.k(self, present(self.count))

    def numbers(self, width: int) -> tuple[float, ...]:
        return (*RowBackwardSpec.numbers(self, width), present(self.count))


def _check_count(function: str, count: int | None) -> None:
    if count is None:
        raise ValueError(
            f"{function}: count is None, expected the number of elements of a whole row, as rows "
            "may be split"
        )


@dataclass(frozen=True, slots=True, eq=False)
class CombineSpec:
    function: str
    eps: float
    count: int | None  # the number of elements of each part; None: an array has these numbers

    output_names = tuple(f"out.{name}" for name in Statistics._fields)

    def result_dtypes(self, dtypes: DTypes) -> dict[str, DType]:
        names = ("rstd",) if dtypes["mean"] is None else ("mean_out", "rstd", "correction_out")
        return dict.fromkeys(names, present(dtypes["m2"]))

    def statistics_shape(self, stacked: Shape) -> Shape:
        return stacked[1:]

    def leading_axes(self, ndim: int) -> int:
        return 0


def check_statistics(spec: RowNormSpec, inputs: Specs) -> None:
    """Check that given statistics are those that the norm needs, and their dtypes."""
    check_mean(spec, inputs)
    rstd = present(inputs["rstd"]).dtype
    if rstd not in (FLOAT32, FLOAT64):
        raise TypeError(f"{spec.function}: rstd has dtype {rstd}, expected float32 or float64")
    for name in ("mean", "correction"):
        one = inputs.get(name)
        if one is not None and one.dtype is not rstd:
            raise TypeError(
                f"{spec.function}: {name} has dtype {one.dtype}, expected {rstd}, that of rstd"
            )


def _count(function: str, argument: str, value: object) -> int | None:
    if value is None:
        return None
    count = validate.integer(function, argument, value)
    if count < 1:
        raise ValueError(f"{function}: {argument} is {count}, expected at least 1")
    return count


def _count_of_parts(function: str, argument: str, value: object) -> int | None:
    return _count(function, f"moments.{argument}", value)


SPLIT_CHECKS: Checks = CHECKS | {
    "axis": lambda function, argument, key: validate.integer(function, argument, axis_of(key)),
    "count": _count,
    "x_dtype": parse_optional_dtype,
}
COMBINE_CHECKS: Checks = SPLIT_CHECKS | {"count": _count_of_parts}


# --- the pieces of a norm of split rows -----------------------------------------------------------


@memoize()
def moments_spec(spec: RowForwardSpec) -> RowMomentsSpec:
    """Return the spec of the moments of a norm's rows; a post-gate changes none."""
    is_post = spec.gate_position == "post"
    gate = GATE_DEFAULTS | {"gate_position": "pre"} if is_post else {}
    return piece(RowMomentsSpec, spec, **gate, c=None, round_before_weight=False, dtype=None)


@memoize()
def combine_spec(spec: RowForwardSpec, width: int | None, count: int | None) -> CombineSpec:
    """Return the spec for parts of `count` elements, of rows of `width`."""
    eps = spec.eps if width is None else spec.mean_eps(width)
    return CombineSpec(spec.function, eps, count)


@memoize()
def given_spec(spec: RowForwardSpec, x_dtype: DType, count: int | None) -> RowGivenSpec:
    """Return the spec of the norm; x_dtype is the dtype of the x that was added to the stream."""
    own = _without_branch(spec) | {"residual_dtype": None, "streams": None, "saves": False}
    return piece(RowGivenSpec, spec, **own, x_dtype=x_dtype, count=count)


@memoize()
def sums_spec(spec: RowForwardSpec | RowBackwardSpec) -> RowSumsSpec:
    return piece(RowSumsSpec, spec, **_without_branch(spec), c=None, round_before_weight=False)


@memoize()
def given_sums_spec(
    spec: RowForwardSpec | RowBackwardSpec, count: int | None, **own: Any
) -> RowGivenSumsSpec:
    """Return the spec of the gradients; `own` has the scalars that a forward's spec lacks."""
    return piece(RowGivenSumsSpec, spec, **own, count=count)


def _without_branch(spec: RowNormSpec) -> dict[str, Any]:
    return GATE_DEFAULTS if spec.gate_position == "branch" else {}


def piece(kind: type[SpecT], spec: RowNormSpec, **own: object) -> SpecT:
    """Return a spec with own scalars and, for the others, those of the norm."""
    names = [one.name for one in fields(kind)]  # type: ignore[arg-type]  # a dataclass
    return kind(*(own[name] if name in own else getattr(spec, name) for name in names))
