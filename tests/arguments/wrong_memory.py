# SPDX-License-Identifier: MIT
"""The table of memory that cannot be that of results or a workspace; of the plain functions alone.

What overlaps is in tests/memory/test_overlap.py.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import ml_dtypes
import numpy as np
from numpy.lib.stride_tricks import as_strided

from cunorm import AddNorm, GroupNormForward, NormForward, NormGrads
from tests.arguments.wrong_input import COMPUTE, DTYPES, NO_ARRAY
from tests.support.calls import FUNCTIONS, GROUP_NORMS, OF_ROWS, call_of, taking
from tests.support.refused import Case, Table, each

UNWRITABLE = (
    "cannot be written to in place, expected a writable, aligned array (JAX arrays are immutable)"
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
SAID = "as cunorm.workspace_size says"
SIZE = 1 << 16  # bytes of a workspace, of which no call here needs a quarter


def places() -> list[tuple[str, str, str, Any]]:
    """Return each result of each function: its field, what an error calls it, and an array."""
    found = []
    for name in FUNCTIONS:
        call = call_of(name)
        label = "out" if call.result is None else "out.{}"
        found += [(name, field, label.format(field), array) for field, array in call.out.items()]
        if call.result is NormGrads:
            found.append((name, "dresidual", "out.dresidual", call.out["dx"]))
    return found


PLACES = places()


def given(name: str, field: str, wrong: Any) -> dict[str, Any]:
    return {"out": call_of(name).out_of({field: wrong})}


def in_each_place(error: Any, text: str, make: Any) -> list[Case]:
    """Return an error of each result, for an array made of one that is right; None: of no such."""
    found = []
    for name, field, label, right in PLACES:
        wrong = make(right)
        if wrong is not None:
            found.append(Case(name, error, f"{label} {text}", given(name, field, wrong)))
    return found


def kinds() -> Table:
    tuples = (AddNorm(), NormForward(), NormGrads(), GroupNormForward())
    things = [np.empty((5, 8)), (None, None), {"y": None}, *tuples]
    found = []
    for name in FUNCTIONS:
        result = call_of(name).result
        for thing in things:
            expected, got = f"a {getattr(result, '__name__', '')} of arrays and Nones", type(thing)
            if result is None and isinstance(thing, np.ndarray):
                continue
            if result is not None and isinstance(thing, result):
                continue
            expected = NO_ARRAY if result is None else expected
            text = f"out is of type {got.__name__}, expected {expected}"
            found.append(Case(name, TypeError, text, {"out": thing}))
    return {"out of another type": found}


def shapes() -> Table:
    found = []
    for name, field, label, right in PLACES:
        of = ""
        if name in GROUP_NORMS:
            of = {"mean": ", one element for each group of each sample"}.get(field, "")
            of = ", the shape of x" if field in OF_ROWS else of.replace("mean", "")
        if name in GROUP_NORMS and field == "rstd":
            of = ", one element for each group of each sample"
        for shape in ((3,), (*right.shape, 1), (1, *right.shape[1:])):
            text = f"{label} has shape {shape}, expected {right.shape}{of}"
            found.append(Case(name, ValueError, text, given(name, field, np.zeros(shape, "f4"))))
    of_groups = [
        Case(
            name,
            ValueError,
            f"out.{field} has shape {shape}, expected (5, 2)",
            {"groups": 2, "out": NormForward(**{field: np.zeros(shape, "f4")})},
        )
        for name, field, *_ in PLACES
        if name in taking("groups") and name.endswith("forward") and field in ("mean", "rstd")
        for shape in ((5,), (10,), (2, 5), (5, 1))
    ]
    return {"shape of out": found, "shape of out with groups": of_groups}


def strides() -> Table:
    def of(name: str, field: str) -> str:
        if field not in OF_ROWS:
            return CONTIGUOUS
        return LINES if name in GROUP_NORMS else FOLLOWED

    found, shared = [], []
    for name, field, label, right in PLACES:
        two = np.zeros((*right.shape, 2), np.float32)[..., 0]
        steps = tuple(step // 4 for step in two.strides)
        text = f"{label} has strides {steps}, expected {of(name, field)}"
        found.append(Case(name, ValueError, text, given(name, field, two)))
        for step in (0, 1) if right.ndim > 1 else (0,):
            one = as_strided(two, right.shape, (4 * step, *right.strides[1:]))
            text = f"{label} has strides {(step, *(s // 4 for s in right.strides[1:]))}, {SHARING}"
            shared.append(Case(name, ValueError, text, given(name, field, one)))
    x, four = np.ones((2, 2, 2, 2, 3), np.float32), np.zeros((2, 3, 2, 3, 2, 3, 2, 3), np.float32)
    y = four[:, 0, :, 0, :, 0, :, :]
    text = f"out has strides {tuple(step // 4 for step in y.strides)}, expected {FOLLOWED}"
    found.append(Case("l2_norm", ValueError, text, {"x": x, "axis": -1, "out": y}))
    return {"strides of out": found, "out that overlaps itself": shared}


def dtypes() -> Table:
    agreed = "has dtype float32, expected float16, that of {}"
    said = [
        Case(name, ValueError, f"{label} {agreed.format(option)}", change)
        for name, field, label, right in PLACES
        for option, result in (("dtype", "y"), ("x_dtype", "dx"))
        if field == result and name in taking(option)
        for change in [given(name, field, right) | {option: "float16"}]
    ]
    begun = {"residual": None, "residual_dtype": "float16"}
    streams = [
        Case(
            name,
            ValueError,
            f"{label} has dtype {wrong}, expected {right}, that of {of}",
            given(name, field, np.zeros_like(array, wrong)) | more,
        )
        for name, field, label, array in PLACES
        for of, result, wrong, right, more in (
            ("the new residual stream", "residual", "float16", "float32", {}),
            ("the new residual stream", "residual", "float32", "float16", begun),
            ("x", "dresidual", "float16", "float32", {}),
        )
        if field == result
    ]
    statistics = [
        Case(name, TypeError, f"{label} has dtype float64, expected float32, {rule}", change)
        for name, field, label, right in PLACES
        if field in ("mean", "rstd")
        for rule in [COMPUTE["group" if name in GROUP_NORMS else "row"]]
        for change in [given(name, field, np.zeros_like(right, np.float64))]
    ]
    text = f"has dtype int32, expected {DTYPES}"
    return {
        "dtype of out": said,
        "dtype of a stream": streams,
        "dtype of out's statistics": statistics,
        "integers in out": in_each_place(
            TypeError, text, lambda right: np.zeros_like(right, np.int32)
        ),
    }


def read_only(array: Any) -> Any:
    array = array.copy()
    array.flags.writeable = False
    return array


def unaligned(array: Any) -> Any:
    memory = np.zeros(array.nbytes + 1, np.uint8)[1:]
    return memory.view(array.dtype).reshape(array.shape)


def absent() -> Table:
    found = []
    for name, field, label, right in PLACES:
        operand = "x" if field == "dresidual" else field[1:]
        if name not in taking("needs"):
            continue
        out = given(name, field, right)
        others = tuple({"x", "weight", "bias"} - {operand})
        found.append(Case(name, ValueError, f"{label} {ABSENT}", out | {"needs": others}))
        if operand in ("weight", "bias", "gate"):
            told = out | {operand: None} | ({"weight_offset": 0.0} if operand == "weight" else {})
            told = told if name in taking("weight_offset") else out | {operand: None}
            found.append(Case(name, ValueError, f"{label} {ABSENT}", told))
    for field, shape in (("dweight", 8), ("dbias", 8), ("dgate", (5, 8))):
        out = {"out": NormGrads(**{field: np.zeros(shape, np.float32)})}
        found.append(Case("l2_norm_backward", ValueError, f"out.{field} {ABSENT}", out))
    no_mean = "out.mean is given, expected None: without center there is no mean"
    mean, stream = (np.zeros(shape, np.float32) for shape in (5, (5, 8)))
    norms = ["rms_norm_forward", "l2_norm_forward"]
    no_stream = "out.residual is given, expected None: there is no residual"
    return {
        "gradients that there are not": found,
        "results that there are not": [
            *each(norms, ValueError, no_mean, out=NormForward(mean=mean)),
            *each(norms[1:], ValueError, no_stream, out=NormForward(residual=stream)),
        ],
    }


def unwritable() -> Table:
    return {
        "out that cannot be written to": [
            *in_each_place(ValueError, UNWRITABLE, read_only),
            *in_each_place(ValueError, UNWRITABLE, unaligned),
        ]
    }


def accumulators() -> Table:
    found = []
    expected = "expected an array of float32 or float64 to add to, as accumulate is True"
    for name, field, label, right in PLACES:
        if field in ("dweight", "dbias"):
            rest = {key: a for key, a in call_of(name).out.items() if key != field}
            for out in (None, call_of(name).out_of(rest)):
                first = field if out is not None or field == "dweight" else "dweight"
                text = f"out.{first} is None, {expected}"
                found.append(Case(name, ValueError, text, {"out": out, "accumulate": True}))
            for dtype in ("float16", "bfloat16"):
                narrow = np.zeros(right.shape, getattr(ml_dtypes, dtype, dtype))
                out, text = rest | {field: narrow}, f"{label} is of dtype {dtype}, {expected}"
                change = {"out": call_of(name).out_of(out), "accumulate": True}
                found.append(Case(name, ValueError, text, change))
    return {"accumulate": found}


def aligned(size: int = SIZE) -> Any:
    memory = np.full(size + 64, 0xFF, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size]


def workspaces() -> Table:
    lent = taking("workspace")
    square, views = np.empty((64, 64), np.uint8), []
    for memory in (square, square.view(np.float32)):
        views += [memory[:, :8], memory[::-1], memory.T, memory[::2], memory[0, ::-1]]
        views.append(np.broadcast_to(memory[:1], memory.shape))
    unusable = [
        aligned()[offset : offset - 16].view(d) for offset in (1, 4, 8) for d in ("u1", "f4")
    ]
    unusable += [read_only(aligned()).view(dtype) for dtype in ("u1", "f4")]
    references = np.zeros(64, [("number", "f8"), ("thing", "O")])
    things = ([0.0], 4096, b"bytes", bytearray(4096))

    def of(error: Any, text: str, workspace: Any) -> list[Case]:
        return [*each(lent, error, f"workspace {text}", workspace=workspace)]

    sizes = [
        Case(
            name,
            ValueError,
            f"workspace has {size - 4} bytes, expected at least {size}, {SAID}",
            {"workspace": aligned(size - 4)},
        )
        for name in lent
        if (size := call_of(name).workspace.size)
    ]
    numbers = "expected one of numbers"
    return {
        "strides of a workspace": [
            case
            for view in views
            for case in of(ValueError, f"has strides {view.strides}, expected {CONTIGUOUS}", view)
        ],
        "memory of a workspace": [
            case for one in unusable for case in of(ValueError, UNUSABLE, one)
        ],
        "workspace of references": [
            *of(TypeError, f"has dtype object, {numbers}", np.zeros(64, object)),
            *of(TypeError, f"has dtype {references.dtype}, {numbers}", references),
        ],
        "workspace that is no array": [
            case
            for one in things
            for case in of(TypeError, f"is of type {type(one).__name__}, expected {NO_ARRAY}", one)
        ],
        "size of a workspace": sizes,
    }


PARTS = (kinds, shapes, strides, dtypes, absent, unwritable, accumulators, workspaces)
TABLE = dict(chain.from_iterable(part().items() for part in PARTS))
