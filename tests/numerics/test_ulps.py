# SPDX-License-Identifier: MIT
"""The size of an ulp, and the comparison of results."""

import numpy as np
import pytest

from tests.support.operands import DTYPES
from tests.support.ulps import assert_same_numbers, assert_within, ulp


@pytest.mark.parametrize("name", DTYPES)
def test_ulp_is_the_distance_to_the_next_number(name):
    dtype = DTYPES[name]
    values = np.concatenate([2.0 ** np.arange(-14, 15), 1.7 * 2.0 ** np.arange(-20, 15), [0.0]])
    values = values.astype(dtype)
    bits = values.view(f"u{dtype.itemsize}")
    following = (bits + np.array(1, bits.dtype)).view(dtype).astype(np.float64)
    values = values.astype(np.float64)
    np.testing.assert_array_equal(ulp(-values, name), following - values)
    assert np.isnan(ulp(np.array([np.inf, np.nan]), name)).all()


def test_the_worst_element_is_reported_in_units_of_the_bound():
    expected, bound = np.zeros((2, 3)), np.full((2, 3), 0.5)
    actual = np.array([[0.1, -0.2, 0.0], [0.0, 0.25, 0.5]])
    assert assert_within(actual, expected, bound) == 1.0
    actual[1, 1] = -2.0
    with pytest.raises(AssertionError, match=r"y\[1, 1\] is .*-2\.0.*4 times.*1 of 6"):
        assert_within(actual, expected, bound, "y")
    with pytest.raises(AssertionError, match="shape"):
        assert_within(np.array([1.0]), np.array([[1.0]]), bound)


@pytest.mark.parametrize(
    ("actual", "expected"),
    [(np.nan, 1.0), (1.0, np.nan), (np.inf, 1.0), (1.0, np.inf), (-np.inf, np.inf), (1e-9, 0.0)],
)
def test_nan_and_infinity_match_only_themselves(actual, expected):
    with pytest.raises(AssertionError):
        assert_within(np.array([actual]), np.array([expected]), np.zeros(1))
    assert assert_within(np.array([actual]), np.array([actual]), np.zeros(1)) == 0.0


def test_beyond_the_largest_number_infinity_is_expected():
    bound = np.array([16.0])
    assert_within(np.array([np.inf], np.float16), np.array([65521.0]), bound)
    assert_within(np.array([65504], np.float16), np.array([65519.0]), bound)
    with pytest.raises(AssertionError):
        assert_within(np.array([np.inf], np.float16), np.array([65519.0]), bound)


def test_same_numbers_tells_dtypes_and_zeros_apart():
    zero = np.array([np.nan, 0], np.float32)
    assert_same_numbers(zero.copy(), zero, "s")
    for other in (-zero, zero.astype(np.float64), zero + np.float32(1e-45)):
        with pytest.raises(AssertionError):
            assert_same_numbers(other, zero, "s")
