# SPDX-License-Identifier: MIT
"""The table of wrong input for all front ends: options, shapes and dtypes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from decimal import Decimal
from itertools import chain
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from tests.support.calls import (
    BACKWARDS,
    FORWARDS,
    FUNCTIONS,
    GROUP_NORMS,
    call_of,
    functions_taking,
    parameters_of,
)
from tests.support.operands import DTYPES as NUMPY_DTYPES
from tests.support.refused import Case, Table, each

ROWS = [*FORWARDS, *BACKWARDS]
# Each is a `kind` for `wrong`: types that give a ValueError, and the text of a TypeError or None.
REAL, INT, NAME = ({float, int}, "a number"), ({int}, "an int"), ({str}, None)
TUPLE, BOOL = ({tuple, list}, None), (set(), None)
INF, NAN = float("inf"), float("nan")
NOT_FINITE = [NAN, INF, -INF, 10**400, "1", None, 1j, True, (), np.ones(1)]
NO_INTS = [True, False, 2.0, "2", [2], (), np.True_, None, np.ones(8)]
NO_NAMES = [1, b"silu", ["silu"], False, np.tanh]
NO_BOOLS = [1, 0, None, "yes", np.True_, []]
DTYPES = "float16, bfloat16, float32 or float64"
ACTIVATIONS = "'identity', 'sigmoid', 'silu', 'swish', 'tanh', 'relu', 'gelu' or 'gelu_tanh'"
POSITIONS = "'pre', 'post' or 'branch'"
NAMES = "a tuple of 'x', 'weight', 'bias'"
FINITE, DIVISOR = "a finite number", "a divisor of 8, the"
MAKE = "numpy.asarray"
NO_ARRAY = "a NumPy, CuPy, PyTorch or JAX array or another object with __dlpack__"
COMPUTE = {
    "row": "the compute type: float64 if x, its residual stream or x_dtype is, else float32",
    "group": "the compute type: float64 if x is, else float32",
}
LAST = "x.shape[-1] (channel_axis=1 is for channels first)"
OF_SAMPLES = ", or (3, 8), a row for each sample"
OF_LEAD = " to match x.shape[-1], alone or after axes that broadcast to {}"
OF_X = "expected 1 to 2147483647"
WHOLE = ("int16", "int32", "uint8", "bool")
HINT = f": pass {MAKE}({{}})"
EXPAND = ": expand it, as by broadcast_to of numpy or jax.numpy, or Tensor.expand"
OR_BRANCH = ", or pass gate_position='branch' if it is a gate of the branch"
ROWS_OF = "pass axis=-{} for rows of this shape, of one statistic each".format
NO_SHAPE = ": normalized_shape is not an argument, see axis"
HALF, SQUARE = (np.broadcast_to(np.float16(1), s) for s in ((2, 2**31), (2**16, 2**15)))
Cases = Iterator[Case]


def wrong(argument: str, kind: Any, expected: str, values: Any, names: Any = None) -> Cases:
    """Yield an error for each value: a ValueError if its type is in `kind[0]`, else a TypeError."""
    for value in values:
        error = ValueError if type(value) in kind[0] else TypeError
        right = expected if error is ValueError else kind[1] or expected
        shown = "of type ndarray" if getattr(value, "shape", ()) else repr(value)
        text = f"{argument} is {shown}, expected {right}"
        yield from each(names or functions_taking(argument), error, text, **{argument: value})


def gated(argument: str, expected: str, values: Any) -> Cases:
    """Yield each error with and without a gate: a gate's options are checked in both cases."""
    for case in wrong(argument, NAME, expected, values):
        yield case
        yield case._replace(change=case.change | {"gate": None})


def shaped(names: Any, arguments: str, shapes: Any, expected: str, **more: Any) -> Cases:
    """Yield an error for each argument and each wrong shape."""
    for argument in arguments.split():
        accepting = [name for name in names if argument in parameters_of(name)]
        for shape in shapes:
            wrong, text = np.ones(shape, "f4"), f"{argument} has shape {shape}, expected {expected}"
            yield from each(accepting, ValueError, text, **more | {argument: wrong})


