# SPDX-License-Identifier: MIT
"""Calls of the operators under the tests' emulation: one of each regime, and what it moves."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

from bench.cases import DTYPES, Operands, Operator, Shape, host_operands, training_forward
from bench.static_from_tests import from_tests
from bench.static_plans import (
    COPIED_AHEAD,
    PARAM_GRAD,
    STREAMED,
    THREE_LAUNCHES,
    feature_sets,
    plans,
    regime,
)
from cunorm import reference
from cunorm._features import Features

# Of an H200: what is emulated are the tests' own plans of it.
_ARCHITECTURE = "90"
# The first of these that has a regime stands for it. Elements of an array, at least two rows.
_WIDTHS = (1000, 64, 4096, 16384, 32768, 65536, 131072, 262144)
_SAMPLES = ((320, 8, 8), (128, 16, 16), (320, 64, 64), (128, 64, 128))
_ELEMENTS = 16_000

_ROWS = {
    "forward": ("x", "residual", "gate", "y", "new_residual"),
    "backward": ("dy", "x", "d_residual", "gate", "dx", "dgate"),
}


class Call(NamedTuple):
    """A call of an operator; a group norm's is of one sample."""

    operator: Operator
    direction: str
    dtype: str
    shape: Shape
    regime: str
    features: Features  # that the plan may use


class Count(NamedTuple):
    """The bytes of a call, as in a Row."""

    minimum: int
    read_again: int
    moved: int
    others: int


def calls(operator: Operator, direction: str, dtype: str) -> Iterator[Call]:
    """Yield a call of each regime that the operator's plans have."""
    found: set[str] = set()
    sizes = _SAMPLES if operator.of_channels else [(width,) for width in _WIDTHS]
    for features, size in product(feature_sets(_ARCHITECTURE), sizes):
        made = plans(operator, direction, dtype, size, _ARCHITECTURE, features)
        planned = next(plan.regime for plan in made if plan.regime != PARAM_GRAD)
        if planned not in found:
            found.add(planned)
            rows = 1 if operator.of_channels else max(2, _ELEMENTS // size[0])
            if COPIED_AHEAD in planned:
                rows *= 3  # so that each block has some more
            yield Call(operator, direction, dtype, (rows, *size), planned, features)


def count(call: Call) -> Count:
    """Emulate a call and add up what it moved."""
    operator = call.operator
    names = [name for name in _ROWS[call.direction] if _has(operator, name)]
    ran = (_emulate_group if operator.of_channels else _emulate_rows)(call)
    launch = ran.launches[0] if operator.of_channels else ran.launch
    if regime(launch.build) != call.regime:
        raise ValueError(f"{call} ran as {regime(launch.build)!r}")
    moved = ran.moved
    first = moved[launch.build.kernel]
    size = math.prod(call.shape) * DTYPES[call.dtype].itemsize
    others = sum(
        distinct
        for result in moved.values()
        for name, distinct in result.distinct.items()
        if name not in names
    )
    return Count(
        len(names) * size,
        len(_read_again(call, names)) * size,
        sum(first.bytes[name] for name in names),
        others,
    )


def _has(operator: Operator, name: str) -> bool:
    if "residual" in name:
        return operator.has_residual
    return name not in ("gate", "dgate") or operator.gate_position is not None


def _read_again(call: Call, names: list[str]) -> set[str]:
    """Return what a regime that keeps nothing reads for the sums, and again for the results."""
    if call.regime == THREE_LAUNCHES:
        return {"x", "dy"} & set(names)
    if call.regime != STREAMED:
        return set()
    if call.direction == "backward":
        return {"dy", "x", "gate"} & set(names)
    stream = "new_residual" if call.operator.has_residual else "x"
    return {stream, "gate"} if call.operator.gate_position == "pre" else {stream}


def _emulate_rows(call: Call) -> Any:
    """Run a row norm."""
    kernels, operator = from_tests("emulation.kernels"), call.operator
    operands = host_operands(operator, call.dtype, call.shape)
    told = {name: value for name, value in operator.options.items() if name != "groups"}
    told |= {"groups": operator.groups(call.shape[1]), "center": operator.center}
    emulated = from_tests("emulation.plans").Plan(features=call.features)
    told["plan"] = replace(emulated, sm_count=1) if COPIED_AHEAD in call.regime else emulated
    if operator.gate_position:
        told["gate"] = operands["gate"]
    parameters = [operands.get(name) for name in ("weight", "bias")]
    if call.direction == "forward":
        residual = operands.get("residual")
        return kernels.emulate_forward(operands["x"], *parameters, residual=residual, **told)
    stream, saved = _saved(operator, operands)
    if operator.has_residual:
        saved["d_residual"] = operands["d_residual"]
    return kernels.emulate_backward(operands["dy"], stream, *parameters, **saved, **told)


def _saved(operator: Operator, operands: Operands) -> tuple[Any, dict[str, Any]]:
    """Return what was normalised and the statistics of it, as a forward hands them on."""
    saved = training_forward(reference, operator, operands)()
    stream = operands["x"]
    if operator.has_residual:
        stream = saved.residual.astype(stream.dtype)
    found = {"rstd": saved.rstd, "mean": saved.mean if operator.center else None}
    return stream, {
        name: None if array is None else array.astype("float32") for name, array in found.items()
    }


def _emulate_group(call: Call) -> Any:
    """Run a group norm."""
    kernels, operator = from_tests("emulation.group_kernels"), call.operator
    operands = host_operands(operator, call.dtype, call.shape)
    told = {"activation": operator.options.get("activation"), "channel_axis": 1}
    groups, parameters = operator.groups(call.shape[1]), (operands["weight"], operands["bias"])
    if call.direction == "forward":
        return kernels.emulate_group_forward(operands["x"], groups, *parameters, **told)
    _, saved = _saved(operator, operands)
    return kernels.emulate_group_backward(
        operands["dy"], operands["x"], groups, *parameters, **saved, **told
    )
