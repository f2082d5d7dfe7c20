# SPDX-License-Identifier: MIT
"""Calls of every public function, with matching arrays for all operands and results."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from inspect import signature
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cunorm
from cunorm import AddNorm, GroupNormForward, GroupNormGrads, NormForward, NormGrads
from tests.support import internals
from tests.support.gpu_arrays import OnCupy, OnNumpy, OnTorchCpu
from tests.support.operands import assert_same_bits, draw

WIDTH = 8
QUANTIZED = [name for name in internals._row_norm.__all__ if name.endswith("_quantized")]
# The pieces of norms of split rows, and the keywords of norms that take these; `split` has calls.
PIECES = ["row_moments", "combine_moments", "normalize_backward_sums"]
OF_SPLIT_ROWS = {"sums", "correction", "count"}
JVPS = [name for name in internals._row_norm.__all__ if name.endswith("_jvp")]  # see `jvp`
NORMS = [name for name in internals._row_norm.__all__ if name not in (*QUANTIZED, *PIECES, *JVPS)]
FORWARDS = [name for name in NORMS if not name.endswith("_backward")]
BACKWARDS = [name for name in NORMS if name.endswith("_backward")]
GROUP_NORMS = ["group_norm", "instance_norm", "group_norm_forward", "group_norm_backward"]
FUNCTIONS = [*FORWARDS, *BACKWARDS, *GROUP_NORMS]
OF_ROWS = ("y", "x", "dy", "residual", "gate", "d_residual", "dx", "dgate", "dresidual")

names = pytest.mark.parametrize("name", FUNCTIONS)
kinds = pytest.mark.parametrize("kind", ["numpy", "torch"])
devices = pytest.mark.parametrize(
    "kind", ["numpy", pytest.param("cupy", marks=pytest.mark.gpu)]
)  # NumPy arrays on a CPU, CuPy arrays on a GPU


def functions_taking(*arguments: str) -> list[str]:
    """Return the names of the public functions that have all of these arguments."""
    return [name for name in FUNCTIONS if {*arguments} <= parameters_of(name)]


def parameters_of(name: str) -> set[str]:
    """Return the names of a function's parameters, without those for split rows."""
    given = OF_SPLIT_ROWS | (set() if "backward" in name else {"mean", "rstd", "x_dtype"})
    return {*signature(getattr(cunorm, name)).parameters} - given


def raises(error: Any, *texts: str) -> Any:
    """Expect an error whose message is exactly these texts, joined."""
    return pytest.raises(error, match="^" + re.escape("".join(texts)) + "$")


# --- arrays of any kind ---------------------------------------------------------------------------


def to(kind: str, array: Any) -> Any:
    """Return an array of a library: NumPy's, PyTorch's on the CPU, or CuPy's."""
    return {"numpy": OnNumpy, "torch": OnTorchCpu, "cupy": OnCupy}[kind]().put(array)


def host(array: Any) -> Any:
    """Return an array's numbers as a NumPy array."""
    if isinstance(array, np.ndarray):
        return array
    return OnCupy().get(array) if kind_of(array) == "cupy" else array.numpy()


def kind_of(array: Any) -> str:
    return type(array).__module__.partition(".")[0]


def strides_of(array: Any) -> tuple[int, ...]:
    return array.stride() if callable(getattr(array, "stride", None)) else array.strides


def arrays_of(named: dict[str, Any]) -> dict[str, Any]:
    """Return the arrays among a call's arguments or a result's fields."""
    return {name: array for name, array in named.items() if hasattr(array, "shape")}


def fields(result: Any) -> dict[str, Any]:
    """Return the arrays of a result by name."""
    return arrays_of(result._asdict() if isinstance(result, tuple) else {"y": result})


def assert_same(actual: Any, expected: Any) -> None:
    """Compare results bit for bit, and the types, shapes and strides of their arrays."""
    assert type(actual) is type(expected)
    actual, expected = fields(actual), fields(expected)
    assert actual.keys() == expected.keys()
    for field, array in actual.items():
        right = expected[field]
        assert type(array) is type(right), field
        assert strides_of(array) == strides_of(right), field
        assert_same_bits(host(array), host(right), field)


def change(arrays: dict[str, Any], tag: str = "another") -> None:
    """Write other numbers to arrays."""
    for name, array in arrays_of(arrays).items():
        array[...] = to(kind_of(array), draw(f"{tag} {name}", tuple(array.shape), "float32"))


def elsewhere(array: Any, start: int = 0) -> Any:
    """Return other numbers in the same shape; the array begins at element `start` of its memory."""
    size = int(np.prod(array.shape))
    numbers = to(kind_of(array), draw(f"elsewhere {start}", start + size, "float32"))
    return numbers[start:].reshape(array.shape)


# --- calls ----------------------------------------------------------------------------------------


