# SPDX-License-Identifier: MIT
"""The group norms' OpDefs, and their kernels' work done by the NumPy reference."""

from collections.abc import Sequence
from typing import Any

from cunorm._core.operands import SUMS
from cunorm._core.plan import OpDef
from cunorm._group_norm import spec as specs
from cunorm._group_norm.plan import BACKWARD_INPUTS, FORWARD_INPUTS, plan_backward, plan_forward
from cunorm.reference import group_norm_backward, group_norm_forward
from cunorm.reference.rows import store
from cunorm.results import GroupNormForward, GroupNormGrads


def _forward_by_reference(spec: specs.GroupForwardSpec, arrays: Sequence[Any]) -> None:
    x, weight, bias, *outputs = arrays
    exact = group_norm_forward(x, weight=weight, bias=bias, eps=spec.eps, **spec.options(x))
    for output, numbers in zip(outputs, exact, strict=True):
        store(output, numbers)


def _backward_by_reference(spec: specs.GroupBackwardSpec, arrays: Sequence[Any]) -> None:
    dy, x, mean, rstd, weight, bias, *outputs = arrays
    needs = {one for one, output in zip(specs.NEEDS, outputs, strict=True) if output is not None}
    given = {"weight": weight, "bias": bias, "mean": mean, "rstd": rstd, "needs": needs}
    exact = group_norm_backward(dy, x, **given, **spec.options(x))
    for name, output, gradient in zip(GroupNormGrads._fields, outputs, exact, strict=True):
        store(output, gradient, added=spec.accumulate and name in SUMS)


GROUP_FORWARD = OpDef(
    name="group_forward",
    inputs=FORWARD_INPUTS,
    outputs=GroupNormForward._fields,
    required=1,
    x=0,
    spec_type=specs.GroupForwardSpec,
    parse=specs.parse_forward,
    plan=plan_forward,
    reference=_forward_by_reference,
)
GROUP_BACKWARD = OpDef(
    name="group_backward",
    inputs=BACKWARD_INPUTS,
    outputs=GroupNormGrads._fields,
    required=4,
    x=1,
    spec_type=specs.GroupBackwardSpec,
    parse=specs.parse_backward,
    plan=plan_backward,
    reference=_backward_by_reference,
    sums=SUMS,
)
