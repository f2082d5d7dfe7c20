# SPDX-License-Identifier: MIT
"""The checked scalars of calls for rows that are split."""

from dataclasses import dataclass

from cunorm._core import validate
from cunorm._core.dtypes import DType, compute_type, parse_optional_dtype
from cunorm._core.operands import DTypes, Specs, present
from cunorm._core.plan import Checks
from cunorm._core.tensor import Shape
from cunorm._row_norm.spec import (
    CHECKS,
    RowBackwardSpec,
    RowForwardSpec,
    RowNormSpec,
    Scalars,
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

    count: int | None  # the number of elements of a whole row, if it is not that of x's rows
    x_dtype: DType | None  # to which rows are rounded before weight, if not to x's

    output_names = ("out",)

    def rounding_dtype(self, x: DType) -> DType:
        return self.x_dtype or x

    def own_dtype(self, x: DType, weight: DType | None) -> DType:
        return RowForwardSpec.own_dtype(self, self.x_dtype or x, weight)

    def check_options(self, inputs: Specs) -> None:
        RowForwardSpec.check_options(self, inputs)
        check_mean(self, inputs)

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

    def k(self, width: int) -> float:
        return RowBackwardSpec.k(self, self.count or width)

    def numbers(self, width: int) -> tuple[float, ...]:
        return (*RowBackwardSpec.numbers(self, width), self.count or width)


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


def _count(function: str, argument: str, value: object) -> int | None:
    if value is None:
        return None
    count = validate.integer(function, argument, value)
    if count < 1:
        raise ValueError(f"{function}: count is {count}, expected at least 1")
    return count


SPLIT_CHECKS: Checks = CHECKS | {"count": _count, "x_dtype": parse_optional_dtype}


def given_scalars(forward: Scalars, count: object, x_dtype: object = None) -> Scalars:
    """Return the scalars of a norm that is given statistics, from those of the norm."""
    return (*forward, count, x_dtype)
