# SPDX-License-Identifier: MIT
"""The group norms' OpDefs, and their kernels' work done by the NumPy reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cunorm._core.plan import OpDef
from cunorm._group_norm.plan import BACKWARD_INPUTS, FORWARD_INPUTS, plan_backward, plan_forward
from cunorm._group_norm.spec import (
    NEEDS,
    GroupBackwardSpec,
    GroupForwardSpec,
    parse_backward,
    parse_forward,
)
from cunorm.reference import group_norm_backward, group_norm_forward
from cunorm.reference.rows import store
from cunorm.results import GroupNormForward, GroupNormGrads


def _forward_by_reference(spec: GroupForwardSpec, arrays: Sequence[Any]) -> None:
    x, weight, bias, *outputs = arrays
    exact = group_norm_forward(x, weight=weight, bias=bias, eps=spec.eps, **spec.options(x))
    for output, numbers in zip(outputs, exact, strict=True):
        store(output, numbers)


def _backward_by_reference(spec: GroupBackwardSpec, arrays: Sequence[Any]) -> None:
    dy, x, mean, rstd, weight, bias, *outputs = arrays
    needs = tuple(name for name, output in zip(NEEDS, outputs, strict=True) if output is not None)
    given = {"weight": weight, "bias": bias, "mean": mean, "rstd": rstd, "needs": needs}
    exact = group_norm_backward(dy, x, **given, **spec.options(x))
    dx, dweight, dbias = outputs
    store(dx, exact.dx)
    store(dweight, exact.dweight, added=spec.accumulate)
    store(dbias, exact.dbias, added=spec.accumulate)


GROUP_FORWARD = OpDef(
    name="group_forward",
    inputs=FORWARD_INPUTS,
    outputs=GroupNormForward._fields,
    required=1,
    x=0,
    spec_type=GroupForwardSpec,
    parse=parse_forward,
    plan=plan_forward,
    reference=_forward_by_reference,
)
GROUP_BACKWARD = OpDef(
    name="group_backward",
    inputs=BACKWARD_INPUTS,
    outputs=GroupNormGrads._fields,
    required=4,
    x=1,
    spec_type=GroupBackwardSpec,
    parse=parse_backward,
    plan=plan_backward,
    reference=_backward_by_reference,
    sums=("dweight", "dbias"),
)
