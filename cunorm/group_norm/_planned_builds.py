# SPDX-License-Identifier: MIT
"""Which builds the calls of a group norm need, planned as the calls themselves are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import NamedTuple

from cunorm._arrays import Device, Form, contiguous_form
from cunorm._builds import Build
from cunorm._dtypes import DType
from cunorm.group_norm import _backward_plan, _forward
from cunorm.group_norm._calls import GroupBackwardForm, GroupForm, GroupForwardForm
from cunorm.group_norm._run import builds

LAYOUTS = {"channels_last": -1, "channels_first": 1}  # of memory, and a channel_axis that has them
# Where nothing is said of samples, how many of them count as few, and how often those are doubled.
_FEW_SAMPLES, _DOUBLINGS = 64, 25


class GroupLayer(NamedTuple):
    """A group norm as its forward is called, and what its backward is told beside."""

    function: str  # named in errors
    x: DType
    num_groups: int | None  # None: as many as channels
    positions: int
    layout: str
    activation: str | None = None
    weight: DType | None = None
    bias: DType | None = None
    y: DType | None = None
    needs: frozenset[str] = frozenset()
    accumulate: bool = False


def forward_builds(
    layer: GroupLayer, samples: list[int] | None, channels: int, device: Device
) -> list[Build]:
    """Return what the forward needs for so many samples, where every array is aligned."""
    return _of_samples(_forward_form(layer, channels, device), samples, device)


def backward_builds(
    layer: GroupLayer, samples: list[int] | None, channels: int, device: Device
) -> list[Build]:
    """Return what the backward needs, given what the forward returns and a dy like its y."""
    form = _backward_form(layer, _forward_form(layer, channels, device), device)
    return [] if form is None else _of_samples(form, samples, device)


def _of_samples(form: GroupForm, samples: list[int] | None, device: Device) -> list[Build]:
    """Return what a call needs for these numbers of samples, None being any number."""

    @cache
    def needed(count: int) -> tuple[Build, ...]:
        return tuple(builds(replace(form, where=form.where._replace(samples=count)), device))

    counts = _steps(needed) if samples is None else samples
    return [build for count in counts for build in needed(count)]


def _steps(needed: Callable[[int], object]) -> Iterator[int]:
    """Yield numbers of samples, one for each of what is needed for any number of them.

    Every small number is tried, as a few samples are shared among cores in ways of their own, and
    of larger ones some, between which it is sought where what is needed changes.
    """
    tried = [*range(1, _FEW_SAMPLES), *(_FEW_SAMPLES << more for more in range(_DOUBLINGS + 1))]
    yield 1
    for low, high in pairwise(tried):
        if needed(low) != needed(high):
            yield from _steps_between(needed, low, high)


def _steps_between(needed: Callable[[int], object], low: int, high: int) -> Iterator[int]:
    """Yield the same above the one and up to the other, which need not the same."""
    middle = (low + high) // 2
    if middle == low:
        yield high
        return
    for ends in ((low, middle), (middle, high)):
        if needed(ends[0]) != needed(ends[1]):
            yield from _steps_between(needed, *ends)


def _forward_form(layer: GroupLayer, channels: int, device: Device) -> GroupForwardForm:
    channel_axis = LAYOUTS[layer.layout]
    shape = (1, channels, layer.positions) if channel_axis == 1 else (1, layer.positions, channels)
    inputs = (
        contiguous_form(shape, layer.x, device),
        _form((channels,), layer.weight, device),
        _form((channels,), layer.bias, device),
    )
    told = _forward.asked(
        layer.function,
        _forward.EACH_CHANNEL if layer.num_groups is None else layer.num_groups,
        layer.activation,
        channel_axis,
        None if layer.y is None else layer.y.name,
        True,
    )
    return _forward.planned(told, (*inputs, None, None, None)).form


def _backward_form(
    layer: GroupLayer, forward: GroupForwardForm, device: Device
) -> GroupBackwardForm | None:
    """Return the form of the backward's call; None where no gradient is wanted."""
    where, types = forward.where, forward.types
    sizes = (where.positions, where.channels)
    shape = (1, *(sizes if forward.channel_axis == -1 else sizes[::-1]))
    statistic = contiguous_form((1, where.groups), types.compute, device)
    weight, bias = (_form((where.channels,), dtype, device) for dtype in (types.weight, types.bias))
    told = _backward_plan.asked(
        layer.function,
        where.groups,
        layer.activation,
        forward.channel_axis,
        tuple(sorted(layer.needs)),
        layer.accumulate,
    )
    sums = contiguous_form((where.channels,), types.compute, device)
    given = [
        sums if layer.accumulate and parameter is not None and name in layer.needs else None
        for name, parameter in (("weight", weight), ("bias", bias))
    ]
    dy, x = (contiguous_form(shape, dtype, device) for dtype in (types.y, types.x))
    forms = (dy, x, statistic, statistic, weight, bias, None, *given)
    plan = _backward_plan.planned(told, forms)
    return None if plan.is_empty else plan.form


def _form(shape: tuple[int, ...], dtype: DType | None, device: Device) -> Form | None:
    return None if dtype is None else contiguous_form(shape, dtype, device)
