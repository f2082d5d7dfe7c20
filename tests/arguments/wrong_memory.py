# SPDX-License-Identifier: MIT
"""The table of memory that cannot be that of results or a workspace; of the plain functions alone.

What overlaps is in tests/memory/test_overlap.py.
"""

from __future__ import annotations

from itertools import chain
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.lib.stride_tricks import as_strided

from cunorm import AddNorm, GroupNormForward, NormForward, NormGrads
from tests.arguments.wrong_input import COMPUTE, DTYPES, NO_ARRAY
from tests.support.calls import FUNCTIONS, GROUP_NORMS, OF_ROWS, call_of, parameters_of, taking
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


class Place(NamedTuple):
    """A result of a function: its field, what an error calls it, and an array that is right."""

    name: str
    field: str
    label: str
    right: Any

    def case(self, error: Any, text: str, wrong: Any, **more: Any) -> Case:
        change = {"out": call_of(self.name).out_of({self.field: wrong})} | more
        return Case(self.name, error, f"{self.label} {text}", change)


def places() -> list[Place]:
    found = []
    for name in FUNCTIONS:
        call = call_of(name)
        label = "out" if call.result is None else "out.{}"
        found += [Place(name, field, label.format(field), a) for field, a in call.out.items()]
        if call.result is NormGrads:
            found.append(Place(name, "dresidual", "out.dresidual", call.out["dx"]))
    return found


PLACES = places()


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
    def of(place: Place) -> str:
        if place.name not in GROUP_NORMS or place.field in ("dweight", "dbias"):
            return ""
        each = "one element for each group of each sample"
        return f", {each if place.field in ('mean', 'rstd') else 'the shape of x'}"

    found, grouped = [], []
    for place in PLACES:
        right = place.right.shape
        for shape in ((3,), (*right, 1), (1, *right[1:])):
            text = f"has shape {shape}, expected {right}{of(place)}"
            found.append(place.case(ValueError, text, np.zeros(shape, "f4")))
        if place.name in taking("groups") and place.field in ("mean", "rstd"):
            for shape in ((5,), (10,), (2, 5), (5, 1)):
                text, wrong = f"has shape {shape}, expected (5, 2)", np.zeros(shape, "f4")
                grouped.append(place.case(ValueError, text, wrong, groups=2))
    return {"shape of out": found, "shape of out with groups": grouped}


def strides() -> Table:
    def of(place: Place) -> str:
        if place.field not in OF_ROWS:
            return CONTIGUOUS
        return LINES if place.name in GROUP_NORMS else FOLLOWED

    found, shared = [], []
    for place in PLACES:
        two = np.zeros((*place.right.shape, 2), np.float32)[..., 0]
        steps = tuple(step // 4 for step in two.strides)
        found.append(place.case(ValueError, f"has strides {steps}, expected {of(place)}", two))
        rest = place.right.strides[1:]
        for step in (0, 1) if rest else (0,):
            one = as_strided(two, place.right.shape, (4 * step, *rest))
            text = f"has strides {(step, *(s // 4 for s in rest))}, {SHARING}"
            shared.append(place.case(ValueError, text, one))
    x, four = np.ones((2, 2, 2, 2, 3), np.float32), np.zeros((2, 3, 2, 3, 2, 3, 2, 3), np.float32)
    y = four[:, 0, :, 0, :, 0, :, :]
    text = f"out has strides {tuple(step // 4 for step in y.strides)}, expected {FOLLOWED}"
    found.append(Case("l2_norm", ValueError, text, {"x": x, "axis": -1, "out": y}))
    return {"strides of out": found, "out that overlaps itself": shared}


def dtypes() -> Table:
    begun = {"residual": None, "residual_dtype": "float16"}
    # Of a result: its dtype, the one that it must have, as what says, and what says so.
    agreed: dict[str, list[tuple[str, str, str, dict[str, Any]]]] = {
        "y": [("float32", "float16", "dtype", {"dtype": "float16"})],
        "dx": [("float32", "float16", "x_dtype", {"x_dtype": "float16"})],
        "dresidual": [("float16", "float32", "x", {})],
        "residual": [
            ("float16", "float32", "the new residual stream", {}),
            ("float32", "float16", "the new residual stream", begun),
        ],
    }
    said, statistics, integers = [], [], []
    for place in PLACES:
        for wrong, right, of, more in agreed.get(place.field, []):
            if more.keys() <= parameters_of(place.name):
                text = f"has dtype {wrong}, expected {right}, that of {of}"
                said.append(place.case(ValueError, text, np.zeros_like(place.right, wrong), **more))
        if place.field in ("mean", "rstd"):
            rule = COMPUTE["group" if place.name in GROUP_NORMS else "row"]
            text = f"has dtype float64, expected float32, {rule}"
            statistics.append(place.case(TypeError, text, np.zeros_like(place.right, "f8")))
        text = f"has dtype int32, expected {DTYPES}"
        integers.append(place.case(TypeError, text, np.zeros_like(place.right, "i4")))
    return {
        "dtype of out": said,
        "dtype of out's statistics": statistics,
        "integers in out": integers,
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
    for place in PLACES:
        operand = "x" if place.field == "dresidual" else place.field.removeprefix("d")
        if "needs" not in parameters_of(place.name):
            continue
        others = tuple({"x", "weight", "bias"} - {operand})
        found.append(place.case(ValueError, ABSENT, place.right, needs=others))
        if operand in ("weight", "bias", "gate"):
            more = {operand: None, "weight_offset": 0.0}
            more = {key: more[key] for key in more.keys() & parameters_of(place.name)}
            found.append(place.case(ValueError, ABSENT, place.right, **more))
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
            place.case(ValueError, UNWRITABLE, make(place.right))
            for place in PLACES
            for make in (read_only, unaligned)
        ]
    }


def accumulators() -> Table:
    found = []
    expected = "expected an array of float32 or float64 to add to, as accumulate is True"
    for place in PLACES:
        if place.field in ("dweight", "dbias"):
            call = call_of(place.name)
            kinds = [(None, "None")]
            for dtype in ("float16", "bfloat16"):
                narrow = np.zeros(8, getattr(ml_dtypes, dtype, dtype))
                kinds.append((narrow, f"of dtype {dtype}"))
            for wrong, got in kinds:
                change = {"out": call.out_of(call.out | {place.field: wrong}), "accumulate": True}
                text = f"{place.label} is {got}, {expected}"
                found.append(Case(place.name, ValueError, text, change))
            if place.field == "dweight":
                change, text = (
                    {"out": None, "accumulate": True},
                    f"{place.label} is None, {expected}",
                )
                found.append(Case(place.name, ValueError, text, change))
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
