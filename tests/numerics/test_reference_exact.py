# SPDX-License-Identifier: MIT
"""Compared with decimal arithmetic of many digits, the oracle is within half of each bound.

The other half is for the error of a kernel that computes in float64.
"""

from __future__ import annotations

import math
from decimal import Decimal, localcontext
from functools import cache

import numpy as np
import pytest

from cunorm.reference.activations import ACTIVATIONS
from tests.support.bounds import expected_backward, expected_forward
from tests.support.gate_bounds import gate_error, gate_slope_error
from tests.support.group_bounds import expected_group_backward, expected_group_forward
from tests.support.operands import at
from tests.support.reference_cases import group_norm, operands, row_norm
from tests.support.ulps import assert_within

# --- norms ----------------------------------------------------------------------------------------


def in_decimals(x, weight, bias, dy, eps, center):
    """Return the results of one row, computed in 60 digits; `dweight` has its summands, dy * r."""
    with localcontext() as context:
        context.prec = 60
        x, weight, bias, dy = ([Decimal(float(v)) for v in row] for row in (x, weight, bias, dy))
        mean = sum(x) / len(x) if center else Decimal(0)
        rstd = 1 / (sum((v - mean) ** 2 for v in x) / len(x) + Decimal(eps)).sqrt()
        r = [(v - mean) * rstd for v in x]
        dr = [v * w for v, w in zip(dy, weight, strict=True)]
        slope = sum(v * w for v, w in zip(r, dr, strict=True)) / len(x)
        shift = sum(dr) / len(x) - sum(r) / len(x) * slope if center else Decimal(0)
        exact = {
            "y": [v * w + b for v, w, b in zip(r, weight, bias, strict=True)],
            "dx": [rstd * (v - w * slope - shift) for v, w in zip(dr, r, strict=True)],
            "dweight": [v * w for v, w in zip(dy, r, strict=True)],
            "mean": [mean],
            "rstd": [rstd],
        }
        return {name: np.array([float(v) for v in row]) for name, row in exact.items()}


def check(result, expected, exact):
    """Check results against half of each bound."""
    for name in exact.keys() & expected.errors.keys():
        got = getattr(result, name)
        if got is not None:
            right, half = exact[name].reshape(got.shape), expected.bound(name, "float64") / 2
            assert_within(got, right, half, name)


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("mean", [0.0, 1e4])
@pytest.mark.parametrize("width", [1, 2, 3, 31, 5003])
def test_a_row_norm_is_exact_to_its_own_ulps(width, mean, center):
    for seed in range(10 if width < 1000 else 1):
        a = operands((1, width), seed=seed)
        a.x, options = a.x + mean, {"eps": 1e-6, "center": center}
        given = a.weight, a.bias
        exact = in_decimals(a.x[0], *given, a.dy[0], 1e-6, center) | {"dbias": a.dy[0]}
        f, grads = row_norm(a, **options)
        with at(f"seed {seed}"):
            check(f, expected_forward(a.x, *given, **options), exact)
            check(grads, expected_backward(a.dy, a.x, *given, **options), exact)


@pytest.mark.parametrize("width", [1, 3, 31])
def test_a_modulated_norm_is_exact_to_its_own_ulps(width):
    """Each row has a weight; two samples of three rows have a bias each."""
    a = operands((2, 3, width), weight=(2, 3, width), bias=(2, 1, width))
    options, parts = {"eps": 1e-6, "center": True}, {}
    for row in np.ndindex(2, 3):
        given = a.x[row], a.weight[row], a.bias[row[0], 0], a.dy[row]
        for name, array in in_decimals(*given, options["eps"], center=True).items():
            parts.setdefault(name, []).append(array)
    exact = {name: np.stack(arrays) for name, arrays in parts.items()}
    columns = a.dy.swapaxes(1, 2).reshape(2 * width, 3)
    exact["dbias"] = np.array([math.fsum(column) for column in columns])
    f, grads = row_norm(a, **options)
    given = a.weight, a.bias
    check(f, expected_forward(a.x, *given, **options), exact)
    check(grads, expected_backward(a.dy, a.x, *given, **options), exact)


decimals = np.vectorize(lambda v: Decimal(float(v)), otypes=[object])


