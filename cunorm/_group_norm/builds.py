# SPDX-License-Identifier: MIT
"""The builds that calls of group norms need, planned as the calls themselves are."""

from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from typing import Any

from cunorm._core.build import KernelBuild
from cunorm._core.operands import Kind, arguments, names_of, operand_of, present
from cunorm._core.plan import Plan
from cunorm._core.tensor import Device, contiguous, optional_contiguous
from cunorm._dispatch import launches_of
from cunorm._group_norm.kernels import TABLE, backward_inputs, forward_inputs
from cunorm._group_norm.plan import GROUP_BACKWARD, GROUP_FORWARD, plan_backward, plan_forward
from cunorm._group_norm.spec import (
    EACH_CHANNEL,
    NEEDS,
    backward_scalars,
    forward_scalars,
    parse_backward,
    parse_forward,
)

FUNCTION = "warmup"  # which errors name
LAYOUTS = {"channels_last": -1, "channels_first": 1}  # of memory, and a channel_axis that has them
# Numbers of samples that count as few, and how often those are doubled, where any number may come.
_FEW_SAMPLES, _DOUBLINGS = 64, 25

Options = dict[str, Any]


def group_builds(
    name: str, options: Options, samples: list[int] | None, channels: int, device: Device
) -> list[KernelBuild]:
    """Return a function's builds for x of each of these numbers of samples; None: of any.

    `options` are as those of `cunorm._row_norm.builds.row_builds`.
    """
    plan_of = backward_plan if name.endswith("_backward") else forward_plan

    @cache
    def needed(count: int) -> tuple[KernelBuild, ...]:
        plan = plan_of(name, options, count, channels, device)
        return tuple(dict.fromkeys(launch.build for launch in launches_of(plan, device)))

    counts = _steps(needed) if samples is None else samples
    return [build for count in counts for build in needed(count)]


def _steps(needed: Callable[[int], object]) -> Iterator[int]:
    """Yield numbers of samples whose builds serve any number of samples.

    Every small number is tried, as cores share a few samples in plans of their own, and powers of
    two of the larger ones, between which changes are sought.
    """
    tried = [*range(1, _FEW_SAMPLES), *(_FEW_SAMPLES << more for more in range(_DOUBLINGS + 1))]
    yield 1
    for low, high in pairwise(tried):
        if needed(low) != needed(high):
            yield from _steps_between(needed, low, high)


def _steps_between(needed: Callable[[int], object], low: int, high: int) -> Iterator[int]:
    """Yield those above `low` and up to `high`, which need different builds."""
    middle = (low + high) // 2
    if middle == low:
        yield high
        return
    for ends in ((low, middle), (middle, high)):
        if needed(ends[0]) != needed(ends[1]):
            yield from _steps_between(needed, *ends)


def forward_plan(name: str, options: Options, samples: int, channels: int, device: Device) -> Plan:
    """Plan a forward that saves its statistics."""
    sizes, channel_axis = (options["positions"], channels), LAYOUTS[options["layout"]]
    shape = (samples, *(sizes if channel_axis == -1 else sizes[::-1]))
    groups = EACH_CHANNEL if name == "instance_norm" else options["num_groups"]
    scalars = forward_scalars(
        *(FUNCTION, groups, options["activation"], channel_axis),
        dtype=options["dtype"],
        saves=True,
    )
    spec = parse_forward(*scalars)
    x = contiguous(shape, options["x"], device)
    parameters = {
        name: optional_contiguous((channels,), options[name], device)
        for name in names_of(TABLE.forward_inputs, Kind.PARAMETER)
    }
    return plan_forward(spec, (*forward_inputs(x, **parameters), *GROUP_FORWARD.no_outputs))


def backward_plan(name: str, options: Options, samples: int, channels: int, device: Device) -> Plan:
    """Plan the backward of a forward, given what that returns and a dy like its y."""
    forward = forward_plan(name, options, samples, channels, device)
    inputs, results = arguments(
        GROUP_FORWARD.input_slots, GROUP_FORWARD.result_slots, forward.specs
    )
    needs = tuple(name for name in options["needs"] if name in NEEDS)
    scalars = backward_scalars(
        *(FUNCTION, options["num_groups"], options["activation"], LAYOUTS[options["layout"]]),
        needs=needs,
        accumulate=options["accumulate"],
    )
    spec = parse_backward(*scalars)
    sums = contiguous((channels,), present(results["rstd"]).dtype, device)
    given = [
        sums
        if spec.accumulate and slot.kind is Kind.PARAMETER and inputs[name] and name in needs
        else None
        for slot in GROUP_BACKWARD.result_slots
        if (name := operand_of(slot))
    ]
    reads = backward_inputs(results.pop("y"), **inputs, **results)
    return plan_backward(spec, (*reads, *given))
