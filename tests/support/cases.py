# SPDX-License-Identifier: MIT
"""Calls of row norms and group norms, each described by a case; checks against the oracle.

A case has the operands, the options of the norm, and the layout of the arrays in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import signature
from math import prod
from typing import Any, NamedTuple

import numpy as np

import cunorm
from cunorm import GroupNormForward, GroupNormGrads, NormForward, NormGrads, reference
from tests.support.bounds import Expected, expected_backward, expected_forward, ulp
from tests.support.covers import Case
from tests.support.gpu_arrays import OnCupy
from tests.support.group_bounds import expected_group_backward, expected_group_forward
from tests.support.kinds import KINDS
from tests.support.operands import DTYPES
from tests.support.placed import GROUP_LAYOUTS, ROW_LAYOUTS, Array, Draws, Placed, Samples

EPS = 1e-5
_NORM = {
    **{"c": None, "center": False, "axis": -1, "groups": 1, "weight_offset": 0.0},
    **{"round_before_weight": False, "gate_activation": "silu", "gate_position": "post"},
}
# The options that affect the statistics.
_UP_TO_R = ("center", "axis", "groups", "gate_activation", "gate_position")
# The default case. An operand whose dtype is None is absent; y and dx have x's dtype if theirs is
# None, dgate has the gate's. `stream` is "+ float32" for a residual of float32, "as float32" for a
# residual_dtype of float32, "+ bfloat16 as float32" for both. `shape` ends with the width of a
# group (named layouts need three axes before it); group norms have `samples` instead. `layouts` is
# the name of one layout; or an index, from which the named layouts rotate; or functions, used in
# rotation, that allocate an array of a shape and dtype. `results` has such functions for results.
# `given` names the results that get arrays; None gives arrays to all results of x's shape. `picked`
# has the indices of the rows or samples to keep; None keeps all. `values` is the kind of numbers in
# x and residual, `scale` their factor; `dy_scale` is the factor of dy and d_residual. `weight_own`
# and `bias_own` have a 1 for each leading axis of x along which the parameter has rows of its own:
# "100" for a weight of each sample, "1" in a group norm; "01" lacks the first of three axes; None
# is a parameter without leading axes. `gate_own` says the same of a gate on the branch, with
# " scalar" behind it if a row's gate is one number; None is a gate of x's shape.
DEFAULTS = _NORM | {
    **{"x": "float32", "weight": "float32", "bias": "float32", "gate": None, "activation": "silu"},
    **{"y": None, "stream": None, "dy": "float32", "d_residual": None, "dx": None, "dgate": None},
    **{"needs": ("x", "weight", "bias", "gate"), "accumulate": None},
    **{"eps": EPS, "far": False, "layouts": "contiguous", "offset": 0, "kind": "numpy"},
    **{"picked": None, "in_place": None, "given": None, "workspace": False, "results": None},
    **{"values": "normal", "scale": 1.0, "dy_scale": 1.0},
    **{"weight_own": None, "bias_own": None, "gate_own": None},
}


class Call(NamedTuple):
    """A call of a function with placed arrays."""

    on: Any
    function: Callable[..., Any]
    inputs: dict[str, Placed | None]
    options: dict[str, Any]
    out: Any  # the function's result, with placed arrays
    arrays: list[Placed]
    expected: Callable[[], Expected]
    before: dict[str, Placed]  # arrays to which results are added
    kind: str  # the library of the arrays, on a CPU

    def run(self, **more: Any) -> Any:
        """Make the call, check that it writes nothing but its results, and return the results."""
        for placed in self.arrays:
            placed.put()
        result = self.function(**(self.arguments() | more))
        self.check_memory(written=(*self.out, self.inputs.get("workspace")))
        return type(result)(*map(self._get, result, self.out))

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the call."""
        inputs = {name: self._passed(placed) for name, placed in self.inputs.items()}
        if self.kind == "dlpack" and "workspace" in inputs:  # cunorm takes no uint8 by DLPack
            inputs["workspace"] = self.inputs["workspace"].array
        out = [self._passed(placed) for placed in self.out]
        given = {"out": type(self.out)(*out)} if any(self.out) else {}
        return inputs | self.options | given

    def check_memory(self, written: Sequence[Placed | None] = ()) -> None:
        """Check that only these arrays are written, and no memory between their elements."""
        for placed in self.arrays:
            placed.check(written=any(placed is other for other in written))

    def check(self) -> Any:
        """Make the call, check its results against the oracle, and return them."""
        result = self.run()
        self.check_result(result)
        return result

    def check_result(self, result: Any) -> None:
        """Check a result against the oracle."""
        expected = self.expected()
        if "needs" in self.options:
            assert {n for n, array in result._asdict().items() if array is not None} == self._needed
        expected.check(_subtract(result, self.before, expected.exact))

    @property
    def _needed(self) -> set[str]:
        """Return the names of the gradients that are needed and whose operands are present."""
        found = {f"d{name}" for name in self.options["needs"] if self.inputs.get(name)}
        both = {"dx", "dresidual"} & {*self.out._fields}  # one array, or two if dtypes differ
        return found | (both if "dx" in found else set())

    def _passed(self, placed: Placed | None) -> Any:
        if placed is None or self.on.is_gpu:
            return placed and placed.array
        return KINDS[self.kind]().put(placed.array)

    def _get(self, array: Any, placed: Placed | None) -> Any:
        if array is None or isinstance(array, float):
            return array
        if self.on.is_gpu:
            return self.on.get(array)
        return (KINDS[self.kind]().get(array) if placed is None else placed.array).copy()