@pytest.mark.parametrize("activation", ["identity", "sigmoid"])
@pytest.mark.parametrize(
    ("shape", "shared"), [((3, 31), ()), ((31,), (0,)), ((3, 1), (1,)), ((1,), (0, 1))]
)
def test_a_gate_of_the_branch_is_exact_to_its_own_ulps(shape, shared, activation):
    """In every other column, the sum with residual cancels almost all digits."""
    a, options = operands((3, 31), gate=shape), {"eps": 1e-6, "gate_activation": activation}
    cancelling = -a.x * ACTIVATIONS[activation].value(a.gate)
    a.residual = np.where(np.arange(31) % 2, a.residual, cancelling)
    options["gate_position"] = "branch"
    f, grads = row_norm(a, ("residual", "gate"), **options)
    ones, rows = np.ones(31), zip(f.residual, a.dy, strict=True)
    normed = [in_decimals(s, ones, 0 * ones, dy, options["eps"], False) for s, dy in rows]
    exact = {name: np.stack([row[name] for row in normed]) for name in ("y", "rstd", "dx")}
    exact["dresidual"] = exact["dx"] + a.d_residual
    with localcontext() as context:
        context.prec = 60
        arrays = a.x, a.residual, a.gate, exact["dresidual"]
        x, residual, gate, ds = (decimals(array) for array in arrays)
        g = np.vectorize(EXACT[activation], otypes=[object])(gate)
        slope = g * (1 - g) if activation == "sigmoid" else 1
        exact["dx"] = ds * g
        error = np.abs(decimals(f.residual) - (x * g + residual)).astype(float)
        exact["dgate"] = slope * (ds * x).sum(axis=shared, keepdims=True).reshape(shape)
    exact = {name: array.astype(float) for name, array in exact.items()}
    options["gate"] = a.gate
    given = a.x, None, None, a.residual
    expected = expected_forward(*given, stream=f.residual, **options)
    assert_within(error, 0 * error, expected.bound("residual", "float64") / 2, "residual")
    check(f, expected, exact)
    given = a.dy, f.residual, None, None, a.d_residual
    check(grads, expected_backward(*given, branch=a.x, **options), exact)


@pytest.mark.parametrize("mean", [0.0, 1e4])
@pytest.mark.parametrize(("depth", "positions"), [(1, 1), (2, 1), (1, 3), (5, 7), (3, 331)])
def test_a_group_norm_is_exact_to_its_own_ulps(depth, positions, mean):
    a = operands((2, 3 * depth, positions), (3 * depth,))
    a.x = a.x + mean
    exact = {name: np.empty(a.x.shape) for name in ("y", "dx", "dweight")}
    exact |= {name: np.empty((2, 3)) for name in ("mean", "rstd")}
    for sample, group in np.ndindex(2, 3):
        part = sample, slice(group * depth, (group + 1) * depth)
        parameters = (np.repeat(v[part[1]], positions) for v in (a.weight, a.bias))
        found = in_decimals(a.x[part].ravel(), *parameters, a.dy[part].ravel(), 1e-5, True)
        for name, array in exact.items():
            index = part if array.shape == a.x.shape else (sample, group)
            array[index] = found[name].reshape(array[index].shape)
    for name, summands in (("dweight", exact["dweight"]), ("dbias", a.dy)):
        by_channel = summands.swapaxes(0, 1).reshape(3 * depth, -1)
        exact[name] = np.array([math.fsum(channel) for channel in by_channel])
    f, grads = group_norm(a, 3, channel_axis=1)
    given, options = (a.x, 3, a.weight, a.bias), {"eps": 1e-5, "channel_axis": 1}
    check(f, expected_group_forward(*given, **options), exact)
    check(grads, expected_group_backward(a.dy, *given, **options), exact)


def test_parameter_gradients_of_many_rows_keep_their_digits():
    for shape, bias, rows in (
        ((200_000, 2), (2,), 200_000),
        ((2, 100_000, 2), (1, 2), 200_000),
        ((2, 100_000, 2), (2, 1, 2), 100_000),
    ):
        a = operands(shape, bias=bias)
        a.dy = np.full(shape, 0.1)
        right = {"desired": math.fsum([0.1] * rows), "rtol": 4 * 2.0**-53}
        np.testing.assert_allclose(row_norm(a)[1].dbias, **right)
        a.bias = a.bias.reshape(-1, 2)  # of all samples, or of each
        np.testing.assert_allclose(group_norm(a, 2)[1].dbias, **right)


