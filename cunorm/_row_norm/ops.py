# SPDX-License-Identifier: MIT
"""The row norms' OpDefs, and their kernels' work done by the NumPy reference."""

from collections.abc import Sequence
from math import prod
from typing import Any

from cunorm._core.dtypes import numpy_dtype
from cunorm._core.operands import SUMS
from cunorm._core.plan import OpDef
from cunorm._row_norm import plan
from cunorm._row_norm.spec import RowBackwardSpec, RowForwardSpec, parse_backward, parse_forward
from cunorm.reference import normalize_backward, normalize_forward
from cunorm.reference.rows import store
from cunorm.results import NormForward, NormGrads


def _forward_by_reference(spec: RowForwardSpec, arrays: Sequence[Any]) -> None:
    x, residual, gate, weight, bias, y, new_residual, mean, rstd = arrays
    exact = normalize_forward(
        *(x, weight, bias),
        residual=residual,
        residual_dtype=None if new_residual is None else new_residual.dtype,
        gate=gate,
        eps=spec.mean_eps(prod(x.shape[spec.axis :]) // spec.groups),
        **spec.options(),
    )
    store(new_residual, exact.residual)  # first, as y may be exactly x or residual
    store(y, exact.y)
    store(mean, exact.mean)
    store(rstd, exact.rstd)


def _backward_by_reference(spec: RowBackwardSpec, arrays: Sequence[Any]) -> None:
    dy, x, rstd, mean, d_residual, gate, weight, bias, *outputs = arrays
    of = zip(plan.OPERANDS, outputs, strict=True)
    exact = normalize_backward(
        *(dy, x, weight, bias),
        rstd=rstd,
        mean=mean,
        d_residual=d_residual,
        gate=gate,
        x_dtype=None if spec.x_dtype is None else numpy_dtype(spec.x_dtype),
        needs={operand for operand, output in of if output is not None},
        **spec.options(),
    )
    for name, output, gradient in zip(NormGrads._fields, outputs, exact, strict=True):
        store(output, gradient, added=spec.accumulate and name in SUMS)


ROW_FORWARD = OpDef(
    name="row_forward",
    inputs=plan.FORWARD_INPUTS,
    outputs=NormForward._fields,
    required=1,
    x=0,
    spec_type=RowForwardSpec,
    parse=parse_forward,
    plan=plan.plan_forward,
    reference=_forward_by_reference,
)
ROW_BACKWARD = OpDef(
    name="row_backward",
    inputs=plan.BACKWARD_INPUTS,
    outputs=NormGrads._fields,
    required=3,
    x=1,
    spec_type=RowBackwardSpec,
    parse=parse_backward,
    plan=plan.plan_backward,
    reference=_backward_by_reference,
    sums=SUMS,
)
