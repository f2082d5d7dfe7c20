# SPDX-License-Identifier: MIT
"""Calls of the row norms and the group norms by cases, each checked against the oracle.

A case has the operands, the options of the norm, and the layout of the arrays in memory.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

import cunorm
from cunorm import GroupNormForward, GroupNormGrads, NormForward, NormGrads, reference
from tests.support.bounds import check_backward, check_forward, ulp
from tests.support.covers import Case, pairwise
from tests.support.gpu_arrays import OnCupy, get_all
from tests.support.group_bounds import check_group_backward, check_group_forward
from tests.support.operands import DTYPES
from tests.support.placed import GROUP_LAYOUTS, ROW_LAYOUTS, Array, Draws, Placed, Samples

EPS = 1e-5
_NORM = {
    **{"c": None, "center": False, "groups": 1, "weight_offset": 0.0},
    **{"round_before_weight": False, "gate_activation": "silu", "gate_position": "post"},
}
_UP_TO_R = ("center", "groups", "gate_activation", "gate_position")  # options of the statistics
# The default case. A dtype of None: an absent operand; for a result, the dtype of x or, for a
# gradient, of its operand. `stream` is "+ float32" for a residual of that dtype, "as float32" for x
# in that dtype. `shape` has three leading axes, then the width of a group; a group norm has
# `samples`. `layouts` is the layout of all operands, or the index of the first one's layout; the
# others take the following layouts in turn. `picked` are the indices of the rows or samples to
# keep; None: all.
DEFAULTS = _NORM | {
    **{"x": "float32", "weight": "float32", "bias": "float32", "gate": None, "activation": "silu"},
    **{"y": None, "stream": None, "dy": "float32", "d_residual": None, "dx": None, "dgate": None},
    **{"needs": ("x", "weight", "bias", "gate"), "accumulate": None},
    **{"eps": EPS, "far": False, "layouts": "contiguous", "offset": 0},
    **{"picked": None, "in_place": None},
}


class Call(NamedTuple):
    """A call of a function with placed arrays."""

    on: Any
    function: Callable[..., Any]
    inputs: dict[str, Placed | None]
    options: dict[str, Any]
    out: Any  # the function's result, with placed arrays
    arrays: list[Placed]
    check_result: Callable[[Any], Any]  # against the oracle

    def run(self) -> Any:
        """Make the call, check that it writes nothing but its results, and return these."""
        for placed in self.arrays:
            placed.put()
        given = {name: placed and placed.array for name, placed in self.inputs.items()}
        places = [placed for placed in self.out if placed is not None]
        out = type(self.out)(*(placed and placed.array for placed in self.out))
        result = self.function(**given, **self.options, out=out if places else None)
        for placed in self.arrays:
            placed.check(written=any(placed is place for place in places))
        return get_all(self.on, result)

    def check(self) -> Any:
        """Make the call, check its results against the oracle, and return them."""
        result = self.run()
        self.check_result(result)
        return result


def call_of(kernel: str, case: Mapping[str, Any], on: Any = None) -> Call:
    """Place the arrays of a call that runs a kernel, by default on a GPU."""
    case, on, is_row = DEFAULTS | case, on or OnCupy(), "row" in kernel
    make, options = _rows(case, on) if is_row else _groups(case, on)
    inputs = {"x": make.large(case["x"])}
    if is_row:
        inputs["gate"] = make.large(case["gate"], near=True)
    inputs |= {"weight": make.param(case["weight"], mean=1.0), "bias": make.param(case["bias"])}
    return (_backward if "backward" in kernel else _forward)(
        case, on, is_row, make, inputs, options
    )


def groups_of(case: Mapping[str, Any], array: Array) -> Array:
    """View an array like x as rows or samples, positions, groups and their channels."""
    of = case.get("samples")
    if of is None:
        return array.reshape(-1, 1, 1, array.shape[-1])
    array = np.moveaxis(array, of.channel_axis, -1)
    return array.reshape(len(array), -1, of.groups, of.channels // of.groups)


def _rows(case: Case, on: Any) -> tuple[Draws, dict[str, Any]]:
    *leading, width = case["shape"]
    columns, picked = width * case["groups"], case["picked"]
    drawn = shape = (*leading, columns)
    layouts = [name for name in ROW_LAYOUTS if case["groups"] == 1 or name != "three strides"]
    arranged = _arrangement(case, layouts)
    if picked is not None:
        shape = (1, 1, len(picked), columns)
        arranged["pick"] = lambda values: values.reshape(-1, columns)[picked].reshape(shape)
    options = {name: case[name] for name in _NORM}
    if case["weight"] is None:
        options["weight_offset"] = 0.0
    make = Draws(on, lambda dtype, at: ROW_LAYOUTS[at](shape, dtype), drawn, columns, **arranged)
    return make, options


def _groups(case: Case, on: Any) -> tuple[Draws, dict[str, Any]]:
    of: Samples = case["samples"]
    arranged, picked, shape = _arrangement(case, GROUP_LAYOUTS), case["picked"], of.shape
    if picked is not None:
        of = of._replace(samples=len(picked))
        arranged["pick"] = lambda values: values[picked]
    options = {"num_groups": of.groups, "channel_axis": of.channel_axis}
    make = Draws(on, of.empty, shape, of.channels, **arranged)
    return make, options | {"activation": case["activation"]}


def _arrangement(case: Case, names: Sequence[str]) -> dict[str, Any]:
    first = case["layouts"]
    layouts = (*names[first:], *names[:first]) if isinstance(first, int) else (first,)
    return {"layouts": layouts, "far": case["far"], "offset": case["offset"]}


def _hosts(inputs: Mapping[str, Placed | None]) -> dict[str, Array | None]:
    return {name: placed and placed.host for name, placed in inputs.items()}


def _check_result(check: Callable[..., Any], operands: dict[str, Any], result: Any) -> None:
    check(result, **operands)


def _forward(case: Case, on: Any, is_row: bool, make: Draws, inputs: Any, options: Any) -> Call:
    options |= {"eps": case["eps"]}
    places = {"y": inputs["x"] if case["in_place"] else make.result(case["y"] or case["x"])}
    if is_row:
        kind, _, stream = (case["stream"] or "").partition(" ")
        inputs["residual"] = make.large(stream if kind == "+" else None)
        options |= {"residual_dtype": DTYPES[stream]} if kind == "as" else {}
        if kind:
            over = inputs["residual"] if case["in_place"] == "all" else None
            places["residual"] = over or make.result(stream)
    row_functions = (cunorm.normalize_forward, NormForward, check_forward)
    group_functions = (cunorm.group_norm_forward, GroupNormForward, check_group_forward)
    function, kind, check = row_functions if is_row else group_functions
    check_result = partial(_check_result, check, _hosts(inputs) | options)
    return Call(on, function, inputs, options, kind(**places), make.all, check_result)


def _backward(case: Case, on: Any, is_row: bool, make: Draws, inputs: Any, options: Any) -> Call:
    inputs["dy"] = make.large(case["dy"], near=True)
    if is_row:
        inputs["d_residual"] = make.large(case["d_residual"], near=True)
        options |= {"x_dtype": DTYPES[case["dx"] or case["x"]]}
    operands = _hosts(inputs) | options
    statistics = _statistics(case, operands)
    inputs |= {name: make.values(array) for name, array in statistics.items()}
    needs = tuple(name for name in case["needs"] if inputs.get(name)) or ("x",)
    before = _accumulated(case, make, needs)
    places = before | _gradients(case, make, inputs, needs)
    row_functions = (cunorm.normalize_backward, NormGrads, check_backward)
    group_functions = (cunorm.group_norm_backward, GroupNormGrads, check_group_backward)
    function, kind, check = row_functions if is_row else group_functions
    exact = getattr(reference, function.__name__)

    def check_result(result: Any) -> None:
        if before:
            result = _subtract(result, before, exact(**operands, **statistics))
        check(result, **operands, eps=EPS)

    options = options | {"needs": needs, "accumulate": bool(before)}
    return Call(on, function, inputs, options, kind(**places), make.all, check_result)


def _statistics(case: Case, operands: dict[str, Any]) -> dict[str, Array]:
    """Return the exact mean and rstd, rounded to the compute type."""
    if "num_groups" in operands:
        names, function = ("num_groups", "channel_axis"), reference.group_norm_forward
    else:
        names, function = ("gate", *_UP_TO_R), reference.normalize_forward
    exact = function(operands["x"], eps=EPS, **{name: operands[name] for name in names})
    is_wide = case["x"] == "float64" or operands.get("x_dtype") == np.float64
    found = {name: getattr(exact, name) for name in ("rstd", "mean")}
    return {n: a.astype(f"f{8 if is_wide else 4}") for n, a in found.items() if a is not None}


def _gradients(case: Case, make: Draws, inputs: Any, needs: Any) -> dict[str, Placed]:
    """Place dx, dgate and dresidual, over inputs if the case is in place."""
    found: dict[str, Placed] = {}
    x_dtype = case["dx"] or case["x"]
    if "x" in needs:
        found["dx"] = inputs[case["in_place"]] if case["in_place"] else make.result(x_dtype)
        if x_dtype != case["x"] and "d_residual" in inputs:
            found["dresidual"] = make.result(case["x"])
    if "gate" in needs:
        over = inputs["gate"] if case["in_place"] else None
        found["dgate"] = over or make.result(case["dgate"] or case["gate"])
    return found


def _accumulated(case: Case, make: Draws, needs: tuple[str, ...]) -> dict[str, Placed]:
    """Place the arrays to which gradients of parameters are added, if there are any."""
    names = [f"d{name}" for name in ("weight", "bias") if name in needs]
    return {name: make.param(case["accumulate"]) for name in names if case["accumulate"]}


def _subtract(result: Any, before: dict[str, Placed], exact: Any) -> Any:
    """Subtract the former values from sums: the value nearest to the exact one that rounds so."""
    for name, placed in before.items():
        total = getattr(result, name)
        rounding = 0.5 * ulp(total, str(total.dtype))
        added = total.astype(np.float64) - placed.host.astype(np.float64)
        nearest = np.clip(getattr(exact, name), added - rounding, added + rounding)
        result = result._replace(**{name: nearest})
    return result


# --- covers ---------------------------------------------------------------------------------------

NARROW = (None, "float32", "bfloat16")
ACTIVATIONS = ("silu", "gelu", "tanh", "relu", "sigmoid", "gelu_tanh", "identity")
_OF_NORM = {
    **{"center": (False, True), "c": (None, 1.0), "groups": (1, 3), "weight_offset": (0.0, 1.0)},
    **{"round_before_weight": (False, True), "gate_position": ("pre", "post")},
    **{"gate": (None, "float32", "bfloat16", "float16"), "gate_activation": ACTIVATIONS[:3]},
    **{"weight": NARROW, "bias": NARROW},
}
_OF_GROUPS = {"weight": NARROW, "bias": NARROW, "activation": (None, "silu", "gelu", "relu")}
FACTORS: dict[str, dict[str, Any]] = {
    "row_norm_forward": {
        **{"x": tuple(DTYPES), "y": NARROW, "stream": (None, "+ float32", "as bfloat16")},
        **{"in_place": (None, "x", "all"), **_OF_NORM},
    },
    "row_norm_backward": {
        **{"x": tuple(DTYPES), "dy": (*NARROW[1:], "float16"), "d_residual": NARROW, "dx": NARROW},
        "needs": (("x", "weight", "bias", "gate"), ("x", "gate"), ("weight", "bias"), ("weight",)),
        **{"dgate": (None, "float32"), "accumulate": (None, "float32", "float64")},
        **{"in_place": (None, "dy"), **_OF_NORM},
    },
    "group_norm_forward": {
        **{"x": tuple(DTYPES), "y": NARROW, "in_place": (None, "x"), **_OF_GROUPS},
    },
    "group_norm_backward": {
        **{"x": tuple(DTYPES), "dy": NARROW[1:], "dx": NARROW, "in_place": (None, "dy", "x")},
        **{"needs": (("x", "weight", "bias"), ("x",), ("weight", "bias"), ("bias",))},
        **{"accumulate": (None, "float32", "float64"), **_OF_GROUPS},
    },
}


def cover(kernel: str, where: Mapping[str, Any], seed: int | None = None) -> list[Case]:
    """Return a cover of all pairs, with `where` over the factors; a seed adds choices."""
    factors = {**FACTORS[kernel], **where}
    if seed is not None:
        activations = {"gate_activation": ACTIVATIONS, "activation": (None, *ACTIVATIONS[:-1])}
        more = dict.fromkeys(("weight", "bias", "gate", "d_residual", "dx", "y"), (None, *DTYPES))
        more |= activations | {"dy": tuple(DTYPES)}
        factors = {name: more.get(name, choices) for name, choices in factors.items()}
        factors = dict(random.Random(seed).sample(list(factors.items()), len(factors)))
    return [_legal(case) for case in pairwise(factors, relevant)]


def _legal(case: Case) -> Case:
    """Return a valid case: a result has the dtype of the array that it is written over."""
    more = {}
    if case["in_place"] == "dy":
        more = {"dx": case["dy"], "dgate": None}
    elif case["in_place"]:
        more = {"dx": None, "y": None}
    return case | {name: choice for name, choice in more.items() if name in case}


def relevant(case: Case) -> Case:
    """Return the choices of a case, or of a part of one, that have an effect."""
    idle: set[str] = set()
    if not case.get("gate", True):
        idle |= {"gate_activation", "gate_position", "dgate"}
    idle |= set() if case.get("weight", True) else {"weight_offset"}
    idle |= set() if not case.get("in_place") else {"y", "dx", "dgate"}
    needs = case.get("needs", ("x", "gate", "weight"))
    idle |= set() if "x" in needs else {"dx", "d_residual", "in_place"}
    idle |= set() if "gate" in needs else {"dgate"}
    idle |= set() if {"weight", "bias"} & set(needs) else {"accumulate"}
    return {name: choice for name, choice in case.items() if name not in idle}


def arranged(kernel: str, draw: random.Random, case: Case) -> Case:
    """Add the layout of arrays in memory, and the distance of their numbers from zero."""
    layouts = GROUP_LAYOUTS if "group" in kernel else ROW_LAYOUTS
    # In place, no two elements of an array may share memory.
    first = "contiguous" if case["in_place"] else draw.choice(["contiguous", *range(len(layouts))])
    arrangement = {"layouts": first, "offset": draw.choice([0, 0, 1, 2, 4])}
    # Far from zero, a mean's rounding may cross the corner of relu.
    far = draw.choice([False, True]) and case.get("activation") != "relu"
    return case | arrangement | {"far": far}