def hint_of(name: str, operand: str) -> str:
    """Return how an error says what the shape of an operand or a result has to match."""
    is_group = name in GROUP_NORMS
    if operand in ("weight", "bias"):
        of_channel = f", one for each channel, {LAST}{OF_SAMPLES}"
        return of_channel if is_group else OF_LEAD.format((5,))
    if operand in ("mean", "rstd"):
        return f", one element for each {'group of each sample' if is_group else 'row of x'}"
    return ", the shape of x"


def shapes() -> Cases:
    """Yield errors for shapes that differ a little from the right one, and for those of scalars."""
    for name, key, array in arrays():
        right, ones = array.shape, (1,) * array.ndim
        for shape in ((), ones, (*right, 1), (1, *right), (*right[:-1], right[-1] - 1)):
            is_narrower = key in ("residual", "gate") and shape in ((), ones)
            hint = hint_of(name, key) + (expand(name, key) if is_narrower else "")
            if key in ("weight", "bias") and shape in ((8, 1), (1, 8)):
                hint += flat(key, heads=0 if name in GROUP_NORMS or shape[0] == 1 else 8)
            is_right = key in ("weight", "bias") and shape == (1, *right)
            if key != "x" and not is_right:
                yield from shaped([name], key, [shape], f"{right}{hint}")


def expand(name: str, argument: str) -> str:
    """Return the end of an error for a residual or gate that would broadcast to x's shape."""
    takes_branch = argument == "gate" and name not in ("rms_norm", "layer_norm", "normalize")
    return EXPAND + (OR_BRANCH if takes_branch else "")


def flat(argument: str, heads: int = 0) -> str:
    """Return the end of an error for a weight or bias that has a row's size in another shape."""
    more = f", with groups={heads} for a statistic of each head" if heads else ""
    return f": pass {argument}.reshape(-1){more}"


def heads() -> Cases:
    """Yield errors for a weight and bias with an axis for heads, where x has none."""
    for argument in ("weight", "bias"):
        of_row, of_channel = (hint_of(name, argument) for name in ("rms_norm", "group_norm"))
        yield from shaped(ROWS, argument, [(2, 4)], f"(8,){of_row}{flat(argument, heads=2)}")
        yield from shaped(GROUP_NORMS, argument, [(2, 4)], f"(8,){of_channel}{flat(argument)}")


def other_order() -> Cases:
    """Yield errors for arrays with the shape of another argument, and for dy with one more axis."""
    for name in ROWS:
        has_order = name.startswith("add_")
        order = f": the order is {name}(x, residual, weight, ...)" if has_order else ""
        both = f"{order}, or {EXPAND.removeprefix(': ')}" if has_order else EXPAND
        yield from shaped([name], "residual", [(8,)], LIKE_X + both)
        for shape in ((8,), (1, 8), (5, 1), (1,)):
            yield from shaped([name], "gate", [shape], LIKE_X + expand(name, "gate"))
        order = f": the order is {name}(dy, x, ...)"
        yield from shaped([name], "dy", [(8,)], LIKE_X + order)
        yield from shaped([name], "dy", [(2, 5, 8)], LIKE_X)


def rows() -> Cases:
    empty_rows = [(empty(*shape), -1, 0) for shape in ((3, 0), (0, 0), (0,))]
    for x, axis, width in [*empty_rows, (HALF, -1, 2**31), (SQUARE, 0, 2**31)]:
        text = f"x of shape {x.shape} has rows of {width} elements (axis {axis}), {OF_X}"
        yield from each(ROWS, ValueError, text, x=x, axis=axis)