# The function that runs a kernel, its result, and the function that gives expected results.
_FUNCTIONS: dict[str, tuple[Callable[..., Any], Any, Callable[..., Expected]]] = {
    "row_norm_forward": (cunorm.normalize_forward, NormForward, expected_forward),
    "row_norm_backward": (cunorm.normalize_backward, NormGrads, expected_backward),
    "group_norm_forward": (cunorm.group_norm_forward, GroupNormForward, expected_group_forward),
    "group_norm_backward": (cunorm.group_norm_backward, GroupNormGrads, expected_group_backward),
}


def call_of(kernel: str, case: Mapping[str, Any], on: Any = None) -> Call:
    """Place the arrays of a call that runs a kernel, by default on a GPU."""
    case, on, is_row = DEFAULTS | case, on or OnCupy(), "row" in kernel
    function, result, expected = _FUNCTIONS[kernel]
    make, options = _rows(case, on) if is_row else _groups(case, on)
    inputs = {"x": make.large(case["x"])}
    if is_row and case["gate_own"] is None:
        inputs["gate"] = make.large(case["gate"], near=True)
    elif is_row:
        inputs["gate"] = _parameter(case, make, "gate")
    inputs["weight"] = _parameter(case, make, "weight", mean=1.0)
    inputs["bias"] = _parameter(case, make, "bias")
    add = _add_backward if "backward" in kernel else _add_forward
    operands, outputs, before = add(case, is_row, make, inputs, options)
    exact = partial(expected, **operands, eps=case["eps"])
    kept = {*before, *(case["given"] or ())}
    if case["given"] is None or case["in_place"]:
        kept |= {*outputs}
    if case["workspace"]:
        inputs["workspace"] = make.workspace(_workspace_size(function, inputs, options))
    out = result()._replace(**{name: placed for name, placed in outputs.items() if name in kept})
    return Call(on, function, inputs, options, out, make.all, exact, before, case["kind"])


