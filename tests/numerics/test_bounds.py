# SPDX-License-Identifier: MIT
"""The bounds hold for arithmetic done well and fail for each way of doing it wrong.

The kernels here are those of `arithmetic`; with a gate, groups and so on, in `test_bounds_gates`.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tests.support.arithmetic import backward, forward
from tests.support.bounds import (
    assert_same_numbers,
    assert_within,
    check_backward,
    check_forward,
    ulp,
)

DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}

# --- ulp ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "infinity"), [("float16", 0x7C00), ("bfloat16", 0x7F80)])
def test_ulp_is_the_distance_to_the_next_number(name, infinity):
    numbers = np.arange(infinity, dtype=np.uint16).view(DTYPES[name]).astype(np.float64)
    np.testing.assert_array_equal(ulp(numbers[:-1], name), np.diff(numbers))
    np.testing.assert_array_equal(ulp(-numbers[:-1], name), np.diff(numbers))
    between = numbers[:-1] + 0.99 * np.diff(numbers)
    np.testing.assert_array_equal(ulp(between, name), np.diff(numbers))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_ulp_is_numpys_spacing(dtype):
    tiny, low = np.finfo(dtype).smallest_subnormal, np.finfo(dtype).tiny
    powers = dtype(2) ** np.arange(-100, 100).astype(dtype)
    values = np.concatenate([powers, np.array([0, tiny, 5 * tiny, low, 2 * low, low / 2], dtype)])
    values = np.concatenate([values, values * dtype(1.7)])
    np.testing.assert_array_equal(ulp(values, dtype.__name__), np.spacing(values))
    assert np.isnan(ulp(np.array([np.inf, np.nan]), dtype.__name__)).all()


# --- assert_within --------------------------------------------------------------------------------


def test_assert_within_reports_the_worst_element_in_units_of_the_bound():
    expected, bound = np.zeros((2, 3)), np.full((2, 3), 0.5)
    actual = np.array([[0.1, -0.2, 0.0], [0.0, 0.25, 0.5]])
    assert assert_within(actual, expected, bound) == 1.0
    actual[1, 1] = -2.0
    with pytest.raises(AssertionError, match=r"y\[1, 1\] is .*-2\.0.*4 times.*1 of 6"):
        assert_within(actual, expected, bound, "y")


@pytest.mark.parametrize(
    ("actual", "expected"),
    [(np.nan, 1.0), (1.0, np.nan), (np.inf, 1.0), (1.0, np.inf), (-np.inf, np.inf), (1e-9, 0.0)],
)
def test_assert_within_matches_nan_and_infinity_exactly(actual, expected):
    bound = np.zeros(2)
    with pytest.raises(AssertionError):
        assert_within(np.array([0.0, actual]), np.array([0.0, expected]), bound)
    assert assert_within(np.array([0.0, actual]), np.array([0.0, actual]), bound) == 0.0


def test_assert_within_expects_infinity_beyond_the_largest_number():
    bound = np.array([16.0])
    assert_within(np.array([np.inf], np.float16), np.array([65521.0]), bound)
    assert_within(np.array([65504], np.float16), np.array([65519.0]), bound)
    with pytest.raises(AssertionError):
        assert_within(np.array([np.inf], np.float16), np.array([65519.0]), bound)
    with pytest.raises(AssertionError):
        assert_within(np.array([1.0]), np.array([[1.0]]), bound)


def test_same_numbers_tells_dtypes_and_zeros_apart():
    zero = np.zeros(2, np.float32)
    assert_same_numbers(np.array([np.nan, 0], np.float32), np.array([np.nan, 0], np.float32), "s")
    for other in (-zero, zero.astype(np.float64), zero + np.float32(1e-45)):
        with pytest.raises(AssertionError):
            assert_same_numbers(other, zero, "s")


# --- kernels done well ----------------------------------------------------------------------------


def inputs(dtype, shape, mean=0.0, seed=0):
    rng = np.random.default_rng(seed)
    names = ("x", "residual", "dy", "d_residual")
    rows = {n: rng.standard_normal(shape).astype(DTYPES[dtype]) for n in names}
    rows["x"] = (rows["x"].astype(np.float64) + mean).astype(DTYPES[dtype])
    return rows | {n: rng.standard_normal(shape[1]).astype(DTYPES[dtype]) for n in ("w", "b")}


@pytest.mark.parametrize("offset", [0.0, 1e4])
@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("width", [1, 2, 3, 31, 1000, 5003, 20000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_good_kernel_is_within_the_bounds(dtype, width, center, offset):
    for rows in (1, max(4, min(200, 100000 // width))):
        a = inputs(dtype, (rows, width), offset)
        options = {"center": center, "eps": 1e-6, "c": 3.0}
        f = forward(a["x"], a["w"], a["b"], a["residual"], **options)
        worst = check_forward(f, a["x"], a["w"], a["b"], a["residual"], **options)
        assert set(worst) == {"y", "residual", "rstd"} | ({"mean"} if center else set())
        grads = backward(a["dy"], f.residual, a["w"], a["b"], a["d_residual"], **options)
        worst = check_backward(
            grads, a["dy"], f.residual, a["w"], a["b"], a["d_residual"], **options
        )
        assert set(worst) == {"dx", "dresidual", "dweight", "dbias"}


# --- and done wrong -------------------------------------------------------------------------------

WRONG_FORWARD = {
    "mean is not corrected": ("float32", 1e4),
    "variance is E[x*x] - E[x]**2": ("float32", 100.0),
    "variance divides by d - 1": ("float32", 0.0),
    "no eps": ("float32", 0.0),
    "no c": ("float32", 0.0),
    "rstd has half its bits": ("float32", 0.0),
    "norm reads the unrounded sum": ("bfloat16", 0.0),
    "rounding before weight is otherwise": ("bfloat16", 0.0),
}


@pytest.mark.parametrize("wrong", WRONG_FORWARD)
def test_bounds_catch_a_forward_whose(wrong):
    dtype, offset = WRONG_FORWARD[wrong]
    a = inputs(dtype, (20, 1000), offset)
    operands = (a["x"], a["w"], a["b"], a["residual"])
    options = {"center": True, "eps": 1e-4, "c": 3.0}
    check_forward(forward(*operands, **options), *operands, **options)
    with pytest.raises(AssertionError):
        check_forward(forward(*operands, **options, wrong=wrong), *operands, **options)


WRONG_BACKWARD = {
    "mean is not corrected": ("float32", 1e4),
    "no mean(r * dr)": ("float32", 0.0),
    "no mean(dq)": ("float32", 0.0),
    "no d_residual": ("bfloat16", 0.0),
    "rounded twice": ("bfloat16", 0.0),
    "dweight without k": ("float32", 0.0),
    "sums are kept in the parameter's dtype": ("bfloat16", 0.0),
    "dbias misses a row": ("bfloat16", 0.0),
}


@pytest.mark.parametrize("wrong", WRONG_BACKWARD)
def test_bounds_catch_a_backward_whose(wrong):
    dtype, offset = WRONG_BACKWARD[wrong]
    a = inputs(dtype, (200, 1000), offset)
    operands = (a["dy"], a["x"], a["w"], a["b"], a["d_residual"])
    options = {"center": True, "eps": 1e-6, "c": 3.0}
    check_backward(backward(*operands, **options), *operands, **options)
    with pytest.raises(AssertionError):
        check_backward(backward(*operands, **options, wrong=wrong), *operands, **options)


FIELDS = ["y", "residual", "mean", "rstd", "dx", "dweight", "dbias", "dresidual"]


@pytest.mark.parametrize("name", FIELDS)
def test_bounds_catch_an_error_in(name):
    a = inputs("float32", (20, 100))
    options = {"center": True, "eps": 1e-6}
    f = forward(a["x"], a["w"], a["b"], a["residual"], **options)
    operands = (a["dy"], f.residual, a["w"], a["b"], a["d_residual"])
    grads = backward(*operands, **options)

    def check(f, grads):
        check_forward(f, a["x"], a["w"], a["b"], a["residual"], **options)
        check_backward(grads, *operands, **options)

    check(f, grads)
    result = f if name in f._fields else grads
    off = getattr(result, name).copy()
    largest = np.argmax(np.abs(off))
    off.flat[largest] = np.nextafter(off.flat[largest], 9) if name == "residual" else 1.0001
    with pytest.raises(AssertionError, match=f"^{name}\\["):
        check(*(r._replace(**{name: off}) if r is result else r for r in (f, grads)))


def test_a_result_that_does_not_apply_is_refused():
    a = inputs("float32", (4, 8))
    result = forward(a["x"], a["w"], None, eps=1e-6)
    check_forward(result, a["x"], a["w"], None, eps=1e-6)
    assert check_forward(result._replace(y=None), a["x"], a["w"], None, eps=1e-6).keys() == {"rstd"}
    for name in ("mean", "residual"):
        with pytest.raises(AssertionError, match=name):
            check_forward(result._replace(**{name: a["x"]}), a["x"], a["w"], None, eps=1e-6)