def channels() -> Cases:
    for x, axis, count, positions in [
        (empty(3, 5, 0), -1, 0, 5),
        (empty(3, 1, 0), -1, 0, 1),
        (empty(3, 0, 5), 1, 0, 5),
        (empty(3, 0), -1, 0, 1),
        (empty(3, 8, 4, 0), 1, 8, 0),
        (empty(0, 0, 8), -1, 8, 0),
        (HALF, -1, 2**31, 1),
    ]:
        got = f"{count} channels (channel_axis {axis}) of {positions} positions"
        text = f"x has shape {x.shape}: {got}, {OF_X} channels of at least one position"
        yield from each(GROUP_NORMS, ValueError, text, x=x, channel_axis=axis)


def channel_axes() -> Cases:
    """Yield errors for axes that are neither axis 1 nor the last one."""
    for shape, right in [((3, 8, 5, 2), "-1, 1, 3 or -3"), ((3, 8), "-1 or 1")]:
        for axis in (0, 2, -2, len(shape), -len(shape)):
            text = f"channel_axis is {axis}, expected {right} for x of shape {shape}"
            x = np.ones(shape, "f4")
            yield from each(GROUP_NORMS, ValueError, text, x=x, channel_axis=axis)


def few_channels() -> Cases:
    """Yield errors for groups and parameters that do not fit 8 channels; they name the axis."""
    flat = "x.shape[-1]"
    for shape, axis, size in [
        ((3, 8, 5), 1, "x.shape[1] (channel_axis=-1 is for channels last)"),
        ((3, 8), 1, flat),
        ((3, 8), -1, flat),
        ((3, 5, 8), -1, LAST),
    ]:
        x = {"x": np.ones(shape, "f4"), "channel_axis": axis, "dy": np.ones(shape, "f4")}
        text = f"num_groups is 7, expected a divisor of 8, the number of channels, {size}"
        yield from each(functions_taking("num_groups"), ValueError, text, num_groups=7, **x)
        for key in ("weight", "bias"):
            text = f"{key} has shape (5,), expected (8,), one for each channel, {size}{OF_SAMPLES}"
            alone = {"weight": None, "bias": None} | {key: np.ones(5, "f4")}
            yield from each(GROUP_NORMS, ValueError, text, **x, **alone)
    for key in ("weight", "bias"):
        remedy = f"{hint_of('group_norm', key)}: pass {key}.reshape(3, 8)"
        yield from shaped(GROUP_NORMS, key, [(3, 8, 1, 1), (3, 1, 8)], f"(8,){remedy}")


def empty(*shape: int) -> Any:
    return np.empty(shape, np.float32)


def arrays() -> Iterator[tuple[str, str, Any]]:
    for name in FUNCTIONS:
        found = call_of(name).arrays.items()
        yield from ((name, key, a) for key, a in found if isinstance(a, np.ndarray))


def dtypes() -> Cases:
    bad = ["int32", "uint8", "bool", "complex64", "float8_e4m3fn", "float8_e5m2"]
    for name, key, array in arrays():
        for dtype in bad if key == "x" else ["int16"]:
            change = {key: np.zeros(array.shape, getattr(ml_dtypes, dtype, dtype))}
            wide = f"{key}.astype('float32')"
            hint = f": pass {wide}" if dtype in WHOLE else ""
            if dtype.startswith("float8"):
                hint = f": pass a dequantised array, {wide} times its scale"
            yield Case(name, TypeError, f"{key} has dtype {dtype}, expected {DTYPES}{hint}", change)


def dtype_options() -> Cases:
    shown = [("int8", "'int8'"), ("fp8", "'fp8'"), (float, float), (3, 3)]
    shown += [(np.int32, "int32"), (np.dtype("u1"), "uint8"), (np.dtype(">f4"), ">f4")]
    for key in ("dtype", "residual_dtype", "x_dtype"):
        for given, text in shown:
            text = f"{key} is {text}, expected {DTYPES}"
            if key == "dtype" and given == "int8":
                text += ": 8-bit results are those of rms_norm_quantized and its siblings"
            yield from each(functions_taking(key), TypeError, text, **{key: given})


