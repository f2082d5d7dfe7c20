# SPDX-License-Identifier: MIT
"""The table of wrong input that any front end can be given: options, shapes and dtypes."""

from __future__ import annotations

from decimal import Decimal
from itertools import chain
from typing import Any

import ml_dtypes
import numpy as np

from tests.support.calls import BACKWARDS, FORWARDS, FUNCTIONS, GROUP_NORMS, call_of, taking
from tests.support.operands import draw
from tests.support.refused import Case, Table, each, shapes, values

ROWS = [*FORWARDS, *BACKWARDS]
INF, NAN, HUGE = float("inf"), float("nan"), 10**400
NO_NUMBERS = ["1", None, 1j, True, np.ones(1)]
NO_INTS = [True, False, 2.0, "2", [2], np.True_]
NO_BOOLS = [1, 0, None, "yes", np.True_, []]
NO_NAMES = [1, b"silu", ["silu"], False, np.tanh]
DTYPES = "float16, bfloat16, float32 or float64"
ACTIVATIONS = "'identity', 'sigmoid', 'silu', 'swish', 'tanh', 'relu', 'gelu' or 'gelu_tanh'"
NAMES = "a tuple of 'x', 'weight', 'bias'"
NO_ARRAY = "a NumPy, CuPy, PyTorch or JAX array or another object with __dlpack__"
COMPUTE = {
    "row": "the compute type: float64 if x, its residual stream or x_dtype is, else float32",
    "group": "the compute type: float64 if x is, else float32",
}


def numbers() -> Table:
    eps, offset, c = taking("eps"), taking("weight_offset"), taking("c")
    negative, finite = "a finite number of at least 0", "a finite number"
    return {
        "eps": [
            *values(eps, ValueError, negative, eps=[-1e-6, NAN, INF, HUGE]),
            *values(eps, TypeError, "a number", eps=NO_NUMBERS),
        ],
        "c": [
            *values(c, ValueError, f"{finite} or None", c=[NAN, -INF]),
            *values(c, TypeError, "a number", c=["d", Decimal(2), True]),
        ],
        "weight_offset": [
            *values(offset, ValueError, finite, weight_offset=[NAN, -INF, HUGE]),
            *values(offset, TypeError, "a number", weight_offset=NO_NUMBERS),
            *each(
                offset, ValueError, "weight_offset is 1.0, expected 0 without a weight", weight=None
            ),
        ],
        "flags": [
            case
            for flag in ("round_before_weight", "center", "accumulate")
            for case in values(taking(flag), TypeError, "True or False", **{flag: NO_BOOLS})
        ],
    }


def axes() -> Table:
    axis, groups, channels = taking("axis"), taking("groups"), taking("channel_axis")
    numbered = taking("num_groups")
    of_8 = "a divisor of 8, the {}"
    of_row, of_channels = of_8.format("width of a row"), of_8.format("number of channels")
    wrong = [0, -1, -8, 3, 16, 10**30]
    return {
        "axis": [
            *values(axis, ValueError, "-2 to 1 for x of shape (5, 8)", axis=[2, -3, 100]),
            *values(axis, TypeError, "an int", axis=[1.0, None, (1,), True, "last"]),
        ],
        "groups": [
            *values(groups, ValueError, of_row, groups=wrong),
            *values(groups, TypeError, "an int", groups=[*NO_INTS, None, 1.0]),
            *values(numbered, ValueError, of_channels, num_groups=wrong),
            *values(numbered, TypeError, "an int", num_groups=[*NO_INTS, None]),
        ],
        "groups before the last axis": [
            Case(
                name,
                ValueError,
                f"groups is 2 and axis is {axis}, expected axis -1 with groups",
                {"groups": 2, "axis": axis},
            )
            for name in groups
            for axis in (0, -2)
        ],
        "channel_axis": [
            *values(channels, ValueError, "-1 or 1", channel_axis=[0, 2, -2, -3, 10**30]),
            *values(channels, TypeError, "an int", channel_axis=[-1.0, None, (1,), True, "last"]),
        ],
    }


