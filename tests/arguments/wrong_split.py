# SPDX-License-Identifier: MIT
"""The table of wrong input for the pieces of norms of split rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from cunorm import Moments, Statistics, Sums

X, R, W = (np.ones(shape, np.float32) for shape in ((5, 8), (5,), (8,)))
P = np.ones((2, 5), np.float32)  # of two parts
R64, R16, EMPTY = R.astype(np.float64), R.astype(np.float16), np.ones((5, 0), np.float32)
TYPE, VALUE = TypeError, ValueError
Error = tuple[dict[str, Any], type[Exception], str]

ARRAY = "expected a NumPy, CuPy, PyTorch or JAX array or another object with __dlpack__"
COMPUTE = "the compute type: float64 if x, its residual stream or x_dtype is, else float32"
OF_ROWS = "expected (5,), one element for each row of x"
NO_ROWS = "x of shape (5, 0) has rows of 0 elements (axis -1), expected 1 to 2147483647"
NO_CENTER, NO_MEAN = "given, expected None: center is False", "as rows are centred"
ONE, AN_INT = "expected at least 1", "expected an int"
NO_COUNT = "count is None, expected the number of elements of a whole row, as rows may be split"


def of_moments() -> list[Error]:
    """Return errors of row_moments."""
    gate, silu = {"x": X, "gate": X}, "expected 'pre' and 'silu' as gate is None: leave them out"
    both = "gate_position is {!r} and gate_activation is {!r}, ".format
    out = {
        "mean": (R, VALUE, "given, expected None: without center there is no mean"),
        "correction": (R, VALUE, "given, expected None: without center there is no mean"),
        "m2": (R16, TYPE, f"has dtype float16, expected float32, {COMPUTE}"),
        "residual": (X.T, VALUE, "has shape (8, 5), expected (5, 8)"),
    }
    found: list[Error] = [
        ({"x": X, "out": Moments(**{name: one})}, error, _joined(f"out.{name}", text))
        for name, (one, error, text) in out.items()
    ]
    return [
        *found,
        (gate | {"gate_position": "post"}, VALUE, "gate_position is 'post', expected 'pre' or"),
        ({"x": X, "gate_position": "branch"}, VALUE, both("branch", "silu") + silu),
        ({"x": X, "gate_activation": "tanh"}, VALUE, both("pre", "tanh") + silu),
        ({"x": X, "gate": W}, VALUE, "gate has shape (8,), expected (5, 8), the shape of x: "),
        ({"x": X, "residual": W}, VALUE, "residual has shape (8,), expected (5, 8), the shape of"),
        ({"x": EMPTY}, VALUE, NO_ROWS),
        ({"x": None}, TYPE, f"x is None, {ARRAY}"),
        ({"x": X.astype(np.int32)}, TYPE, "x has dtype int32, expected float16, bfloat16"),
        ({"x": X, "center": 1}, TYPE, "center is 1, expected True or False"),
        ({"x": X, "out": (R,)}, TYPE, "out is of type tuple, expected a Moments of arrays and N"),
        ({"x": X, "out": Statistics()}, TYPE, "out is of type Statistics, expected a Moments of"),
        (
            {"x": X, "center": True, "out": Moments(mean=X)},
            VALUE,
            "out.mean has shape (5, 8), expected (5,)",
        ),
        (
            {"x": X, "out": Moments(m2=np.broadcast_to(R[:1], (5,)))},
            VALUE,
            "out.m2 has strides (0,), with which elements may share memory",
        ),
    ]


def _joined(argument: str, text: str) -> str:
    return f"{argument} is {text}" if text.startswith("given") else f"{argument} {text}"


def of_combined() -> list[Error]:
    """Return errors of combine_moments."""
    arrays: list[tuple[str, Any, type[Exception], str]] = [
        ("m2", None, TYPE, f"is None, {ARRAY}"),
        ("m2", [1.0], TYPE, f"is of type list, {ARRAY}: pass numpy.asarray(moments.m2)"),
        ("m2", P.astype(np.float16), TYPE, "has dtype float16, expected float32 or float64"),
        ("m2", P[:0], VALUE, "has shape (0, 5), expected a first axis with an element for each"),
        ("m2", P[0, 0], TYPE, f"is of type numpy.float32, {ARRAY}"),
        ("m2", np.ones((), np.float32), VALUE, "has shape (), expected a first axis with an el"),
        ("mean", P[:, :4], VALUE, "has shape (2, 4), expected (2, 5)"),
        ("mean", P.astype(np.float64), TYPE, "has dtype float64, expected float32, that of momen"),
        ("mean", R, VALUE, "has shape (5,), expected (2, 5)"),
        ("correction", P[:1], VALUE, "has shape (1, 5), expected (2, 5)"),
        ("correction", P.astype(np.float64), TYPE, "has dtype float64, expected float32, that of"),
        ("count", None, VALUE, "is None, expected a number or an array"),
        ("count", 0, VALUE, f"is 0, {ONE}"),
        ("count", -8, VALUE, f"is -8, {ONE}"),
        ("count", True, TYPE, f"is True, {AN_INT}"),
        ("count", 8.0, TYPE, f"is 8.0, {AN_INT}"),
        ("count", np.float32(8), TYPE, "is "),
        ("count", [8, 8], TYPE, f"is of type list, {ARRAY}: pass numpy.asarray(moments.count)"),
        ("count", W[:3], VALUE, "has shape (3,), expected (2,)"),
        ("count", P, VALUE, "has shape (2, 5), expected (2,)"),
        ("count", np.ones(2, np.int32), TYPE, "has dtype int32, expected float16, bfloat16, float"),
        ("count", np.ones(2), TYPE, "has dtype float64, expected float32, that of moments.m2"),
    ]
    found: list[Error] = [
        ({"moments": moments(**{name: one})}, error, f"moments.{name} {text}")
        for name, one, error, text in arrays
    ]
    no_mean = "is given, expected None: moments.mean is None"
    given = {"moments": moments(mean=None, correction=P)}
    found.append((given, VALUE, f"moments.correction {no_mean}"))
    for name in ("mean", "correction"):
        given = {"moments": moments(mean=None), "out": Statistics(**{name: R})}
        found.append((given, VALUE, f"out.{name} {no_mean}"))
    for name in ("mean", "rstd", "correction"):
        out = {"moments": moments(), "out": Statistics(**{name: R64})}
        text = "has dtype float64, expected float32, that of moments.m2"
        found.append((out, TYPE, f"out.{name} {text}"))
    rstd = P.reshape(-1)[::2]
    return [
        *found,
        ({"moments": None}, TYPE, "moments is None, expected a Moments"),
        ({"moments": (P, P, 8)}, TYPE, "moments is of type tuple, expected a Moments"),
        ({"moments": moments(), "out": (R,)}, TYPE, "out is of type tuple, expected a Statistics"),
        ({"moments": moments(), "out": Statistics(rstd=X)}, VALUE, "out.rstd has shape (5, 8), "),
        (
            {"moments": moments(), "out": Statistics(rstd=rstd)},
            VALUE,
            "out.rstd has strides (2,), expected a contiguous array",
        ),
        ({"moments": moments(), "eps": -1.0}, VALUE, "eps is -1.0, expected a finite number of"),
        ({"moments": moments(), "eps": None}, TYPE, "eps is None, expected a number"),
    ]


def moments(**fields: Any) -> Moments[Any]:
    """Return moments of two parts with some other fields."""
    return Moments(mean=P, m2=P, count=8)._replace(**fields)


def of_given(center: bool, takes: set[str]) -> list[Error]:
    """Return errors of a norm with given statistics; `takes` has the keywords that it takes."""
    right = {"rstd": R} | ({"mean": R} if center else {})
    no_mean = f"mean is None, expected the mean that combine_moments returned, {NO_MEAN}"
    no_rstd = "rstd is None, expected an array, as mean, correction, count or x_dtype is given"
    errors: list[Error] = [
        ({"rstd": None, "mean": R}, TYPE, no_rstd),
        ({"rstd": None, "mean": None, "correction": R}, TYPE, no_rstd),
        ({"rstd": None, "mean": None, "count": 8}, TYPE, no_rstd),
        ({"rstd": 1.0}, TYPE, f"rstd is of type float, {ARRAY}"),
        ({"rstd": X}, VALUE, f"rstd has shape (5, 8), {OF_ROWS}"),
        ({"rstd": R16}, TYPE, "rstd has dtype float16, expected float32 or float64"),
        ({"count": 0}, VALUE, f"count is 0, {ONE}"),
        ({"count": True}, TYPE, f"count is True, {AN_INT}"),
        ({"count": 8.0}, TYPE, f"count is 8.0, {AN_INT}"),
        ({"c": 2.0}, VALUE, NO_COUNT),
        ({"x_dtype": "int8"}, TYPE, "x_dtype is 'int8', expected float16, bfloat16, float32 or"),
        ({"rstd": None, "mean": None, "x_dtype": "float16"}, TYPE, no_rstd),
        ({"x": EMPTY}, VALUE, NO_ROWS),
    ]
    wide, first = {"x": X.astype(np.float64)}, "mean" if center else "rstd"
    errors.append((wide, TYPE, f"{first} has dtype float32, expected float64, {COMPUTE}"))
    errors.append(({"groups": 2}, VALUE, f"{first} has shape (5,), expected (5, 2), one element"))
    if center:
        errors += [
            ({"mean": None}, VALUE, no_mean),
            ({"mean": None, "correction": R}, VALUE, no_mean),
            ({"mean": X}, VALUE, f"mean has shape (5, 8), {OF_ROWS}"),
            ({"mean": R64}, TYPE, "mean has dtype float64, expected float32, that of rstd"),
            ({"rstd": R64}, TYPE, "mean has dtype float32, expected float64, that of rstd"),
            ({"correction": X}, VALUE, f"correction has shape (5, 8), {OF_ROWS}"),
            ({"correction": R64}, TYPE, "correction has dtype float64, expected float32, that of"),
        ]
    else:
        errors += [({name: R}, VALUE, f"{name} is {NO_CENTER}") for name in ("mean", "correction")]
    return [
        (right | change, error, text) for change, error, text in errors if change.keys() <= takes
    ]


def of_sums(center: bool) -> list[Error]:
    """Return errors of normalize_backward_sums."""
    right = {"dy": X, "center": center, "rstd": R} | ({"mean": R} if center else {})
    errors: list[Error] = [
        ({"rstd": None}, TYPE, f"rstd is None, {ARRAY}"),
        ({"rstd": R16}, TYPE, "rstd has dtype float16, expected float32 or float64"),
        ({"rstd": X}, VALUE, f"rstd has shape (5, 8), {OF_ROWS}"),
        ({"dy": W}, VALUE, "dy has shape (8,), expected (5, 8), the shape of x: the order is"),
        ({"dy": EMPTY, "x": EMPTY}, VALUE, NO_ROWS),
        ({"weight": X[:, :3]}, VALUE, "weight has shape (5, 3), expected (8,) to match"),
        ({"gate_position": "pre"}, VALUE, "gate_position is 'pre', expected 'post' as gate is"),
        ({"out": Statistics()}, TYPE, "out is of type Statistics, expected a Sums of arrays"),
        ({"out": Sums(sum_r_dr=X)}, VALUE, "out.sum_r_dr has shape (5, 8), expected (5,)"),
        ({"out": Sums(sum_r_dr=R64)}, TYPE, "out.sum_r_dr has dtype float64, expected float32"),
    ]
    if center:
        source = f"expected the mean that the forward returned, {NO_MEAN}"
        errors += [
            ({"mean": None}, VALUE, f"mean is None, {source}"),
            ({"mean": None, "correction": R}, VALUE, f"mean is None, {source}"),
            ({"correction": R16}, TYPE, "correction has dtype float16, expected float32, that"),
            ({"out": Sums(R64)}, TYPE, "out.sum_dr has dtype float64, expected float32"),
        ]
    else:
        errors += [({name: R}, VALUE, f"{name} is {NO_CENTER}") for name in ("mean", "correction")]
        errors.append(({"out": Sums(R)}, VALUE, f"out.sum_dr is {NO_CENTER}"))
    return [(right | change, error, text) for change, error, text in errors]


def of_backward(center: bool, takes: set[str]) -> list[Error]:
    """Return errors of a backward that is given sums."""
    right = {"dy": X, "rstd": R, "sums": Sums(R if center else None, R)}
    right |= {"count": 8} | ({"mean": R} if center else {})
    whole = "of whole rows, as correction or count is given"
    sums: list[tuple[Any, type[Exception], str]] = [
        ((R, R), TYPE, "sums is of type tuple, expected a Sums"),
        (R, TYPE, "sums is of type ndarray, expected a Sums"),
        (Statistics(R, R), TYPE, "sums is of type Statistics, expected a Sums"),
        (Sums(), TYPE, f"sums.sum_r_dr is None, {ARRAY}"),
        (Sums(None, [1.0]), TYPE, f"sums.sum_r_dr is of type list, {ARRAY}: pass"),
        (Sums(None, X), VALUE, f"sums.sum_r_dr has shape (5, 8), {OF_ROWS}"),
        (Sums(None, R64), TYPE, f"sums.sum_r_dr has dtype float64, expected float32, {COMPUTE}"),
    ]
    if center:
        text = "sums.sum_dr is None, expected that of normalize_backward_sums with center=True, "
        sums.append((Sums(None, R), VALUE, text + NO_MEAN))
        sums.append((Sums(X, R), VALUE, f"sums.sum_dr has shape (5, 8), {OF_ROWS}"))
        sums.append((Sums(R16, R), TYPE, "sums.sum_dr has dtype float16, expected float32"))
    else:
        sums.append((Sums(R, R), VALUE, f"sums.sum_dr is {NO_CENTER}"))
    errors: list[Error] = [({"sums": one}, error, text) for one, error, text in sums]
    errors += [
        ({"sums": None, "correction": R}, TYPE, f"sums is None, expected a Sums {whole}"),
        ({"sums": None, "count": 8}, TYPE, f"sums is None, expected a Sums {whole}"),
        ({"count": 0}, VALUE, f"count is 0, {ONE}"),
        ({"count": 8.0}, TYPE, f"count is 8.0, {AN_INT}"),
        ({"count": None}, VALUE, NO_COUNT),
        ({"rstd": R64}, TYPE, f"rstd has dtype float64, expected float32, {COMPUTE}"),
    ]
    if center:
        errors.append(({"correction": X}, VALUE, f"correction has shape (5, 8), {OF_ROWS}"))
        errors.append(({"correction": R16}, TYPE, "correction has dtype float16, expected float32"))
    else:
        errors.append(({"correction": R}, VALUE, f"correction is {NO_CENTER}"))
    return [
        (right | change, error, text) for change, error, text in errors if change.keys() <= takes
    ]


KEYWORDS = {"dy", "x", "rstd", "sums", "groups"}
ALL = KEYWORDS | {"mean", "correction", "count"}
# The function, the options of all its calls, and its errors.
ERRORS: list[tuple[str, dict[str, Any], list[Error]]] = [
    ("row_moments", {}, of_moments()),
    ("combine_moments", {"eps": 1e-5}, of_combined()),
    *(("normalize_backward_sums", {"x": X}, of_sums(center)) for center in (False, True)),
    *(
        ("normalize", {"x": X, "center": one}, of_given(one, ALL | {"c", "x_dtype"}))
        for one in (False, True)
    ),
    ("rms_norm", {"x": X}, of_given(False, KEYWORDS | {"x_dtype"})),
    ("layer_norm", {"x": X}, of_given(True, ALL - {"count"} | {"x_dtype"})),
    ("l2_norm", {"x": X, "count": 8}, of_given(False, KEYWORDS | {"count"})),
    ("l2_norm", {"x": X, "rstd": R}, [({"count": None}, VALUE, NO_COUNT)]),
    ("normalize_backward", {"x": X}, of_backward(False, ALL)),
    ("normalize_backward", {"x": X, "center": True}, of_backward(True, ALL)),
    ("rms_norm_backward", {"x": X}, of_backward(False, KEYWORDS | {"count"})),
    ("layer_norm_backward", {"x": X}, of_backward(True, ALL)),
    ("l2_norm_backward", {"x": X}, of_backward(False, KEYWORDS | {"count"})),
]