def dtypes_of_statistics() -> Cases:
    several = {"float32": "float64", "float64": "float32", "bfloat16": "bfloat16"}
    for name, key, _ in (found for found in arrays() if found[1] in ("mean", "rstd")):
        found = call_of(name).arrays
        for x, wrong in several.items():
            compute = "float64" if x == "float64" else "float32"
            dtypes = dict.fromkeys(found.keys() & {"mean", "rstd"}, compute) | {"x": x, key: wrong}
            rule = COMPUTE["group" if name in GROUP_NORMS else "row"]
            text = f"{key} has dtype {wrong}, expected {compute}, {rule}"
            yield Case(
                name, TypeError, text, {k: found[k].astype(NUMPY_DTYPES[dtypes[k]]) for k in dtypes}
            )


def no_arrays() -> Cases:
    for name, key, _ in arrays():
        for thing, what in (([1.0], "of type list"), (1.5, "of type float"), (None, "None")):
            if thing is not None or key in ("x", "dy", "rstd"):
                hint = HINT.format(key) if isinstance(thing, list) else ""
                if isinstance(thing, float) and key in ("weight", "bias"):
                    hint = ": numbers such as eps are given by keyword"
                text = f"{key} is {what}, expected {NO_ARRAY}{hint}"
                yield Case(name, TypeError, text, {key: thing})


class Frame:
    """An object with `to_numpy`, like the tables of pandas."""

    to_numpy = None


class Numbers:
    """An object with `__array__`, the method that NumPy calls to make an array of it."""

    __array__ = None


class Fields(NamedTuple):
    """A named tuple of arrays, like the results of cunorm."""

    weight: Any


def meant_otherwise() -> Cases:
    """Yield errors for things that are no arrays; most errors say what to pass instead."""
    made, no_names = HINT.format("weight"), ["group_norm", "instance_norm", "normalize"]
    named = [name for name in functions_taking("weight") if "layer_norm" in name or "rms" in name]
    values = [((8,), NO_SHAPE), (8, NO_SHAPE), ([5, 8], f"{made};{NO_SHAPE[1:]}"), ((), made)]
    values += [((8, 1.0), made), (["a"], ""), (True, ""), (Fields(1), ": pass weight.weight")]
    values = [(named, "weight", *one) for one in values]
    things = [(Frame(), ": pass x.to_numpy()"), (Numbers(), HINT.format("x")), (Fields(1), "")]
    values += [(FUNCTIONS, "x", *one) for one in things]
    for names, argument, value, hint in [*values, (no_names, "weight", (8,), made)]:
        text = f"{argument} is of type {type(value).__name__}, expected {NO_ARRAY}{hint}"
        yield from each(names, TypeError, text, **{argument: value})