def choices() -> Table:
    gated, activated, needs = taking("gate"), taking("activation"), taking("needs", "gate")
    no_names = ["x", None, 1, iter(("x",)), np.array("x")]
    unknown: list[Any] = [("x", "y"), ["dx"], ("",), ({},), (np.array(["x"]),)]
    positions = "'pre' or 'post'"

    def gates(error: Any, expected: str, **wrong: Any) -> list[Case]:
        """Give no gate and one: what is said of it is looked at in any case."""
        found = [*values(gated, error, expected, **wrong)]
        return found + [case._replace(change=case.change | {"gate": None}) for case in found]

    wrong_names = ["relu6", "SiLU", "silu ", ""]
    return {
        "activation": [
            *gates(ValueError, ACTIVATIONS, gate_activation=wrong_names),
            *gates(TypeError, ACTIVATIONS, gate_activation=[*NO_NAMES, None]),
            *values(activated, ValueError, ACTIVATIONS, activation=wrong_names),
            *values(activated, TypeError, ACTIVATIONS, activation=NO_NAMES),
        ],
        "gate_position": [
            *gates(ValueError, positions, gate_position=["before", "Pre", ""]),
            *gates(TypeError, positions, gate_position=[None, 0, True, ("pre",), {"pre"}]),
        ],
        "needs": [
            *values(needs, ValueError, f"{NAMES}, 'gate'", needs=unknown),
            *values(needs, TypeError, f"{NAMES}, 'gate'", needs=no_names),
            *values(["group_norm_backward"], ValueError, NAMES, needs=[*unknown, ("gate",)]),
            *values(["group_norm_backward"], TypeError, NAMES, needs=no_names),
        ],
    }


def of_arrays() -> Table:
    of_rows = [(5, 7), (5, 1), (1, 8), (8,), (), (5, 8, 1)]
    like_x = ("residual", "gate", "dy", "d_residual")
    parameters, statistics = ("weight", "bias"), ("mean", "rstd")
    row, sample = (f"one element for each {of}" for of in ("row of x", "group of each sample"))
    wide = {"axis": 0}
    return {
        "shape of rows": [
            *shapes(ROWS, like_x, of_rows, "expected (5, 8), the shape of x"),
            *shapes(
                GROUP_NORMS,
                ["dy"],
                [(3, 8, 1), (8, 8), (3, 8, 8, 1), (1, 8, 8)],
                "expected (3, 8, 8), the shape of x",
            ),
        ],
        "shape of parameters": [
            *shapes(
                ROWS,
                parameters,
                [(512,), (1, 8), (), (5, 8)],
                "expected (8,) to match x.shape[-1]",
            ),
            *shapes(ROWS, ["weight"], [(8,)], "expected (5, 8) to match x.shape[-2:]", **wide),
            *shapes(
                GROUP_NORMS,
                parameters,
                [(5,), (1, 8), (), (3, 8), (2,), (8, 1)],
                "expected (8,), one for each channel",
            ),
        ],
        "shape of statistics": [
            *shapes(BACKWARDS, statistics, [(5, 1), (8,), (), (1,)], f"expected (5,), {row}"),
            *shapes(
                BACKWARDS,
                statistics,
                [(10,), (2, 5), (5, 1), (5, 8)],
                f"expected (5, 2), {row}",
                groups=2,
                **dict.fromkeys(statistics, np.ones((5, 2), np.float32)),
            ),
            *shapes(
                GROUP_NORMS,
                statistics,
                [(3,), (3, 8), (4, 3), (3, 1, 4), (12,), (1, 4)],
                f"expected (3, 4), {sample}",
            ),
        ],
        "no mean": [
            *each(
                ["normalize_backward", "layer_norm_backward"],
                ValueError,
                "mean is None, expected the mean that the forward returned, as center is True",
                mean=None,
            )
        ],
    }


