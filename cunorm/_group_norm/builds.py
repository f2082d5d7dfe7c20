# SPDX-License-Identifier: MIT
"""The builds that calls of group norms need; they are planned as calls are, but without arrays."""

from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from typing import Any

from cunorm._core.build import KernelBuild
from cunorm._core.calls import backward_specs
from cunorm._core.operands import Kind, Slot, arguments
from cunorm._core.plan import Plan
from cunorm._core.tensor import Device, Shape, optional_contiguous
from cunorm._dispatch.loading import launches_of
from cunorm._group_norm.plan import (
    GROUP_BACKWARD,
    GROUP_FORWARD,
    GROUP_JVP,
    plan_backward,
    plan_forward,
    plan_jvp,
)
from cunorm._group_norm.spec import (
    EACH_CHANNEL,
    NEEDS,
    backward_scalars,
    forward_scalars,
    jvp_scalars,
)

FUNCTION = "warmup"  # the name of the function in errors
LAYOUTS = {"channels_last": -1, "channels_first": 1}  # the channel_axis of a contiguous array
# `_steps` tries all numbers of samples below _FEW_SAMPLES, and doubles it _DOUBLINGS times.
_FEW_SAMPLES, _DOUBLINGS = 64, 25
Options = dict[str, Any]


def group_builds(
    name: str, options: Options, samples: list[int] | None, channels: int, device: Device
) -> list[KernelBuild]:
    """Return the builds of a function for each number of samples in `samples`; None is any number.

    `options` are those of `cunorm._row_norm.builds.row_builds`.
    """
    plan_of = {"backward": backward_plan, "jvp": jvp_plan}.get(name.split("_")[-1], forward_plan)

    @cache
    def needed(count: int) -> tuple[KernelBuild, ...]:
        plan = plan_of(name, options, count, channels, device)
        return tuple(dict.fromkeys(launch.build for launch in launches_of(plan, device)))

    counts = _steps(needed) if samples is None else samples
    return [build for count in counts for build in needed(count)]


def _steps(needed: Callable[[int], object]) -> Iterator[int]:
    """Yield numbers of samples whose builds serve any number of samples.

    Every small number is tried, because how cores share a few samples depends on their number.
    Powers of two follow. If two have different builds, a search finds where the builds change.
    """
    tried = [*range(1, _FEW_SAMPLES), *(_FEW_SAMPLES << more for more in range(_DOUBLINGS + 1))]
    yield 1
    for low, high in pairwise(tried):
        yield from _steps_between(needed, low, high)


def _steps_between(needed: Callable[[int], object], low: int, high: int) -> Iterator[int]:
    """Yield the numbers above `low` and up to `high` at which the builds change."""
    middle = (low + high) // 2
    if needed(low) == needed(high):
        return
    if middle == low:
        yield high
        return
    yield from _steps_between(needed, low, middle)
    yield from _steps_between(needed, middle, high)


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

    def shape_of(slot: Slot) -> Shape:
        if slot.kind is Kind.LIKE_X:
            return shape
        return (channels,) if options[f"{slot.name}_per"] == "all" else (samples, channels)

    inputs = [
        optional_contiguous(shape_of(slot), options[slot.argument], device)
        for slot in GROUP_FORWARD.input_slots
    ]
    return plan_forward(GROUP_FORWARD.parse(*scalars), (*inputs, *GROUP_FORWARD.no_outputs))


def backward_plan(name: str, options: Options, samples: int, channels: int, device: Device) -> Plan:
    """Plan the backward of a forward, with the forward's results and a dy like its y."""
    forward = forward_plan(name, options, samples, channels, device)
    slots = (GROUP_FORWARD.input_slots, GROUP_FORWARD.result_slots)
    inputs, results = arguments(*slots, forward.specs)
    scalars = backward_scalars(
        *(FUNCTION, options["num_groups"], options["activation"], LAYOUTS[options["layout"]]),
        needs=tuple(name for name in options["needs"] if name in NEEDS),
        accumulate=options["accumulate"],
    )
    spec, operands = GROUP_BACKWARD.parse(*scalars), inputs | results | {"dy": results["y"]}
    return plan_backward(spec, backward_specs(GROUP_BACKWARD, spec, operands))


def jvp_plan(name: str, options: Options, samples: int, channels: int, device: Device) -> Plan:
    """Plan the jvp of a forward; the operands in `needs`, and x, have tangents of their dtypes."""
    forward = forward_plan(name, options, samples, channels, device)
    slots = (GROUP_FORWARD.input_slots, GROUP_FORWARD.result_slots)
    inputs, results = arguments(*slots, forward.specs)
    layout = LAYOUTS[options["layout"]]
    norm = (FUNCTION, options["num_groups"], options["activation"], layout, options["dtype"])
    tangents = {f"{one}_tangent": inputs.get(one) for one in ("x", *options["needs"])}
    given = map((inputs | results | tangents).get, GROUP_JVP.inputs)
    return plan_jvp(GROUP_JVP.parse(*jvp_scalars(*norm)), (*given, *GROUP_JVP.no_outputs))
