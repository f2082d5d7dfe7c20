# SPDX-License-Identifier: MIT
"""Calls of the group norm by cases: dtypes, where the channels are, and the sizes of a sample.

`memory` says where the channels lie, "last" or "first", and `channel_axis` which axis they are; the
one does not follow from the other. A case's dtypes, activation and memory are a build of their own,
and so is, of some sizes, how the work is cut into launches; each is held to the oracle.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np

import cunorm
from cunorm import GroupNormForward, GroupNormGrads, reference
from tests.support.covers import Case
from tests.support.group_bounds import check_group_backward, check_group_forward
from tests.support.internals import DLPack, Numpy, Torch, describe
from tests.support.operands import DTYPES, at, draw, optional
from tests.support.row_norm_cases import ACTIVATIONS as ROW_ACTIVATIONS
from tests.support.row_norm_cases import DTYPE_NAMES, check_accumulated

ACTIVATIONS = [None, *ROW_ACTIVATIONS[1:]]
ALL = ("x", "weight", "bias")
EPS = 1e-5

WHERE = {"memory": ["last", "first"], "channel_axis": [-1, 1]}
PARAMETERS = {  # which are read alike: each dtype in one of them
    "weight": [None, "bfloat16", "float32"],
    "bias": [None, "float16", "float64"],
}
FORWARD = {
    "x": DTYPE_NAMES,
    "y": DTYPE_NAMES,
    **PARAMETERS,
    "activation": ACTIVATIONS,
    **WHERE,
}
BACKWARD = {
    "dy": DTYPE_NAMES,
    "x": DTYPE_NAMES,
    "dx": [None, "float16", "float64"],  # None: x's
    **PARAMETERS,
    "activation": ACTIVATIONS,
    "needs": [ALL, ("x",), ("weight", "bias")],
    "accumulate": [None, "float32"],  # onto arrays of this dtype
    **WHERE,
}


def telling(case: Case) -> Case:
    """Return what of a backward, or of a part of one, is not idle."""
    idle, needs = set(), case.get("needs", ALL)
    absent = {name for name in ("weight", "bias") if case.get(name, "") is None}
    if "x" not in needs:
        idle |= {"dx"}
    if not {"weight", "bias"} & set(needs) - absent:
        idle |= {"accumulate"}
    if set(needs) & absent:
        idle |= {"needs"}
    return {name: choice for name, choice in case.items() if name not in idle}


def equal_terms(positions: int, channels: int, channel_axis: int) -> tuple[Any, Any, Any]:
    """Return x, dy and a weight of which every rounding of the sums has the same sign."""
    shape = (1, positions, channels) if channel_axis == -1 else (1, channels, positions)
    signs = np.random.default_rng(0).choice([-1.0, 1.0], shape)
    x, dy = (signs * 1.1).astype(np.float32), np.full(shape, 1.1, np.float32)
    return x, dy, np.ones(channels, np.float32)


class Sizes(NamedTuple):
    """The sizes of x."""

    samples: int
    positions: tuple[int, ...]
    channels: int
    groups: int

    def shape(self, channel_axis: int) -> tuple[int, ...]:
        """Return x's."""
        if channel_axis == 1:
            return (self.samples, self.channels, *self.positions)
        return (self.samples, *self.positions, self.channels)


# Sizes of which all passes are one launch, of packs of 64 elements: a case is one build for all of
# them. Most lines end in the midst of a pack; the last ones are of several tiles.
SMALL = (
    Sizes(1, (2,), 3, 1),
    Sizes(2, (7,), 10, 5),
    Sizes(20, (31,), 40, 8),
    Sizes(2, (1, 3, 2, 5), 320, 32),
    Sizes(1, (31, 97), 10, 2),
    Sizes(1, (4900,), 3, 3),
)


def drawn(
    name: str, sizes: Sizes, dtype: str, channel_axis: int, memory: str, mean: float = 0.0
) -> Any:
    """Draw an array of x's shape, whose memory is dense."""
    return laid_out(draw(name, sizes.shape(channel_axis), dtype, mean=mean), channel_axis, memory)


def laid_out(array: Any, channel_axis: int, memory: str) -> Any:
    """Return a copy with the same axes, whose channels are last or first in memory."""
    there = {"last": -1, "first": 1}[memory]
    dense = np.array(np.moveaxis(array, channel_axis, there), order="C")
    return np.moveaxis(dense, there, channel_axis)