# --- activations ----------------------------------------------------------------------------------


@cache
def pi():
    """Return pi, as 16 arctan(1/5) - 4 arctan(1/239)."""
    total = Decimal(0)
    for factor, x in ((16, Decimal(1) / 5), (-4, Decimal(1) / 239)):
        total += factor * sum((-1) ** n * x ** (2 * n + 1) / (2 * n + 1) for n in range(230))
    return total


def erfc(x):
    """Return 1 - erf(x) by erf's power series; 300 digits are enough despite cancellation."""
    total, power, n = Decimal(0), x, 0
    while power and abs(power) > Decimal("1e-290"):
        total += power / (2 * n + 1)
        n += 1
        power *= -x * x / n
    return 1 - 2 * total / pi().sqrt()


def sigmoid(z):
    return 1 / (1 + (-z).exp())


EXACT = {
    "identity": lambda z: z,
    "sigmoid": sigmoid,
    "silu": lambda z: z * sigmoid(z),
    "tanh": lambda z: 2 * sigmoid(2 * z) - 1,
    "relu": lambda z: max(z, Decimal(0)),
    "gelu": lambda z: z / 2 * erfc(-z / Decimal(2).sqrt()),
    "gelu_tanh": lambda z: z * sigmoid((8 / pi()).sqrt() * (z + Decimal("0.044715") * z**3)),
}
SIZES = [1e-9, 1e-3, 0.1, 0.5, 0.75, 1.0, 1.2785, 2.0, 3.3, 5.0, 6.0, 9.5, 12.0, 17.0, 20.0]
POINTS = np.array([sign * size for size in SIZES for sign in (-1, 1)])


@pytest.mark.parametrize("activation", EXACT)
def test_activations_and_their_slopes_are_exact_to_half_their_bounds_in_the_tails_too(activation):
    """Slopes are difference quotients over 2e-60. Tails keep thirteen digits."""
    g, h = EXACT[activation], Decimal("1e-60")
    with localcontext() as context:
        context.prec = 300
        points = [Decimal(float(z)) for z in POINTS]
        value = np.array([float(g(z)) for z in points])
        slope = np.array([float((g(z + h) - g(z - h)) / (2 * h)) for z in points])
    got = ACTIVATIONS[activation]
    got_value, got_slope = got.value(POINTS), got.slope(POINTS)
    assert_within(got_value, value, gate_error(POINTS, activation, "float64") / 2, "g")
    assert_within(got_slope, slope, gate_slope_error(POINTS, activation, "float64") / 2, "g'")
    for size, rtol in ((6.0, 1e-14), (9.5, 3e-14)):  # rounding -z**2 / 2 costs two digits
        tail = np.abs(POINTS) == size
        np.testing.assert_allclose(got_value[tail], value[tail], rtol=rtol, atol=0)
        np.testing.assert_allclose(got_slope[tail], slope[tail], rtol=rtol, atol=0)


# g(-inf), g(inf), g'(-inf), g'(inf)
AT_INFINITIES = dict.fromkeys(("silu", "gelu", "gelu_tanh"), (np.nan, np.inf, 0, 1)) | {
    "identity": (-np.inf, np.inf, 1, 1),
    "sigmoid": (0, 1, 0, 0),
    "tanh": (-1, 1, 0, 0),
    "relu": (0, np.inf, 0, 1),
}


@pytest.mark.parametrize("activation", AT_INFINITIES)
def test_infinities_give_what_the_docstring_of_activations_says_and_nan_gives_nan(activation):
    got, expected = ACTIVATIONS[activation], AT_INFINITIES[activation]
    with np.errstate(all="ignore"):
        for z in (np.array([-np.inf, np.inf]), np.array([-1e300, 1e300])):
            np.testing.assert_array_equal(got.slope(z), expected[2:])
            if np.isinf(z).all():
                np.testing.assert_array_equal(got.value(z), expected[:2])
        assert np.isnan(got.value(np.array(np.nan)))
        # The derivative of identity is 1 everywhere. At 0, relu has none, and its slope is 0.
        assert np.isnan(got.slope(np.array(np.nan))) == (activation != "identity")
        np.testing.assert_array_equal(ACTIVATIONS["relu"].slope(np.array([-0.0, 0.0])), [0, 0])
