# SPDX-License-Identifier: MIT
"""Calls that are told in data, so that one can be made now, and anew when nothing is remembered."""

from __future__ import annotations

import gc
from functools import _lru_cache_wrapper
from inspect import signature
from typing import Any, NamedTuple

import numpy as np

from tests.support import internals
from tests.support.calls import Call, arrays_of, call_of, fields, host, strides_of
from tests.support.operands import DTYPES, bits

INPUTS = ("x", "dy", "residual", "gate", "d_residual", "weight", "bias", "mean", "rstd")
RESULTS = ("y", "residual", "mean", "rstd", "dx", "dweight", "dbias", "dgate")
PLACES = (*INPUTS, *(f"out.{field}" for field in RESULTS), "workspace")
SLOT = 1 << 13  # bytes of memory for each of them
WIDE = ("x", "dy", "residual", "d_residual")  # that have the dtype of x
SMALL = tuple(f"{out}{name}" for out in ("", "out.", "out.d") for name in INPUTS[5:])


def caches() -> list[Any]:
    """Return every function of cunorm's that remembers what it made of its arguments."""
    found = [one for one in gc.get_objects() if type(one) is _lru_cache_wrapper]
    ours = [one for one in found if str(one.__module__).startswith("cunorm")]
    return [one for one in ours if signature(one.__wrapped__).parameters]


def forget_all(remembering: list[Any]) -> None:
    """Let the next call be checked and planned as if it was the first; kernels stay loaded."""
    internals._again.forget()
    for one in remembering:
        one.cache_clear()


class Told(NamedTuple):
    """A call: what it is of, where its arrays lie, what is in them, and what is said of it."""

    name: str
    shape: tuple[int, ...]
    kind: str
    dtype: str  # of x, dy and dx
    dropped: tuple[str, ...] = ()  # operands
    said: tuple[tuple[str, Any], ...] = ()
    seed: int = 0
    steps: str = "dense"  # of arrays with an element for each of x
    moved: tuple[tuple[str, int], ...] = ()  # bytes from where an array lies by itself
    instead: tuple[tuple[str, str], ...] = ()  # arrays in the places of others
    of_other: str = ""  # an array of the other library
    given: tuple[str, ...] = ()  # results, and "workspace"
    wrong: str = ""  # what is wrong with an array


class Memory:
    """Memory with a place for each array that a call may have."""

    def __init__(self, kind: str) -> None:
        self.kind, size = kind, SLOT * len(PLACES)
        if kind == "cupy":
            import cupy

            self.bytes = cupy.zeros(size, "uint8")
        else:
            memory = np.zeros(size + 64, np.uint8)
            self.bytes = memory[-memory.ctypes.data % 64 :][:size]

    def view(self, told: Told, key: str, shape: Any, dtype: Any) -> Any:
        """Return an array in the place of a key, with the strides that are told."""
        place = PLACES.index(dict(told.instead).get(key, key)) * SLOT
        steps = told.steps if key not in (*SMALL, "workspace") and shape else "dense"
        strides, dtype = _strides(shape, steps, dtype.itemsize), np.dtype(dtype)
        start = place + dict(told.moved).get(key, 0)
        if self.kind == "cupy":
            import cupy

            return cupy.ndarray(shape, dtype, self.bytes[start:].data, strides)
        array = np.ndarray(shape, dtype, self.bytes, start, strides)
        kind = told.kind
        if key == told.of_other:
            kind = {"numpy": "torch", "torch": "numpy"}[kind]
        if kind == "torch":
            import torch

            return torch.from_numpy(array)
        return array


def _strides(shape: tuple[int, ...], steps: str, itemsize: int) -> tuple[int, ...]:
    """Return the bytes between elements: next to each other, or with gaps along some axis."""
    strides, step = [], itemsize * (2 if steps == "spread" else 1)
    for axis in reversed(range(len(shape))):
        strides.append(step)
        step *= max(shape[axis], 1)
        step += 4 * itemsize if steps == "padded" and axis == len(shape) - 1 else 0
        step *= 2 if steps == "every other" and axis == len(shape) - 1 else 1
    return tuple(reversed(strides))


class Made(NamedTuple):
    """What came of a call."""

    error: tuple[type, str] | None
    results: dict[str, Any]  # arrays
    forms: dict[str, Any]  # what there is to know of them but for their elements
    kept: dict[str, Any]  # copies of those that are given arrays