class Call:
    """A call of a public function, with arrays for all of its operands and results."""

    shape, options = (5, WIDTH), {"center": True, "weight_offset": 1.0}

    def __init__(self, name: str, shape: Any = None, kind: str = "numpy", **options: Any) -> None:
        self.name, self.function, self.kind = name, getattr(cunorm, name), kind
        accepted = parameters_of(name)
        options = self.options | options
        self.options = {key: value for key, value in options.items() if key in accepted}
        self.shapes = self._shapes(*(shape or self.shape))
        drawn = {key: draw(key, self.shapes[key], "float32") for key in self.shapes}
        self.arrays = {key: to(kind, drawn[key]) for key in drawn if key in accepted} | self.options
        self.result = _result_type(name)
        self.out = {
            field: to(kind, np.full(self.shapes[_LIKE.get(field, field)], np.nan, np.float32))
            for field in self._fields()
        }
        self.workspace = self.make_workspace() if "workspace" in accepted else None

    def _shapes(self, *shape: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all possible operands."""
        *leading, width = shape
        groups = self.options.get("groups", 1)
        statistic = (*leading, groups) if groups > 1 else tuple(leading)
        row_shapes = dict.fromkeys(("x", "dy", "residual", "gate", "d_residual"), shape)
        shapes = row_shapes | dict.fromkeys(("rstd", "mean"), statistic)
        return shapes | dict.fromkeys(("weight", "bias"), (width,))

    def _fields(self) -> list[str]:
        """Return the names of the results that have their own arrays."""
        if self.result is None:
            return ["y"]
        centered = self.options.get("center") or "layer_norm" in self.name or "group" in self.name
        absent = [] if centered else ["mean"]
        if self.name.endswith("backward"):
            absent = ["dresidual"]  # the same array as dx if their dtypes agree
        return [
            field
            for field in self.result._fields
            if field not in absent
            and (_LIKE.get(field, field) in self.arrays or field in ("y", "mean", "rstd"))
        ]

    def make_workspace(self) -> Any:
        """Allocate a workspace of exactly the size that workspace_size returns."""
        sized = signature(cunorm.workspace_size).parameters.keys()
        options = {key: value for key, value in self.arrays.items() if key in sized}
        return to(self.kind, np.empty(cunorm.workspace_size(self.name, **options), np.uint8))

    def parts(self) -> list[str]:
        """Return the names of the arrays that the call allocates if they are not given."""
        return [*self.out, *([] if self.workspace is None else ["workspace"])]

    def make(self, **more: Any) -> Any:
        """Make the call, which allocates all of its results."""
        return self.function(**self.arrays | more)

    def out_of(self, given: dict[str, Any]) -> Any:
        """Return arrays, given by field, as the argument `out`."""
        return given.get("y") if self.result is None else self.result(**given)

    def run(self, without: str | None = None, **more: Any) -> Any:
        """Make the call, with all arrays of `parts` given, except the one that `without` names."""
        out = self.out_of({field: a for field, a in self.out.items() if field != without})
        has_workspace = self.workspace is not None and without != "workspace"
        workspace = {"workspace": self.workspace} if has_workspace else {}
        return self.function(**self.arrays | workspace | {"out": out} | more)


class GroupCall(Call):
    """A call of a group norm."""

    shape, options = (3, 8, WIDTH), {"num_groups": 4, "activation": "silu", "channel_axis": -1}

    def _shapes(self, *shape: int) -> dict[str, tuple[int, ...]]:
        channels = (shape[self.options["channel_axis"]],)
        statistic = (shape[0], self.options.get("num_groups", channels[0]))
        shapes = dict.fromkeys(("x", "dy"), shape) | dict.fromkeys(("mean", "rstd"), statistic)
        return shapes | dict.fromkeys(("weight", "bias"), channels)


_LIKE = {f"d{name}": name for name in ("x", "weight", "bias", "gate")} | {"y": "x"}


def call_of(name: str, shape: Any = None, kind: str = "numpy", **options: Any) -> Call:
    """Return a call of one of the functions."""
    return (GroupCall if name in GROUP_NORMS else Call)(name, shape, kind, **options)


def _result_type(name: str) -> Any:
    """Return the type of a function's result, None if the function returns y alone."""
    if name.endswith("_forward"):
        return GroupNormForward if name in GROUP_NORMS else NormForward
    if name.endswith("_backward"):
        return GroupNormGrads if name in GROUP_NORMS else NormGrads
    return AddNorm if name.startswith("add_") else None


# --- the cache of calls ---------------------------------------------------------------------------


class CallCache:
    """A separate cache of calls, as large as the package's."""

    def __init__(self) -> None:
        parameters = internals._dispatch.cache_entry.cache_parameters()
        self.entries = lru_cache(**parameters)(lambda *key: internals._dispatch.CacheEntry())

    def __len__(self) -> int:
        return self.entries.cache_info().currsize


def empty_call_cache(monkeypatch: pytest.MonkeyPatch) -> CallCache:
    """Replace the cache of calls by an empty cache, and return the empty cache."""
    cache = CallCache()
    monkeypatch.setattr(internals._dispatch, "cache_entry", cache.entries)
    monkeypatch.setattr(internals._dispatch, "rows_entry", lru_cache()(lambda *key: []))
    return cache


def call_uncached(function: Any, *arguments: Any, **more: Any) -> Any:
    """Call a function with an empty cache, so that the call is planned. Not thread-safe."""
    with pytest.MonkeyPatch.context() as patch:
        empty_call_cache(patch)
        return function(*arguments, **more)


@contextmanager
def cached_calls_only() -> Iterator[None]:
    """Make all calls fail that are not in the cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(internals._dispatch, "_executable", None)
        yield


def record_launches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list that gets each call's addresses by name; copying an operand fails."""
    launches = []
    loaded = internals._dispatch.load

    def load_recorded(op: Any, *rest: Any) -> Any:
        ready = loaded(op, *rest)
        names = (*(slot.name for slot in op.input_slots + op.result_slots), "workspace")

        def run_recorded(pointers: Any) -> None:
            arrays = [SimpleNamespace(pointer=pointer) if pointer else None for pointer in pointers]
            launches.append(SimpleNamespace(**dict(zip(names, arrays, strict=True))))
            ready.run(pointers)

        return ready._replace(run=run_recorded, resized=lambda rows: None)

    empty_call_cache(monkeypatch)
    monkeypatch.setattr(internals._dispatch, "load", load_recorded)
    for framework in internals.host_frameworks():
        monkeypatch.setattr(framework, "contiguous", None)
    return launches
