# SPDX-License-Identifier: MIT
"""Calls of both directions of a norm, checked against their bounds; layouts; a list of copies."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np

import cunorm
from cunorm import GroupNormForward, GroupNormGrads
from tests.support.bounds import check_backward, check_forward
from tests.support.gpu_arrays import get_all, put_all
from tests.support.group_bounds import check_group_backward, check_group_forward
from tests.support.internals import host_frameworks
from tests.support.operands import draw, optional


def check_norm(on, x, dy=None, parameters=None, *, eps=1e-5, **options) -> tuple[Any, Any]:
    """Run both directions, check them against their bounds, and return their results.

    The norm is `normalize` or, with num_groups, `group_norm`. By default, dy, weight and bias are
    drawn, in the dtype of x.
    """
    is_group, dtype = "num_groups" in options, str(x.dtype)
    name = "group_norm" if is_group else "normalize"
    dy = draw("dy", x.shape, dtype) if dy is None else dy
    if parameters is None:
        size = x.shape[options.get("channel_axis", -1)]
        parameters = [optional(name, size, dtype) for name in ("weight", "bias")]
    given = dict(zip(("weight", "bias"), parameters, strict=True))
    there = put_all(on, {"x": x, "dy": dy, **{n: a for n, a in given.items() if a is not None}})
    dy_there = there.pop("dy")
    arrays = {n: on.put(v) for n, v in options.items() if isinstance(v, np.ndarray)}
    there |= options | arrays
    f = getattr(cunorm, f"{name}_forward")(**there, eps=eps)
    saved = {"rstd": f.rstd, "mean": f.mean}
    grads = getattr(cunorm, f"{name}_backward")(dy_there, **there, **saved)
    f, grads = get_all(on, f), get_all(on, grads)
    forward, backward = (
        (check_group_forward, check_group_backward) if is_group else (check_forward, check_backward)
    )
    exact = {n: float(v) if isinstance(v, np.float32) else v for n, v in options.items()}
    exact |= given | {"eps": float(eps)}
    forward(f, x=x, **exact)
    backward(grads, dy=dy, x=x, **exact)
    return f, grads


def laid_out(x, axis):
    """Return a copy with the last axis moved to `axis`."""
    return np.ascontiguousarray(np.moveaxis(x, -1, axis))


# --- group norms ----------------------------------------------------------------------------------


def in_memory(array: Any, channel_axis: int, memory: str) -> Any:
    """Return a copy with the same axes; in memory, its channels are last or first."""
    there = {"last": -1, "first": 1}[memory]
    dense = np.array(np.moveaxis(array, channel_axis, there), order="C")
    return np.moveaxis(dense, there, channel_axis)


def strides(array: Any) -> tuple[int, ...]:
    """Return an array's strides, in elements, along the axes longer than 1."""
    steps = zip(array.shape, array.strides, strict=True)
    return tuple(stride // array.itemsize for size, stride in steps if size > 1)


Results = namedtuple("Results", "y mean rstd dx dweight dbias")  # of both directions


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
