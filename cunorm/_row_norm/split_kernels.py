# SPDX-License-Identifier: MIT
"""The operands of calls for rows that are split, and the builds of their kernels."""

from dataclasses import dataclass

from cunorm._core.build import Macros, cuda_bool
from cunorm._core.dtypes import FLOAT64
from cunorm._core.operands import Kind, Operand, OperandTable, Slot
from cunorm._row_norm.kernels import FORWARD_INPUTS, TABLE, BackwardTypes, ForwardTypes
from cunorm._row_norm.row_kernel import RowKernel

_MEAN, _M2, _CORRECTION = (Operand(name, Kind.STATISTIC) for name in ("mean", "m2", "correction"))
_RSTD = Operand("rstd", Kind.STATISTIC, is_required=True)
_X, _WEIGHT, _BIAS, _GATE, _RESIDUAL = FORWARD_INPUTS

MOMENTS_TABLE = OperandTable(
    inputs=(_X, _GATE, _RESIDUAL),
    results=(_MEAN, _M2, _CORRECTION, Operand("residual_out", Kind.LIKE_X, argument="residual")),
)
COMBINED_TABLE = OperandTable(
    inputs=[
        Operand(name, Kind.STATISTIC, is_required=name == "m2", argument=f"moments.{name}")
        for name in ("m2", "mean", "correction", "count")
    ],
    results=(
        Operand("mean_out", Kind.STATISTIC, argument="mean"),
        _RSTD,
        Operand("correction_out", Kind.STATISTIC, argument="correction"),
    ),
)
GIVEN_TABLE = OperandTable(
    inputs=(_X, _WEIGHT, _BIAS, _GATE, _MEAN, _RSTD, _CORRECTION),
    results=(Operand("y", Kind.LIKE_X, is_required=True),),
)
_DY, *_ = TABLE.backward_inputs
_SUMS = (
    Slot("sum_dr", "sum_dr", Kind.STATISTIC, is_required=False),
    Slot("sum_r_dr", "sum_r_dr", Kind.STATISTIC, is_required=True),
)
_GIVEN_SUMS = tuple(one._replace(argument=f"sums.{one.argument}") for one in _SUMS)
_OF_ROWS = tuple(one for one in GIVEN_TABLE.forward_inputs if one.name != "bias")


def _macros(of_rows: Macros, **flags: bool) -> Macros:
    return (*of_rows, *((name.upper(), cuda_bool(flag)) for name, flag in flags.items()))


@dataclass(frozen=True, kw_only=True)
class MomentsTypes(ForwardTypes):
    inputs, results = MOMENTS_TABLE.forward_inputs, MOMENTS_TABLE.forward_results

    def macros(self) -> Macros:
        return _macros(super().macros(), finds_moments=True, given_statistics=False)

    def more_registers(self, threads: int, capability: int) -> int:
        """Return an estimate: in float64, storing the moments of a sum takes two more."""
        return 8 if self.compute is FLOAT64 and self.residual is not None else 0


@dataclass(frozen=True, kw_only=True)
class GivenTypes(ForwardTypes):
    inputs, results = GIVEN_TABLE.forward_inputs, GIVEN_TABLE.forward_results

    def macros(self) -> Macros:
        return _macros(super().macros(), finds_moments=False, given_statistics=True)


@dataclass(frozen=True, kw_only=True)
class SumsTypes(BackwardTypes):
    inputs, results = (_DY, *_OF_ROWS), _SUMS

    def macros(self) -> Macros:
        return _macros(super().macros(), finds_sums=True, given_sums=False)


@dataclass(frozen=True, kw_only=True)
class GivenSumsTypes(BackwardTypes):
    inputs = (*TABLE.backward_inputs, GIVEN_TABLE.forward_inputs[-1], *_GIVEN_SUMS)
    results = TABLE.backward_results

    def macros(self) -> Macros:
        return _macros(super().macros(), finds_sums=False, given_sums=True)


class MomentsKernel(RowKernel):
    """A row norm's kernel that finds the moments of rows."""

    forward_types = MomentsTypes


class GivenKernel(RowKernel):
    """A row norm's kernel that is given the statistics of rows."""

    forward_types = GivenTypes
