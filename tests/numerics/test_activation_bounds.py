# SPDX-License-Identifier: MIT
"""The bounds of activations hold for arithmetic done well, and fail for what loses a tail."""

import ml_dtypes
import numpy as np
import pytest

from cunorm.reference.activations import ACTIVATIONS
from tests.support import arithmetic, group_bounds
from tests.support.gate_bounds import gate_error, gate_slope_error
from tests.support.operands import at
from tests.support.ulps import assert_within


def check_activation(activation, dtype, wrong=""):
    """Try the bfloat16 numbers up to 1e30, and random ones where activations bend and vanish."""
    rng = np.random.default_rng(0)
    numbers = np.arange(0x7149, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float64)
    tails = rng.uniform(-110, 20, 30_000), 8 * rng.standard_normal(30_000)
    z = np.concatenate([numbers, -numbers, rng.standard_normal(30_000), *tails])
    g, slope = arithmetic.activate(z.astype(dtype), activation, wrong)
    z = z.astype(dtype).astype(np.float64)
    with np.errstate(all="ignore"):
        exact, exact_slope = (f(z) for f in ACTIVATIONS[activation])
    assert_within(g, exact, gate_error(z, activation, dtype), "g")
    assert_within(slope, exact_slope, gate_slope_error(z, activation, dtype), "g'")


WRONG_ACTIVATIONS = [
    *((name, "1 - s is a difference") for name in ("sigmoid", "silu")),
    *((name, "g' lacks a term") for name in ("silu", "gelu", "gelu_tanh")),
    ("tanh", "tanh' is 1 - tanh**2"),
    ("relu", "relu' is 1 at 0"),
    ("gelu", "gelu is from 1 + erf"),
    ("gelu_tanh", "gelu_tanh lacks its cube"),
]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_bounds_of_activations_hold_and_catch_what_loses_a_tail(dtype):
    for activation in ACTIVATIONS.keys() - {"swish"}:
        with at(activation):
            check_activation(activation, dtype)
    for activation, wrong in WRONG_ACTIVATIONS:
        with at(wrong), pytest.raises(AssertionError):
            check_activation(activation, dtype, wrong)


@pytest.mark.parametrize("activation", sorted(set(ACTIVATIONS) - {"swish", "relu"}))
@pytest.mark.parametrize("error", [1e-6, 1e-3, 0.1])
def test_slope_change_is_what_the_slope_changes_by_and_little_more(error, activation):
    z = np.linspace(-6, 6, 2001)
    slope = ACTIVATIONS[activation].slope
    changes = [np.abs(slope(z + step * error) - slope(z)) for step in np.linspace(-1, 1, 21)]
    bound = group_bounds.slope_change(z, np.full(z.shape, error), activation)
    change = np.maximum.reduce(changes)
    assert (change <= bound * (1 + 1e-3) + 1e-14).all()
    assert (bound <= change * (1 + 30 * error) + 20 * error**2 + 1e-14).all()