INTS = [0, -1, -8, 3, 16, 10**30, *NO_INTS]
OF_INTS = "an int or a tuple of ints"
NEIGHBOURS = "one axis of x, or several neighbours in order, for x of shape (5, 8)"
NO_AXES = [1.0, None, True, "last"]
WRONG_NAMES = ["swiglu", "SiLU", "silu ", "", *NO_NAMES]
NEEDS = [("x", "y"), ("z",), ["dx"], ("",), ({},), (np.array(["x"]),)]
NEEDS += ["x", None, 1, iter(("x",)), np.array("x")]
FLAGS = ("round_before_weight", "center", "accumulate")
NO_GATE = {"gate": None, "gate_position": "post", "gate_activation": "silu"}
NO_MEAN = "mean is None, expected the mean that the forward returned, as rows are centred"
NO_GATE_FOR = "{} is '{}', expected '{}' as gate is None: leave it out"
NO_GROUPS = "groups is 2 and axis is {}, expected axis -1 with groups"
CONFLICTS: dict[str, dict[str, Any]] = {
    NO_GATE_FOR.format("gate_position", "pre", "post"): NO_GATE | {"gate_position": "pre"},
    NO_GATE_FOR.format("gate_activation", "tanh", "silu"): NO_GATE | {"gate_activation": "tanh"},
    NO_GROUPS.format(0): {"groups": 2, "axis": 0},
    NO_GROUPS.format(-2): {"groups": 2, "axis": -2},
    "mean is given, expected None: center is False": {"mean": np.ones(5, "f4"), "center": False},
    NO_MEAN: {"mean": None, "axis": 1},  # a group norm, which has no axis, always has a mean
}
GROUPS = {name: np.ones((5, 2), np.float32) for name in ("mean", "rstd")} | {"groups": 2}
LIKE_X, OF_ROW = "(5, 8), the shape of x", "(5, 2), one element for each row of x"
# For each title: generators of cases.
PARTS: dict[str, list[Iterable[Case]]] = {
    "eps": [wrong("eps", REAL, f"{FINITE} of at least 0", [-1, -1e-6, *NOT_FINITE])],
    "c": [wrong("c", REAL, f"{FINITE} or None", [NAN, -INF, "d", Decimal(2), True])],
    "weight_offset": [wrong("weight_offset", REAL, FINITE, NOT_FINITE)],
    "flags": [wrong(flag, BOOL, "True or False", NO_BOOLS) for flag in FLAGS],
    "axis": [
        wrong("axis", (INT[0], OF_INTS), "-2 to 1 for x of shape (5, 8)", [2, -3, 100, *NO_AXES]),
        wrong("axis", ([tuple], None), NEIGHBOURS, [(), (2,), (-3,), (1, 0), (0, 0), (0, 1, 2)]),
        wrong("axis", ([], OF_INTS), "", [("last",), (1.0,), (None,), (True,)]),
    ],
    "groups": [
        wrong("groups", INT, f"{DIVISOR} width of a row", INTS),
        wrong("num_groups", INT, f"{DIVISOR} number of channels, {LAST}", INTS),
    ],
    "channel_axis": [
        wrong(
            "channel_axis",
            INT,
            "-1, 1, 2 or -2 for x of shape (3, 8, 8)",
            [0, 3, -3, 10**30, (1,), *NO_AXES],
        ),
        channel_axes(),
    ],
    "activation": [
        gated("gate_activation", ACTIVATIONS, [*WRONG_NAMES, None]),
        wrong("activation", NAME, ACTIVATIONS, WRONG_NAMES),
    ],
    "gate_position": [gated("gate_position", POSITIONS, ["before", "Pre", "", None, 0, ("pre",)])],
    "needs": [
        wrong("needs", TUPLE, f"{NAMES}, 'gate'", NEEDS, functions_taking("needs", "gate")),
        wrong("needs", TUPLE, NAMES, [("gate",), *NEEDS], ["group_norm_backward"]),
    ],
    "options together": [
        each(functions_taking(*change), ValueError, text, **change)
        for text, change in CONFLICTS.items()
    ],
    "shapes": [
        shapes(),
        shaped(ROWS, "residual", [(1, 8), (5, 1), (1,)], LIKE_X + EXPAND),
        shaped(ROWS, "dy d_residual", [(1, 8), (5, 1)], LIKE_X),
        shaped(ROWS, "weight", [(8,)], f"(5, 8) to match x.shape[-2:]: {ROWS_OF(1)}", axis=0),
        heads(),
        shaped(BACKWARDS, "mean rstd", [(10,), (2, 5), (5, 1)], OF_ROW, **GROUPS),
    ],
    "another order": [other_order()],
    "number of channels": [few_channels()],
    "sizes of x": [
        shaped(ROWS, "x", [()], "at least one axis"),
        shaped(GROUP_NORMS, "x", [(), (8,)], "at least two axes: samples and channels"),
        rows(),
        channels(),
    ],
    "dtype of arrays": [dtypes()],
    "dtype options": [dtype_options()],
    "dtype of statistics": [dtypes_of_statistics()],
    "no array": [no_arrays()],
    "what to pass instead": [meant_otherwise()],
}
TABLE: Table = {title: [*chain(*parts)] for title, parts in PARTS.items()}
