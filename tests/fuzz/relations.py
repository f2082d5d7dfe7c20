# SPDX-License-Identifier: MIT
"""Relations between the result of a call and the results of other calls.

Each relation takes a kernel, a case, the case's call and result, and a seed for the choices that
the relation makes. It returns whether it applies to the case.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from inspect import signature
from math import prod
from typing import Any

import numpy as np

import cunorm
from tests.fuzz.views import is_expanded
from tests.support.cases import Call, call_of
from tests.support.covers import Case
from tests.support.gpu_arrays import OnNumpy
from tests.support.operands import assert_same_bits, assert_same_fields

_OF_PARAMETERS = ("dweight", "dbias")


def same_again(kernel: str, case: Case, call: Call, result: Any, seed: int) -> bool:
    """A repeated call has the same bits, with any number of threads."""
    try:
        cunorm.set_num_threads(1 + seed % 3)
        assert_same_fields(call.run(), result)
    finally:
        cunorm.set_num_threads(None)
    return True


def other_memory(kernel: str, case: Case, call: Call, result: Any, seed: int) -> bool:
    """Bits do not depend on strides, alignment, framework or `out`."""
    if not _is_movable(case):
        return False
    more = {"layouts": "contiguous", "results": None, "offset": 0, "kind": "numpy"}
    more["workspace"] = False
    assert_same_fields(call_of(kernel, case | more, OnNumpy()).run(), result)
    return True


def in_place(kernel: str, case: Case, call: Call, result: Any, seed: int) -> bool:
    """Results that are written over an input have the same bits."""
    name, over = ("y", "x") if "forward" in kernel else ("dx", "dy")
    written = getattr(result, name)
    has_other = case.get("dgate") not in (None, case.get("gate"))  # dgate is written over the gate
    if written is None or has_other or not _is_movable(case):
        return False
    if written.dtype != call.inputs[over].host.dtype:
        return False
    more = {"in_place": over, "layouts": "contiguous", "results": None, "kind": "numpy"}
    more |= {name: str(written.dtype), "dgate": None}
    assert_same_fields(call_of(kernel, case | more, OnNumpy()).run(), result)
    return True


def some_rows(kernel: str, case: Case, call: Call, result: Any, seed: int) -> bool:
    """A row, or a sample, has the same bits in any order of rows, and among any other rows."""
    count, choose = _count(case), random.Random(seed)
    if not _is_movable(case):
        return False
    picked = [choose.randrange(count) for _ in range(choose.randint(1, count + 2))]
    if seed % 2:
        picked = choose.sample(range(count), count)
    found = _picked(kernel, case, picked).run()
    rows = _rows(case, found, len(picked), range(len(picked)))
    _assert_rows(rows, _rows(case, result, count, picked))
    return True


def poisoned(kernel: str, case: Case, call: Call, result: Any, seed: int) -> bool:
    """An infinity or NaN changes no bit of another row."""
    count, choose = _count(case), random.Random(seed)
    if any(map(is_expanded, case["layouts"])):
        return False
    names = ("x", "dy", *(() if _is_shared(case, "gate") else ("gate",)), "residual", "branch")
    name = choose.choice([name for name in names if call.inputs.get(name)])
    host = call.inputs[name].host
    index = tuple(choose.randrange(size) for size in host.shape)
    number = np.ravel_multi_index(index, host.shape) * count // host.size
    host[index] = choose.choice([np.nan, np.inf, -np.inf])
    others = [row for row in range(count) if row != number]
    with np.errstate(all="ignore"):
        found = call.run()
    _assert_rows(_rows(case, found, count, others), _rows(case, result, count, others))
    return True


def twice_x(kernel: str, case: Case, call: Call, result: Any, seed: int) -> bool:
    """If x and residual are doubled and eps is multiplied by 4, results change by `factors`."""
    if call.inputs.get("d_residual") or _has_float16(result):
        return False
    _scale(call.inputs, ("x", "residual", "branch", "mean"), 2)
    _scale(call.inputs, ("rstd",), 0.5)
    more = {"eps": 4 * case["eps"]} if "forward" in kernel else {}
    found = call.run(**more)
    factors = {"residual": 2, "mean": 2, "rstd": 0.5, "dx": 0.5, "dresidual": 0.5}
    _assert_scaled(case, found, result, lambda name: factors.get(name, 1))
    return True


def twice_dy(kernel: str, case: Case, call: Call, result: Any, seed: int) -> bool:
    """A backward is linear in dy and d_residual; a factor of 2 is exact."""
    if _has_float16(result):
        return False
    _scale(call.inputs, ("dy", "d_residual"), 2)
    _assert_scaled(case, call.run(), result, lambda name: 2)
    return True


def split_batch(kernel: str, case: Case, call: Call, result: Any, seed: int) -> bool:
    """dweight and dbias of a batch are the sums over its parts, within the bounds.

    Parts of modulated rows have parameters of other shapes.
    """
    count = _count(case)
    is_modulated = any(_is_shared(case, name) for name in ("weight", "bias", "gate"))
    if count < 2 or is_modulated or _accumulated(case) or not _is_movable(case):
        return False
    cut, expected = 1 + seed % (count - 1), call.expected()
    parts = [_picked(kernel, case, rows) for rows in (range(cut), range(cut, count))]
    found = [part.check() for part in parts]
    for name in _OF_PARAMETERS:
        if getattr(result, name) is not None:
            dtype = str(getattr(result, name).dtype)
            bound = sum(e.bound(name, dtype) for e in (expected, *(p.expected() for p in parts)))
            whole, *of_parts = (getattr(r, name).astype(np.float64) for r in (result, *found))
            assert (np.abs(whole - sum(of_parts)) <= bound).all(), name
    return True


def shifted_x(kernel: str, case: Case, call: Call, result: Any, seed: int) -> bool:
    """If 16 is added to x, a centered y changes by no more than the bounds."""
    centered = "group" in kernel or (case["center"] and case["gate_position"] == "post")
    if not centered or case.get("values") != "quarters" or case["far"]:
        return False
    before = call.expected().bound("y", str(result.y.dtype))
    call.inputs["x"].host[...] += call.inputs["x"].host.dtype.type(16)
    bound = before + call.expected().bound("y", str(result.y.dtype))
    y, right = (found.y.astype(np.float64) for found in (call.run(), result))
    assert (np.abs(y - right) <= bound).all()
    return True


def add_then_norm(kernel: str, case: Case, call: Call, result: Any, seed: int) -> bool:
    """With a residual, y is the norm of the sum."""
    is_fused = (case["stream"] or "").startswith("+") or case["gate_position"] == "branch"
    if not is_fused or case["round_before_weight"] or case["x"] == "float64":
        return False
    more = {"x": result.residual, "residual": None, "dtype": str(result.y.dtype), "out": None}
    if case["gate_position"] == "branch":
        more |= {"gate": None, "gate_position": "post", "gate_activation": "silu"}
    y = cunorm.normalize(**_accepted("normalize", _numpy(call) | more))
    assert_same_bits(y, result.y)
    return True


def plain_function(kernel: str, case: Case, call: Call, result: Any, seed: int) -> bool:
    """The functions that return only y give the same bits."""
    has_stream = case["stream"] or case.get("gate_position") == "branch"
    of_rows = "add_normalize" if has_stream else "normalize"
    plain = "group_norm" if "group" in kernel else of_rows
    given = _numpy(call) | {"out": None, "dtype": str(result.y.dtype)}
    y = getattr(cunorm, plain)(**_accepted(plain, given))
    assert_same_bits(getattr(y, "y", y), result.y)
    return True


def named_function(kernel: str, case: Case, call: Call, result: Any, seed: int) -> bool:
    """A named norm gives the bits of the general norm."""
    name = "layer_norm" if case["center"] else "rms_norm"
    if case["c"] is not None or _accumulated(case):
        return False
    name += kernel.removeprefix("row_norm")
    given = _numpy(call) | {"out": None}
    if "forward" in kernel:
        given["dtype"] = str(result.y.dtype)
    elif result.dgate is not None:  # only `out` can choose dgate's dtype
        given["out"] = type(result)(dgate=np.empty_like(result.dgate))
    assert_same_fields(getattr(cunorm, name)(**_accepted(name, given)), result)
    return True


_OF_ALL = (same_again, other_memory, in_place, some_rows, poisoned, twice_x)
_OF_FORWARDS, _OF_BACKWARDS = (shifted_x, plain_function), (twice_dy, split_batch)
_OF_KERNELS = {
    "row_norm_forward": (*_OF_ALL, *_OF_FORWARDS, add_then_norm, named_function),
    "row_norm_backward": (*_OF_ALL, *_OF_BACKWARDS, named_function),
    "group_norm_forward": (*_OF_ALL, *_OF_FORWARDS),
    "group_norm_backward": (*_OF_ALL, *_OF_BACKWARDS),
}
RELATIONS: dict[str, dict[str, Callable[..., bool]]] = {
    kernel: {relation.__name__: relation for relation in relations}
    for kernel, relations in _OF_KERNELS.items()
}


def _count(case: Case) -> int:
    """Return the number of rows, or of samples."""
    return case["samples"].samples if "samples" in case else prod(case["shape"][: case["axis"]])


def _is_movable(case: Case) -> bool:
    """Return whether contiguous copies have the same numbers, channels first or last as before."""
    layouts = case["layouts"]
    if "samples" in case and set(layouts) != {"contiguous"}:
        # With one channel, or one position, strides do not tell channels first from channels last.
        sizes = (case["samples"].channels, prod(case["samples"].spatial))
        if not all(isinstance(one, str) for one in layouts) or 1 in sizes:
            return False
    return not any(map(is_expanded, layouts))


def _accumulated(case: Case) -> tuple[str, ...]:
    return _OF_PARAMETERS if case.get("accumulate") else ()


def _has_float16(result: Any) -> bool:
    """Return whether a result is float16, whose small numbers have fewer digits than others."""
    return any(array is not None and array.dtype == np.float16 for array in result)


def _scale(inputs: Any, names: Iterable[str], factor: float) -> None:
    for name in names:
        if inputs.get(name):
            host = inputs[name].host
            host[...] = host * host.dtype.type(factor)


def _picked(kernel: str, case: Case, picked: Iterable[int]) -> Call:
    more = {"picked": [*picked], "layouts": "contiguous", "results": None, "accumulate": None}
    return call_of(kernel, case | more, OnNumpy())


def _is_shared(case: Case, name: str) -> bool:
    """Return whether an operand has rows that other rows of x share, or some rows of its own."""
    return case[f"{name}_own"] is not None


def _rows(case: Case, result: Any, count: int, rows: Iterable[int]) -> dict[str, Any]:
    """Return the results of the given rows, without gradients of parameters."""
    summed = (*_OF_PARAMETERS, "dgate") if _is_shared(case, "gate") else _OF_PARAMETERS
    return {
        name: np.ascontiguousarray(array).reshape(count, -1)[[*rows]]
        for name, array in result._asdict().items()
        if array is not None and name not in summed
    }


def _assert_rows(found: dict[str, Any], right: dict[str, Any]) -> None:
    for name, array in found.items():
        assert_same_bits(array, right[name], name)


def _assert_scaled(case: Case, found: Any, result: Any, factor_of: Callable[[str], float]) -> None:
    """Check that each field is the result's times a factor, unless it is added to an array."""
    for name, array in result._asdict().items():
        if array is not None and name not in _accumulated(case):
            expected = array * array.dtype.type(factor_of(name))
            assert_same_bits(getattr(found, name), expected, name)


def _numpy(call: Call) -> dict[str, Any]:
    """Return the arguments of a call with NumPy arrays."""
    arrays = {name: placed and placed.host for name, placed in call.inputs.items()}
    return arrays | call.options | {"workspace": None}


def _accepted(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    taken = signature(getattr(cunorm, name)).parameters
    return {key: value for key, value in arguments.items() if key in taken}
