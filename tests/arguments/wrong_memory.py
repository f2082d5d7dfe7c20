# SPDX-License-Identifier: MIT
"""The table of arrays that cannot be results or workspaces; for the plain functions only.

tests/memory/test_overlap.py has overlapping arrays.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided

from cunorm import AddNorm, GroupNormForward, NormForward, NormGrads
from tests.arguments.wrong_input import COMPUTE, DTYPES, NO_ARRAY, Cases, hint_of
from tests.support.calls import (
    FUNCTIONS,
    GROUP_NORMS,
    OF_ROWS,
    call_of,
    functions_taking,
    parameters_of,
)
from tests.support.operands import DTYPES as NUMPY_DTYPES
from tests.support.refused import Case, each

UNWRITABLE = (
    "cannot be written to in place, expected a writable, aligned NumPy, CuPy or PyTorch array "
    "(JAX arrays are immutable)"
)
UNUSABLE = (
    "cannot be used in place, expected a writable array whose address is a multiple of 16 "
    "(JAX arrays are immutable)"
)
SHARING = "with which elements may share memory, expected memory of its own for each element"
FOLLOWED = "contiguous rows and at most three leading axes that no single stride walks"
LINES = "the memory layout of x, channels last, with one stride for all of its lines"
CONTIGUOUS = "a contiguous array"
ABSENT = "is given, expected None: its operand is absent or not in needs"
SIZE_HINT = "as cunorm.workspace_size says"
TO_ADD_TO = "expected an array of float32 or float64 to add to, as accumulate is True"
NO_STREAM = "out.residual is given, expected None: there is no residual"
NO_MEAN = "out.mean is given, expected None: without center there is no mean"
SIZE = 1 << 16  # bytes of a workspace; calls here need less than a quarter
TYPE, VALUE = TypeError, ValueError
STATISTICS = ("mean", "rstd")


class Output(NamedTuple):
    """A result of the function `name`: `label` is its name in errors, `right` a valid array."""

    name: str
    field: str
    label: str
    right: Any

    def case(self, error: Any, text: str, wrong: Any, **more: Any) -> Case:
        change = {"out": call_of(self.name).out_of({self.field: wrong})} | more
        return Case(self.name, error, f"{self.label} {text}", change)

    def is_group_norm(self) -> bool:
        return self.name in GROUP_NORMS


def outputs() -> list[Output]:
    found = []
    for name in FUNCTIONS:
        call = call_of(name)
        results = call.out | ({"dresidual": call.out["dx"]} if call.result is NormGrads else {})
        label = "out" if call.result is None else "out.{}"
        found += [Output(name, field, label.format(field), a) for field, a in results.items()]
    return found


OUTPUTS = outputs()


def types() -> Cases:
    tuples = (AddNorm(), NormForward(), NormGrads(), GroupNormForward())
    for name in FUNCTIONS:
        result = call_of(name).result
        named = "an AddNorm" if result is AddNorm else f"a {result and result.__name__}"
        expected = f"{named} of arrays and Nones" if result else NO_ARRAY
        for thing in (np.empty((5, 8)), (None, None), {"y": None}, *tuples):
            if not isinstance(thing, result or np.ndarray):
                got = type(thing).__name__
                yield Case(name, TYPE, f"out is of type {got}, expected {expected}", {"out": thing})


def shapes() -> Cases:
    for output in OUTPUTS:
        right, is_sum = output.right.shape, output.field in ("dweight", "dbias")
        more = hint_of(output.name, output.field) if output.is_group_norm() and not is_sum else ""
        for shape in ((3,), (*right, 1), (1, *right[1:])):
            text = f"has shape {shape}, expected {right}{more}"
            yield output.case(VALUE, text, np.zeros(shape, "f4"))
        if output.field in STATISTICS and not output.is_group_norm():
            for shape in ((5,), (10,), (2, 5), (5, 1)):
                text, wrong = f"has shape {shape}, expected (5, 2)", np.zeros(shape, "f4")
                yield output.case(VALUE, text, wrong, groups=2)


def strides() -> Cases:
    for output in OUTPUTS:
        two = np.zeros((*output.right.shape, 2), np.float32)[..., 0]
        expected = LINES if output.is_group_norm() else FOLLOWED
        expected = expected if output.field in OF_ROWS else CONTIGUOUS
        steps = tuple(step // 4 for step in two.strides)
        yield output.case(VALUE, f"has strides {steps}, expected {expected}", two)
    x, four = np.ones((2, 2, 2, 2, 3), np.float32), np.zeros((2, 3, 2, 3, 2, 3, 2, 3), np.float32)
    y = four[:, 0, :, 0, :, 0, :, :]
    text = f"out has strides {tuple(step // 4 for step in y.strides)}, expected {FOLLOWED}"
    yield Case("l2_norm", VALUE, text, {"x": x, "axis": -1, "out": y})


def sharing() -> Cases:
    for output in OUTPUTS:
        rest = output.right.strides[1:]
        for step in (0, 1) if rest else (0,):
            one = as_strided(np.zeros(1000, np.float32), output.right.shape, (4 * step, *rest))
            text = f"has strides {(step, *(s // 4 for s in rest))}, {SHARING}"
            yield output.case(VALUE, text, one)


def dtypes() -> Cases:
    new_stream = {"residual": None, "residual_dtype": "float16"}
    # A field, a wrong dtype, the expected dtype, what decides the dtype, and options of the call.
    agreed: list[tuple[str, str, str, str, dict[str, Any]]] = [
        ("y", "float32", "float16", "dtype", {"dtype": "float16"}),
        ("dx", "float32", "float16", "x_dtype", {"x_dtype": "float16"}),
        ("dresidual", "float16", "float32", "x", {}),
        ("residual", "float16", "float32", "the new residual stream", {}),
        ("residual", "float32", "float16", "the new residual stream", new_stream),
    ]
    for output in OUTPUTS:
        for field, wrong, right, hint, more in agreed:
            if field == output.field and more.keys() <= parameters_of(output.name):
                text = f"has dtype {wrong}, expected {right}, that of {hint}"
                yield output.case(VALUE, text, np.zeros_like(output.right, wrong), **more)
        text = f"has dtype int32, expected {DTYPES}"
        yield output.case(TYPE, text, np.zeros_like(output.right, "i4"))
        if output.field in STATISTICS:
            rule = COMPUTE["group" if output.is_group_norm() else "row"]
            text = f"has dtype float64, expected float32, {rule}"
            yield output.case(TYPE, text, np.zeros_like(output.right, "f8"))


def absent() -> Cases:
    for output in OUTPUTS:
        taken = parameters_of(output.name)
        if "needs" in taken:
            operand = "x" if output.field == "dresidual" else output.field.removeprefix("d")
            others = tuple({"x", "weight", "bias"} - {operand})
            yield output.case(VALUE, ABSENT, output.right, needs=others)
            if operand != "x":
                more = {"gate_position": "post"} if "gate_position" in taken else {}
                yield output.case(VALUE, ABSENT, output.right, **more | {operand: None})
    x = np.zeros((5, 8), np.float32)
    for field, array in {"dweight": x[0], "dbias": x[0], "dgate": x}.items():
        out = NormGrads(**{field: array})
        yield from each(["l2_norm_backward"], VALUE, f"out.{field} {ABSENT}", out=out)
    norms = ["l2_norm_forward", "rms_norm_forward"]
    yield from each(norms, VALUE, NO_MEAN, out=NormForward(mean=x[:, 0]))
    yield from each(norms[:1], VALUE, NO_STREAM, out=NormForward(residual=x))


def unwritable() -> Cases:
    for output in OUTPUTS:
        memory = np.zeros(output.right.nbytes + 1, np.uint8)[1:]
        unaligned = memory.view(np.float32).reshape(output.right.shape)
        for wrong in (np.broadcast_to(output.right, output.right.shape), unaligned):
            yield output.case(VALUE, UNWRITABLE, wrong)


def accumulators() -> Cases:
    for output in OUTPUTS:
        if output.field in ("dweight", "dbias"):
            call = call_of(output.name)
            kinds = [
                (np.zeros(8, NUMPY_DTYPES[d]), f"of dtype {d}") for d in ("float16", "bfloat16")
            ]
            for wrong, got in [(None, "None"), *kinds]:
                change = {"out": call.out_of(call.out | {output.field: wrong}), "accumulate": True}
                yield Case(output.name, VALUE, f"{output.label} is {got}, {TO_ADD_TO}", change)
        if output.field == "dweight":
            change = {"out": None, "accumulate": True}
            yield Case(output.name, VALUE, f"{output.label} is None, {TO_ADD_TO}", change)


# --- workspaces -----------------------------------------------------------------------------------


def workspace_cases(error: Any, text: str, workspace: Any) -> list[Case]:
    return each(functions_taking("workspace"), error, f"workspace {text}", workspace=workspace)


def aligned(size: int = SIZE) -> Any:
    memory = np.full(size + 64, 0xFF, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size]


def views() -> Cases:
    square = np.empty((64, 64), np.uint8)
    for memory in (square, square.view(np.float32)):
        expanded = np.broadcast_to(memory[:1], memory.shape)
        for view in (memory[:, :8], memory[::-1], memory.T, memory[::2], memory[0, ::-1], expanded):
            yield from workspace_cases(
                VALUE, f"has strides {view.strides}, expected {CONTIGUOUS}", view
            )


def unusable() -> Cases:
    for dtype in ("u1", "f4"):
        read_only = np.broadcast_to(aligned(), SIZE)
        for memory in (*(aligned()[n : n - 16] for n in (1, 4, 8)), read_only):
            yield from workspace_cases(VALUE, UNUSABLE, memory.view(dtype))


def no_numbers() -> Cases:
    for dtype in (np.dtype(object), np.dtype([("number", "f8"), ("thing", "O")])):
        yield from workspace_cases(
            TYPE, f"has dtype {dtype}, expected a numeric dtype", np.zeros(64, dtype)
        )
    for one in ([0.0], 4096, b"bytes", bytearray(4096)):
        yield from workspace_cases(
            TYPE, f"is of type {type(one).__name__}, expected {NO_ARRAY}", one
        )


def too_small() -> Cases:
    for name in functions_taking("workspace"):
        if size := call_of(name).workspace.size:
            text = f"workspace has {size - 4} bytes, expected at least {size}, {SIZE_HINT}"
            yield Case(name, VALUE, text, {"workspace": aligned(size - 4)})


PARTS = (types, shapes, strides, sharing, dtypes, absent, unwritable, accumulators)
OF_WORKSPACES = (views, unusable, no_numbers, too_small)
TABLE = {f"{make.__name__} of out": [*make()] for make in PARTS}
TABLE |= {f"{make.__name__} of a workspace": [*make()] for make in OF_WORKSPACES}