def strides(array: Any) -> tuple[int, ...]:
    """Return an array's strides, in elements, along the axes of more than one."""
    steps = zip(array.shape, array.strides, strict=True)
    return tuple(stride // array.itemsize for size, stride in steps if size > 1)


def statistics(x: Any, sizes: Sizes, channel_axis: int) -> dict[str, Any]:
    """Return the exact mean and rstd, rounded to the compute type."""
    exact = reference.group_norm_forward(x, sizes.groups, eps=EPS, channel_axis=channel_axis)
    compute = np.float64 if x.dtype == np.float64 else np.float32
    return {"mean": exact.mean.astype(compute), "rstd": exact.rstd.astype(compute)}


def parameters(case: Case, sizes: Sizes) -> list[Any]:
    """Draw weight and bias where a case has them."""
    return [optional(name, sizes.channels, case[name]) for name in ("weight", "bias")]


def check_forward_case(case: Case, sizes: Sizes, mean: float = 0.0) -> None:
    where = (case["channel_axis"], case["memory"])
    x = drawn("x", sizes, case["x"], *where, mean=mean)
    told = {"activation": case["activation"], "channel_axis": case["channel_axis"], "eps": EPS}
    given = (sizes.groups, *parameters(case, sizes))
    with at(*sizes, f"mean {mean}"):
        result = cunorm.group_norm_forward(x, *given, **told, dtype=case["y"])
        assert result.y.dtype == DTYPES[case["y"]]
        assert strides(result.y) == strides(x)
        assert result.mean.shape == result.rstd.shape == (sizes.samples, sizes.groups)
        compute = "float64" if case["x"] == "float64" else "float32"
        assert result.mean.dtype == result.rstd.dtype == compute
        check_group_forward(result, x, *given, **told)


def check_backward_case(case: Case, sizes: Sizes, mean: float = 0.0) -> None:
    where = (case["channel_axis"], case["memory"])
    x = drawn("x", sizes, case["x"], *where, mean=mean)
    dy = drawn("dy", sizes, case["dy"], *where)
    given = (dy, x, sizes.groups, *parameters(case, sizes))
    told = {"activation": case["activation"], "channel_axis": case["channel_axis"]}
    saved = statistics(x, sizes, case["channel_axis"])
    with at(*sizes, f"mean {mean}"):
        out = _out(case, x)
        grads = cunorm.group_norm_backward(*given, **saved, **told, needs=case["needs"], out=out)
        _check_which(grads, case, x)
        check_group_backward(grads, *given, **told, eps=EPS)
        if case["accumulate"]:
            wanted = [name for name in ("weight", "bias") if case[name] and name in case["needs"]]
            sums = {f"d{name}": sizes.channels for name in wanted}
            told = saved | told | {"needs": case["needs"]}
            call = partial(cunorm.group_norm_backward, *given, **told)
            check_accumulated(call, partial(_out, case, x), sums, case["accumulate"])


def _out(case: Case, x: Any) -> GroupNormGrads:
    """Return the array that says that dx has another dtype than x."""
    if case["dx"] is None or "x" not in case["needs"]:
        return GroupNormGrads()
    return GroupNormGrads(dx=np.full_like(x, np.nan, DTYPES[case["dx"]]))


def _check_which(grads: GroupNormGrads, case: Case, x: Any) -> None:
    """Check which gradients there are, of which dtype, and where dx lies."""
    assert (grads.dx is None) == ("x" not in case["needs"])
    if grads.dx is not None:
        assert grads.dx.dtype == DTYPES[case["dx"] or case["x"]]
        assert strides(grads.dx) == strides(x)
    for name in ("weight", "bias"):
        gradient, wanted = getattr(grads, f"d{name}"), case[name] and name in case["needs"]
        assert (gradient is None) == (not wanted)
        assert gradient is None or gradient.dtype == DTYPES[case[name]]


# --- plain calls ----------------------------------------------------------------------------------


class Results(NamedTuple):
    """What forward and backward return."""

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
    activation: str | None = "silu",
    forward: dict[str, Any] | None = None,
    backward: dict[str, Any] | None = None,
) -> Results:
    """Run forward and backward with parameters of float32; the last two are what else to tell them.

    So there are few builds, which `SIZES` of the formulas' tests compiles too.
    """
    channels = describe("run", "x", x).shape[channel_axis]
    weight, bias = (optional(name, channels, "float32") for name in ("weight", "bias"))
    told = {"activation": activation, "channel_axis": channel_axis}
    f = cunorm.group_norm_forward(x, groups, weight, bias, **told, **forward or {})
    saved = {"mean": f.mean, "rstd": f.rstd}
    grads = cunorm.group_norm_backward(
        dy, x, groups, weight, bias, **saved, **told, **backward or {}
    )
    return Results(*f, *grads)


def check(
    results: Results,
    x: Any,
    dy: Any,
    groups: int,
    channel_axis: int = -1,
    activation: str | None = "silu",
) -> None:
    """Hold what `run` returns to the oracle."""
    parameters = [optional(name, x.shape[channel_axis], "float32") for name in ("weight", "bias")]
    told = {"eps": EPS, "activation": activation, "channel_axis": channel_axis}
    check_group_forward(GroupNormForward(*results[:3]), x, groups, *parameters, **told)
    check_group_backward(GroupNormGrads(*results[3:]), dy, x, groups, *parameters, **told)


def copies(monkeypatch: Any) -> list[Any]:
    """Collect the operands that are copied."""
    seen: list[Any] = []

    def watch(copy: Any) -> Any:
        def copy_and_see(framework: Any, operand: Any) -> Any:
            seen.append(operand)
            return copy(framework, operand)

        return copy_and_see

    for framework in (Numpy, Torch, DLPack):
        monkeypatch.setattr(framework, "contiguous", watch(framework.contiguous))
    return seen
