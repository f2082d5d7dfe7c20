# SPDX-License-Identifier: MIT
"""One call of each operator and regime on the tests' software GPU, and the bytes it moves."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import numpy as np

import cunorm
from bench.plans.plan import COPIED_AHEAD, PARAM_GRAD, STREAMED, TWO_LAUNCHES, regime
from bench.plans.planned import feature_sets, plans
from bench.timing.cases import (
    DTYPES,
    Operands,
    Operator,
    Shape,
    backward,
    host_operands,
    training_forward,
)
from cunorm import NormForward, reference
from cunorm._core.caps import MIN_CAPABILITY, Features
from tests import softgpu
from tests.emulation.machine import machine
from tests.softgpu.counters import Launch, counting

_ARCHITECTURE = "90"  # of an H200, like the software GPU
# The call of a regime has the first of these sizes whose plan has the regime. A row norm's x has
# about _ELEMENTS elements but at least two rows; three times as many if rows are copied ahead.
_WIDTHS = (1000, 64, 4096, 16384, 32768, 65536, 131072, 262144)
_SAMPLES = ((320, 8, 8), (128, 16, 16), (320, 64, 64), (128, 64, 128))
_ELEMENTS = 16_000
_SECTOR = 32  # bytes

_ROWS = {
    "forward": ("x", "residual", "gate", "y", "residual_out"),
    "backward": ("dy", "x", "d_residual", "gate", "dx", "dgate"),
}


class Call(NamedTuple):
    """A call of an operator; x of a group norm is one sample."""

    operator: Operator
    direction: str
    dtype: str
    shape: Shape
    regime: str
    features: Features  # available to the plan


class Count(NamedTuple):
    """The bytes of a call, as in a Row."""

    minimum: int
    read_again: int
    moved: int
    others: int
    of_sectors: float


def calls(operator: Operator, direction: str, dtype: str) -> Iterator[Call]:
    """Yield a call of each regime that the operator's plans have."""
    seen: set[str] = set()
    sizes = _SAMPLES if operator.of_channels else [(width,) for width in _WIDTHS]
    for features, size in product(feature_sets(_ARCHITECTURE), sizes):
        launches = plans(operator, direction, dtype, size, _ARCHITECTURE, features)
        name = next(plan.regime for plan in launches if plan.regime != PARAM_GRAD)
        if name not in seen:
            seen.add(name)
            rows = 1 if operator.of_channels else max(2, _ELEMENTS // size[0])
            if COPIED_AHEAD in name:
                rows *= 3  # so that each block has several rows
            yield Call(operator, direction, dtype, (rows, *size), name, features)


def count(call: Call) -> Count:
    """Make a call on the software GPU, and add up the bytes that it moves."""
    operator = call.operator
    names = [name for name in _ROWS[call.direction] if _has(operator, name)]
    launches, pointers = _launches(call, names)
    kernels = [launch for launch in launches if launch.kernel != PARAM_GRAD]
    large = [launch.range_at(pointer) for launch in kernels for pointer in pointers.values()]
    size = math.prod(call.shape) * DTYPES[call.dtype].itemsize
    moved = sum(found.loaded + found.stored for found in large)
    sectors = sum(found.load_sectors + found.store_sectors for found in large)
    return Count(
        len(names) * size,
        len(_read_again(call, names)) * size,
        moved,
        _others(launches, set(pointers.values())),
        moved / (_SECTOR * sectors),
    )


def _others(launches: list[Launch], large: set[int]) -> int:
    """Add up the bytes of other arrays: for each kernel, the most that one launch touches."""
    most: dict[tuple[str, int], int] = {}
    for launch in launches:
        for found in launch.ranges:
            if not any(found.begin <= pointer < found.end for pointer in large):
                key = launch.kernel, found.begin
                most[key] = max(most.get(key, 0), found.distinct_loaded, found.distinct_stored)
    return sum(most.values())


def _has(operator: Operator, name: str) -> bool:
    if "residual" in name:
        return operator.has_residual
    return name not in ("gate", "dgate") or operator.gate_position is not None


def _read_again(call: Call, names: list[str]) -> set[str]:
    """Return the arrays that are read twice, because nothing keeps them between the passes."""
    if call.regime == TWO_LAUNCHES:
        return {"x", "dy"} & set(names)
    if call.regime != STREAMED:
        return set()
    if call.direction == "backward":
        return {"dy", "x", "gate"} & set(names)
    stream = "residual_out" if call.operator.has_residual else "x"
    return {stream, "gate"} if call.operator.gate_position == "pre" else {stream}


def _launches(call: Call, names: list[str]) -> tuple[list[Launch], dict[str, int]]:
    """Make a call, and return its launches and the addresses of its arrays as large as x."""
    softgpu.load()
    import cupy

    operator, arrays = call.operator, {}
    host = host_operands(operator, call.dtype, call.shape)
    for name, array in host.items():
        arrays[name] = _put(cupy, array, last=operator.memory == "NHWC" and array.ndim == 4)
    features = " ".join(name for name in MIN_CAPABILITY if getattr(call.features, name))
    few = {"multiprocessors": 1} if COPIED_AHEAD in call.regime else {}
    with machine(features, **few) as planned, counting() as launches:
        if call.direction == "forward":
            result = training_forward(cunorm, operator, arrays)()
        else:
            stream, saved = _saved(operator, host)
            statistics = {name: cupy.asarray(array) for name, array in saved.items()}
            if operator.has_residual:
                arrays["x"] = cupy.asarray(stream)
            forward = NormForward(residual=arrays["x"], **statistics)
            result = backward(cunorm, operator, arrays, forward)()
    if regime(planned[0].build) != call.regime:
        raise ValueError(f"{call} ran as {regime(planned[0].build)!r}")
    found = result._asdict()
    found = found | arrays | {"residual_out": found.get("residual")}
    return launches, {name: found[name].data.ptr for name in names}


def _put(cupy: Any, array: Any, *, last: bool) -> Any:
    """Copy an array to the GPU; with `last`, the channels, axis 1, stay last in memory."""
    if not last:
        return cupy.asarray(array)
    return cupy.asarray(np.moveaxis(array, 1, -1)).transpose(0, 3, 1, 2)


def _saved(operator: Operator, operands: Operands) -> tuple[Any, dict[str, Any]]:
    """Return the array that a forward normalises, and the statistics that it returns."""
    saved = training_forward(reference, operator, operands)()
    stream = operands["x"]
    if operator.has_residual:
        stream = saved.residual.astype(stream.dtype)
    names = ("rstd", "mean") if operator.center else ("rstd",)
    return stream, {name: getattr(saved, name).astype("float32") for name in names}
