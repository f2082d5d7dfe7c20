# SPDX-License-Identifier: MIT
"""The memory that a group norm takes for what its kernels hand on, before its call is made.

A call is planned with every dtype that an operand may have which is not there yet.
"""

from __future__ import annotations

from itertools import product

from cunorm._arrays import Form, contiguous_form
from cunorm._dtypes import DTYPES, FLOAT32, FLOAT64
from cunorm.group_norm import _backward_plan, _forward
from cunorm.group_norm._layout import geometry
from cunorm.group_norm._run import workspace_bytes

Inputs = tuple[Form, Form | None, Form | None]  # x, weight, bias


def forward_size(function: str, inputs: Inputs, num_groups: int | None, channel_axis: int) -> int:
    """Return the most bytes that a forward takes; None groups are as many as channels."""
    groups = _forward.EACH_CHANNEL if num_groups is None else num_groups
    sizes = []
    for y in DTYPES:
        told = _forward.asked(function, groups, None, channel_axis, y, False)
        plan = _forward.planned(told, (*inputs, None, None, None))
        sizes.append(workspace_bytes(plan.form, inputs[0].device))
    return max(sizes)


def backward_size(
    function: str, inputs: Inputs, num_groups: int, channel_axis: int, needs: tuple[str, ...]
) -> int:
    """Return the most bytes that a backward takes."""
    x, weight, bias = inputs
    where = geometry(function, x, num_groups, channel_axis)
    compute = FLOAT64 if x.dtype is FLOAT64 else FLOAT32
    statistic = contiguous_form(where.statistic_shape, compute, x.device)
    told = _backward_plan.asked(function, num_groups, None, channel_axis, needs, False)
    like_x = [where.result(dtype, x) for dtype in DTYPES.values()]
    sizes = []
    for dy, dx in product(like_x, like_x if "x" in needs else (None,)):
        forms = (dy, x, statistic, statistic, weight, bias, dx, None, None)
        plan = _backward_plan.planned(told, forms)
        sizes.append(workspace_bytes(plan.form, x.device))
    return max(sizes)
