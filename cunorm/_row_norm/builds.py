# SPDX-License-Identifier: MIT
"""The builds that calls of row norms need, planned as the calls themselves are, with no arrays."""

from typing import Any

from cunorm._core.build import KernelBuild
from cunorm._core.operands import PARAMETERS, present
from cunorm._core.plan import Plan
from cunorm._core.tensor import Device, contiguous, optional_contiguous, optional_dtype
from cunorm._dispatch import launches_of
from cunorm._row_norm.launches import CPU_SHARED_ROWS
from cunorm._row_norm.plan import FORWARD_INPUTS, plan_backward, plan_forward
from cunorm._row_norm.spec import NORM_PARAMS, parse_backward, parse_forward
from cunorm.results import NormForward, NormGrads

FUNCTION = "warmup"  # which errors name
_MANY = 1 << 31
Options = dict[str, Any]


def row_builds(
    name: str, options: Options, rows: list[int] | None, width: int, device: Device
) -> list[KernelBuild]:
    """Return a function's builds for x of each of these numbers of rows; None: of any.

    A CPU has other builds for outputs larger than its caches, and for few long rows.
    `options` are the dtype of x, those of other operands, None where absent, and scalars.
    """
    plan_of = backward_plan if name.endswith("_backward") else forward_plan
    counts = rows or [*range(1, CPU_SHARED_ROWS + 2), _MANY]
    plans = (plan_of(name, options, (count, width), device) for count in counts)
    return [launch.build for plan in plans for launch in launches_of(plan, device)]


def forward_plan(name: str, options: Options, shape: tuple[int, int], device: Device) -> Plan:
    """Plan a forward that saves its statistics, for an x of (rows, width)."""
    dtypes = (options["dtype"], options["residual_dtype"])
    spec = parse_forward(FUNCTION, *_norm(name, options), 0.0, *dtypes, True)
    inputs = [
        optional_contiguous(shape[1:] if one in PARAMETERS else shape, options[one], device)
        for one in FORWARD_INPUTS
    ]
    return plan_forward(spec, (*inputs, *[None] * len(NormForward._fields)))


def backward_plan(name: str, options: Options, shape: tuple[int, int], device: Device) -> Plan:
    """Plan the backward of a forward, given what that returns and a dy like its y."""
    forward = forward_plan(name, options, shape, device)
    x, _, gate, weight, bias, y, stream, mean, rstd = forward.specs
    x, rstd = present(x), present(rstd)
    needs, accumulate = options["needs"], options["accumulate"]
    spec = parse_backward(FUNCTION, *_norm(name, options), x.dtype.name, needs, accumulate)
    of_stream = {None: optional_dtype(stream), True: (stream or x).dtype, False: None}
    dtype = options["d_residual"]
    d_residual = optional_contiguous(shape, of_stream.get(dtype, dtype), device)
    sums = {
        f"d{name}": contiguous(shape[1:], rstd.dtype, device)
        for name, parameter in (("weight", weight), ("bias", bias))
        if accumulate and parameter is not None and name in needs
    }
    inputs = (y, stream or x, rstd, mean, d_residual, gate, weight, bias)
    return plan_backward(spec, (*inputs, *map(sums.get, NormGrads._fields)))


def _norm(name: str, options: Options) -> tuple[Any, ...]:
    """Return the scalars of both directions, in the order of `parse_forward`."""
    scalars = {**options, "axis": -1, "c": None, "has_weight": options["weight"] is not None}
    scalars["center"] = "layer_norm" in name or options["center"]
    return tuple(scalars[one] for one in NORM_PARAMS)