def of_x() -> Table:
    limit, far = "expected 1 to 2147483647", np.broadcast_to(np.float16(1), (2, 2**31))

    def rows(shape: Any, width: int, axis: int = -1, x: Any = None) -> Any:
        x = np.empty(shape, np.float32) if x is None else x
        text = f"x of shape {shape} has rows of {width} elements (axis {axis}), {limit}"
        return each(ROWS, ValueError, text, x=x, axis=axis)

    def channels(shape: Any, channels: int, positions: int, axis: int = -1, x: Any = None) -> Any:
        x = np.empty(shape, np.float32) if x is None else x
        got = f"{channels} channels (channel_axis {axis}) of {positions} positions"
        text = f"x has shape {shape}: {got}, {limit} channels of at least one position"
        return each(GROUP_NORMS, ValueError, text, x=x, channel_axis=axis)

    square = np.broadcast_to(np.float16(1), (2**16, 2**15))
    two = "expected at least two axes: samples and channels"
    return {
        "axes of x": [
            *shapes(ROWS, ["x"], [()], "expected at least one axis"),
            *shapes(GROUP_NORMS, ["x"], [(), (8,)], two),
        ],
        "empty rows": [*rows((3, 0), 0), *rows((0, 0), 0), *rows((0,), 0)],
        "no channels or positions": [
            *channels((3, 5, 0), 0, 5),
            *channels((3, 0), 0, 1),
            *channels((3, 0, 5), 0, 5, axis=1),
            *channels((3, 0, 8), 8, 0),
            *channels((3, 8, 4, 0), 8, 0, axis=1),
            *channels((0, 0, 8), 8, 0),
        ],
        "too wide": [
            *rows((2, 2**31), 2**31, x=far),
            *rows((2**16, 2**15), 2**31, 0, x=square),
            *channels((2, 2**31), 2**31, 1, x=far),
        ],
    }


def dtypes() -> Table:
    arrays = {name: _arrays(name) for name in FUNCTIONS}
    bad = ["int32", "uint8", "bool", "complex64", "float8_e4m3fn", "float8_e5m2"]
    shown = [("int8", "'int8'"), ("float8_e4m3", "'float8_e4m3'"), (float, float), (3, 3)]
    shown += [(np.int32, "int32"), (np.dtype("u1"), "uint8")]
    settled = "residual has dtype float32, expected float16, that of residual_dtype"
    wrong_parsed = [
        Case(name, TypeError, f"{argument} is {text}, expected {DTYPES}", {argument: given})
        for argument in ("dtype", "residual_dtype", "x_dtype")
        for name in taking(argument)
        for given, text in shown
    ]
    return {
        "dtype of arrays": [
            Case(
                name,
                TypeError,
                f"{argument} has dtype {dtype}, expected {DTYPES}",
                {argument: np.zeros(array.shape, getattr(ml_dtypes, dtype, dtype))},
            )
            for name, found in arrays.items()
            for argument, array in found.items()
            for dtype in (bad if argument == "x" else ["int16"])
        ],
        "dtype that is said": wrong_parsed,
        "residual_dtype": [
            *each(taking("residual_dtype"), ValueError, settled, residual_dtype="float16")
        ],
        "dtype of statistics": [
            *_statistics(BACKWARDS, COMPUTE["row"], (5, 8), (5,)),
            *_statistics(["group_norm_backward"], COMPUTE["group"], (3, 8, 8), (3, 4)),
        ],
    }


def _statistics(names: list[str], rule: str, shape: Any, of_statistic: Any) -> list[Case]:
    found = []
    several = [("float32", "float64", "float32"), ("float64", "float32", "float64")]
    for x, wrong, compute in [*several, ("bfloat16", "bfloat16", "float32")]:
        right = {n: draw(n, of_statistic, compute) for n in ("mean", "rstd")}
        for argument in right:
            change = {"x": draw("x", shape, x)} | right | {argument: right[argument].astype(wrong)}
            if wrong == "bfloat16":
                change[argument] = draw(argument, of_statistic, wrong)
            text = f"{argument} has dtype {wrong}, expected {compute}, {rule}"
            taken = [name for name in names if argument in _arrays(name)]
            found += [
                Case(n, TypeError, text, {k: change[k] for k in change if k in _arrays(n)})
                for n in taken
            ]
    return found


def no_arrays() -> Table:
    things = [([1.0], "of type list"), (1.5, "of type float"), (None, "None")]
    required = {"x", "dy", "rstd"}
    return {
        "no array": [
            Case(name, TypeError, f"{argument} is {what}, expected {NO_ARRAY}", {argument: thing})
            for name in FUNCTIONS
            for argument in _arrays(name)
            for thing, what in things
            if thing is not None or argument in required
        ]
    }


def _arrays(name: str) -> dict[str, Any]:
    found = call_of(name).arrays
    return {key: array for key, array in found.items() if isinstance(array, np.ndarray)}


PARTS = (numbers, axes, choices, of_arrays, of_x, dtypes, no_arrays)
TABLE = dict(chain.from_iterable(part().items() for part in PARTS))
