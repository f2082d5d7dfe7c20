# SPDX-License-Identifier: MIT
"""The bounds of activations hold for arithmetic done well, and fail for what loses a tail."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from cunorm.reference.activations import ACTIVATIONS
from tests.support.arithmetic import activate
from tests.support.bounds import assert_within, gate_error, gate_slope_error


def all_kinds_of_numbers(dtype):
    """Return the bfloat16 numbers up to 1e30, and random ones where activations bend and vanish."""
    rng = np.random.default_rng(0)
    numbers = np.arange(0x7149, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float64)
    tails = rng.uniform(-110, 20, 30_000), 8 * rng.standard_normal(30_000)
    return np.concatenate([numbers, -numbers, rng.standard_normal(30_000), *tails]).astype(dtype)


def check_activation(activation, dtype, wrong=""):
    z = all_kinds_of_numbers(dtype)
    g, slope = activate(z, {"swish": "silu"}.get(activation, activation), wrong)
    z = z.astype(np.float64)
    with np.errstate(all="ignore"):
        exact, exact_slope = (f(z) for f in ACTIVATIONS[activation])
    assert_within(g, exact, gate_error(z, activation, dtype), "g")
    assert_within(slope, exact_slope, gate_slope_error(z, activation, dtype), "g'")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_activation_done_well_is_within_its_bounds(activation, dtype):
    check_activation(activation, dtype)


WRONG_ACTIVATION = [
    ("sigmoid", "1 - s is a difference"),
    ("silu", "1 - s is a difference"),
    ("silu", "g' lacks a term"),
    ("tanh", "tanh' is 1 - tanh**2"),
    ("relu", "relu' is 1 at 0"),
    ("gelu", "gelu is from 1 + erf"),
    ("gelu", "g' lacks a term"),
    ("gelu_tanh", "gelu_tanh lacks its cube"),
    ("gelu_tanh", "g' lacks a term"),
]


@pytest.mark.parametrize(("activation", "wrong"), WRONG_ACTIVATION)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_bounds_catch_an_activation_where(activation, wrong, dtype):
    with pytest.raises(AssertionError):
        check_activation(activation, dtype, wrong)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_gate_of_a_wider_dtype_may_be_rounded_first(activation):
    z = 5 * np.random.default_rng(0).standard_normal(10_000)
    g, slope = activate(z.astype(np.float32), {"swish": "silu"}.get(activation, activation))
    exact, exact_slope = (f(z) for f in ACTIVATIONS[activation])
    assert_within(g, exact, gate_error(z, activation, "float32", "float64"), "g")
    assert_within(slope, exact_slope, gate_slope_error(z, activation, "float32"), "g'")
