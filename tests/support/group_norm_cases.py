# SPDX-License-Identifier: MIT
"""Helpers for group norms: plain calls, layouts of channels in memory, a list of copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import cunorm
from cunorm import GroupNormForward, GroupNormGrads
from tests.support.group_bounds import check_group_backward, check_group_forward
from tests.support.internals import host_frameworks
from tests.support.operands import optional


def laid_out(array: Any, channel_axis: int, memory: str) -> Any:
    """Return a copy with the same axes; in memory, its channels are last or first."""
    there = {"last": -1, "first": 1}[memory]
    dense = np.array(np.moveaxis(array, channel_axis, there), order="C")
    return np.moveaxis(dense, there, channel_axis)


def strides(array: Any) -> tuple[int, ...]:
    """Return an array's strides, in elements, along the axes longer than 1."""
    steps = zip(array.shape, array.strides, strict=True)
    return tuple(stride // array.itemsize for size, stride in steps if size > 1)


class Results(NamedTuple):
    """The results of a forward and a backward."""

    y: Any
    mean: Any
    rstd: Any
    dx: Any
    dweight: Any
    dbias: Any


def run(
    x: Any,
    dy: Any,
    groups: int,
    channel_axis: int = -1,
    *,
    put: Callable[[Any], Any] = np.asarray,
    forward: dict[str, Any] | None = None,
    backward: dict[str, Any] | None = None,
) -> Results:
    """Run both directions with float32 parameters and silu; `forward`, `backward` add options."""
    channels = x.shape[channel_axis]
    weight, bias = (put(optional(name, channels, "float32")) for name in ("weight", "bias"))
    options = {"activation": "silu", "channel_axis": channel_axis}
    f = cunorm.group_norm_forward(x, groups, weight, bias, **options, **forward or {})
    saved = {"mean": f.mean, "rstd": f.rstd}
    grads = cunorm.group_norm_backward(
        dy, x, groups, weight, bias, **saved, **options, **backward or {}
    )
    return Results(*f, *grads)


def check(results: Results, x: Any, dy: Any, groups: int, channel_axis: int = -1) -> None:
    """Check the results of `run` against the oracle."""
    parameters = [optional(name, x.shape[channel_axis], "float32") for name in ("weight", "bias")]
    options = {"eps": 1e-5, "activation": "silu", "channel_axis": channel_axis}
    check_group_forward(GroupNormForward(*results[:3]), x, groups, *parameters, **options)
    check_group_backward(GroupNormGrads(*results[3:]), dy, x, groups, *parameters, **options)


def copies(monkeypatch: Any) -> list[Any]:
    """Return a list that gets each operand that is copied."""
    seen: list[Any] = []

    def watch(copy: Any) -> Any:
        def copy_and_see(framework: Any, operand: Any) -> Any:
            seen.append(operand)
            return copy(framework, operand)

        return copy_and_see

    for framework in host_frameworks():
        monkeypatch.setattr(framework, "contiguous", watch(framework.contiguous))
    return seen