def groups_of(case: Mapping[str, Any], array: Array) -> Array:
    """View an array like x with four axes: row or sample, position, group, channel of a group."""
    samples = case.get("samples")
    if samples is None:
        width = prod(array.shape[case.get("axis", -1) :])
        return array.reshape(-1, 1, 1, width)
    array = np.moveaxis(array, samples.channel_axis, -1)
    return array.reshape(len(array), -1, samples.groups, samples.channels // samples.groups)


def own_shape(case: Mapping[str, Any], name: str) -> tuple[int, ...] | None:
    """Return the shape of an operand that has some rows of its own, or None for its usual shape."""
    own = case.get(f"{name}_own")
    if own is None:
        return None
    leading, row = _leading_and_row(case)
    flags = own.removesuffix(" scalar")
    sizes = leading[len(leading) - len(flags) :]
    lead = (size if flag == "1" else 1 for size, flag in zip(sizes, flags, strict=True))
    return (*lead, *((1,) * len(row) if flags != own else row))


def _leading_and_row(case: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the axes of x before a parameter's row, and those of the row."""
    samples = case.get("samples")
    if samples is not None:
        return (samples.samples,), (samples.channels,)
    *sizes, width = case["shape"]
    shape, axis = (*sizes, width * case.get("groups", 1)), case.get("axis", -1)
    return shape[:axis], shape[axis:]


def _parameter(case: Case, make: Draws, name: str, mean: float = 0.0) -> Placed | None:
    """Place a parameter; one with rows of its own gets a row for each picked row or sample of x."""
    picked, shape = case["picked"], own_shape(case, name)
    if picked is None or shape is None:
        return make.param(case[name], mean, shape)
    leading, row = _leading_and_row(case)
    own_row = shape[len(shape) - len(row) :]

    def pick(values: Array) -> Array:
        rows = np.broadcast_to(values, (*leading, *own_row)).reshape(-1, *own_row)[picked]
        return rows if "samples" in case else rows.reshape(1, 1, *rows.shape)

    return make.param(case[name], mean, shape, pick)


def _rows(case: Case, on: Any) -> tuple[Draws, dict[str, Any]]:
    *leading, width = case["shape"]
    drawn = shape = (*leading, width * case["groups"])
    row, picked = shape[case["axis"] :], case["picked"]
    layouts = [name for name in ROW_LAYOUTS if case["groups"] == 1 or name != "three strides"]
    arranged = _arrangement(case, layouts)
    if picked is not None:
        shape = (1, 1, len(picked), *row)
        arranged["pick"] = lambda values: values.reshape(-1, *row)[picked].reshape(shape)
    options = {name: case[name] for name in _NORM}
    if case["gate"] is None:
        options |= {"gate_activation": "silu", "gate_position": "post"}

    def empty(dtype: np.dtype, layout: Any) -> Array:
        return ROW_LAYOUTS.get(layout, layout)(shape, dtype)

    return Draws(on, empty, drawn, row, **arranged), options


def _groups(case: Case, on: Any) -> tuple[Draws, dict[str, Any]]:
    samples: Samples = case["samples"]
    arranged, picked, drawn = _arrangement(case, GROUP_LAYOUTS), case["picked"], samples.shape
    if picked is not None:
        samples = samples._replace(samples=len(picked))
        arranged["pick"] = lambda values: values[picked]

    def empty(dtype: np.dtype, layout: Any) -> Array:
        named = isinstance(layout, str)
        return samples.empty(dtype, layout) if named else layout(samples.shape, dtype)

    options = {"num_groups": samples.groups, "channel_axis": samples.channel_axis}
    make = Draws(on, empty, drawn, samples.channels, **arranged)
    return make, options | {"activation": case["activation"]}


def _arrangement(case: Case, names: Sequence[str]) -> dict[str, Any]:
    layouts = case["layouts"]
    if isinstance(layouts, int):
        layouts = (*names[layouts:], *names[:layouts])
    elif isinstance(layouts, str):
        layouts = (layouts,)
    kept = ("results", "values", "scale", "far", "offset")
    return {"layouts": layouts} | {name: case[name] for name in kept}


def _hosts(inputs: Mapping[str, Placed | None]) -> dict[str, Array | None]:
    return {name: placed and placed.host for name, placed in inputs.items()}


# These two add the inputs and options of a direction, and return the oracle's operands, placed
# results, and the arrays to which results are added.


def _add_forward(case: Case, is_row: bool, make: Draws, inputs: Any, options: Any) -> Any:
    outputs = {"y": inputs["x"] if case["in_place"] else make.result(case["y"] or case["x"])}
    if is_row:
        words = (case["stream"] or "").split()
        dtypes = dict(zip(words[::2], words[1::2], strict=True))
        inputs["residual"] = make.large(dtypes.get("+"))
        options |= {"residual_dtype": DTYPES[dtypes["as"]]} if "as" in dtypes else {}
        if words:
            over = inputs["residual"] if case["in_place"] == "all" and "as" not in dtypes else None
            outputs["residual"] = over or make.result(words[-1])
        elif options["gate_position"] == "branch":
            outputs["residual"] = make.result(case["x"])
    operands = _hosts(inputs) | options
    options["eps"] = case["eps"]
    if case["given"]:
        statistics = _statistics(case, operands).items()
        outputs |= {name: make.statistic(array) for name, array in statistics}
    return operands, outputs, {}


def _add_backward(case: Case, is_row: bool, make: Draws, inputs: Any, options: Any) -> Any:
    inputs["dy"] = make.large(case["dy"], near=True, scale=case["dy_scale"])
    if is_row:
        inputs["d_residual"] = make.large(case["d_residual"], near=True, scale=case["dy_scale"])
        options |= {"x_dtype": DTYPES[case["dx"] or case["x"]]}
    if options.get("gate_position") == "branch" and inputs["gate"]:
        inputs["branch"] = make.large(case["dx"] or case["x"], near=True)
    operands = _hosts(inputs) | options
    inputs |= {name: make.values(array) for name, array in _statistics(case, operands).items()}
    named = tuple(name for name in case["needs"] if is_row or name != "gate")  # some may be absent
    needs = tuple(name for name in named if inputs.get(name))
    # The arrays to which the call adds gradients of parameters.
    summed = [name for name in ("weight", "bias") if name in needs and case["accumulate"]]
    before = {
        f"d{name}": make.param(case["accumulate"], shape=own_shape(case, name)) for name in summed
    }
    outputs = _gradients(case, make, inputs, needs) | before
    options |= {"needs": named, "accumulate": bool(case["accumulate"])}
    return operands, outputs, before


def _workspace_size(function: Callable[..., Any], inputs: Any, options: Any) -> int:
    accepted = signature(cunorm.workspace_size).parameters
    arrays = {name: placed and placed.array for name, placed in inputs.items()}
    given = {name: one for name, one in (arrays | options).items() if name in accepted}
    return cunorm.workspace_size(function.__name__, **given)


def _statistics(case: Case, operands: dict[str, Any]) -> dict[str, Array]:
    """Return the exact mean and rstd, rounded to the compute type."""
    if "num_groups" in operands:
        names, function = ("num_groups", "channel_axis"), reference.group_norm_forward
    else:
        names, function = ("gate", *_UP_TO_R), reference.normalize_forward
    given = {name: operands[name] for name in names}
    if given.get("gate_position") == "branch":
        given |= {"gate": None, "gate_position": "post"}
    exact = function(operands["x"], eps=case["eps"], **given)
    is_wide = case["x"] == "float64" or operands.get("x_dtype") == np.float64
    found = {name: getattr(exact, name) for name in ("rstd", "mean")}
    return {n: a.astype(f"f{8 if is_wide else 4}") for n, a in found.items() if a is not None}


def _gradients(case: Case, make: Draws, inputs: Any, needs: Any) -> dict[str, Placed]:
    """Place dx and dgate (in place: over inputs), dresidual, and the sums that `given` names."""
    found: dict[str, Placed] = {}
    x_dtype, named = case["dx"] or case["x"], {*(case["given"] or ())}
    if "x" in needs:
        found["dx"] = inputs[case["in_place"]] if case["in_place"] else make.result(x_dtype)
        are_two = x_dtype != case["x"] or "dresidual" in named or "branch" in inputs
        if "d_residual" in inputs and are_two:
            found["dresidual"] = make.result(case["x"])
    if "gate" in needs:
        over = inputs["gate"] if case["in_place"] else None
        if over is None and case["gate_own"] is not None:
            over = make.statistic(inputs["gate"].host)
        found["dgate"] = over or make.result(case["dgate"] or case["gate"])
    for name in {"weight", "bias"} & {*needs}:
        if f"d{name}" in named:
            found[f"d{name}"] = make.statistic(inputs[name].host)
    return found


def _subtract(result: Any, before: dict[str, Placed], exact: Any) -> Any:
    """Subtract `before`; of all differences that the rounding allows, take the nearest to exact."""
    for name, placed in before.items():
        total = getattr(result, name)
        rounding = 0.5 * ulp(total, str(total.dtype))
        added = total.astype(np.float64) - placed.host.astype(np.float64)
        nearest = np.clip(getattr(exact, name), added - rounding, added + rounding)
        result = result._replace(**{name: nearest})
    return result