def make(told: Told, memory: Memory) -> Made:
    """Make a call on arrays in that memory, and check that its inputs stay what they are."""
    of_shapes = ("groups", "num_groups", "channel_axis")
    right = {k: v for k, v in told.said if k in of_shapes and type(v) is int and v != 3}
    call = call_of(told.name, told.shape, **right)
    arrays, out = _placed(call, told, memory)
    arguments = call.arrays | dict.fromkeys(told.dropped) | arrays | dict(told.said)
    if call.result is None:
        arguments["out"] = out.get("y")
    elif out:
        arguments["out"] = call.result(**out)
    before = host(memory.bytes).copy()
    inputs = {key: bits(host(a)).copy() for key, a in arrays.items() if key != "workspace"}
    try:
        found = fields(call.function(**arguments))
    except (TypeError, ValueError) as error:
        np.testing.assert_array_equal(host(memory.bytes), before)
        return Made((type(error), str(error)), {}, {}, {})
    for key in inputs.keys() - {key for pair in told.instead for key in pair}:
        np.testing.assert_array_equal(bits(host(arrays[key])), inputs[key], key)
    forms = {
        field: (type(a), a.shape, a.dtype, strides_of(a), _is_any(a, arrays, out))
        for field, a in found.items()
    }
    kept = {field: bits(host(a)).copy() for field, a in found.items() if forms[field][-1]}
    return Made(None, found, forms, kept)


def _placed(call: Call, told: Told, memory: Memory) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the inputs and the results of a call, with numbers in them; the results first."""
    out, arrays = {}, {}
    size = 0 if call.workspace is None else call.workspace.size
    sizes = {"workspace": (2 * size - (told.wrong == "workspace") * (2 * size - 8),)}
    for key in told.given:
        if key in call.out and _has(key, told):
            like = {"y": "x", "dx": "x"}.get(key, key.removeprefix("d"))
            place, narrow = f"out.{key}", key == "dgate"
            dtype = DTYPES["float32" if narrow or place in SMALL else told.dtype]
            out[key] = memory.view(told, place, call.shapes[like], dtype)
            _fill(out[key], told, place)
        elif key == "workspace" and size:
            arrays[key] = memory.view(told, key, sizes[key], np.dtype(np.uint8))
    for key in arrays_of(call.arrays):
        if key not in told.dropped:
            dtype = DTYPES[
                told.dtype if key in ("x", "dy", "residual", "d_residual") else "float32"
            ]
            arrays[key] = memory.view(told, key, call.shapes[key], dtype)
            _fill(arrays[key], told, key)
    if told.wrong in arrays and told.wrong != "workspace":
        arrays[told.wrong] = arrays[told.wrong][..., :-1]
    if told.wrong == "read only" and isinstance(next(iter(out.values()), None), np.ndarray):
        next(iter(out.values())).flags.writeable = False
    return arrays, out


def _has(field: str, told: Told) -> bool:
    """Whether there is such a result without the operands that were dropped."""
    wanted = dict(told.said).get("needs", ("x", "weight", "bias", "gate"))
    operand = field.removeprefix("d") if field.startswith("d") else None
    return (
        field not in told.dropped
        and (operand is None or operand in wanted)
        and (operand not in told.dropped)
    )


def _fill(array: Any, told: Told, key: str) -> None:
    rng = np.random.default_rng([told.seed, PLACES.index(key)])
    numbers = rng.standard_normal(tuple(array.shape))
    if hasattr(array, "copy_"):
        import torch

        array.copy_(torch.from_numpy(numbers))
    elif isinstance(array, np.ndarray):
        array[...] = numbers
    else:
        import cupy

        array[...] = cupy.asarray(numbers.astype(array.dtype))


def _is_any(array: Any, *others: dict[str, Any]) -> str:
    """Name the array that was given and is this one."""
    named = [(key, other) for found in others for key, other in found.items()]
    return next((key for key, other in named if other is array), "")


def assert_made_alike(made: Made, anew: Made) -> None:
    """Compare a call with the same one made anew; results that it made, as they are by now."""
    assert made.error == anew.error
    assert made.forms == anew.forms
    for field, array in anew.results.items():
        mine = made.kept.get(field)
        mine = bits(host(made.results[field])) if mine is None else mine
        np.testing.assert_array_equal(mine, bits(host(array)), field)
