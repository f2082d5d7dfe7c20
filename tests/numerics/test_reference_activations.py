# SPDX-License-Identifier: MIT
"""The oracle's activations against 300-digit arithmetic, in the tails too, and PyTorch's."""

from __future__ import annotations

from decimal import Decimal, localcontext
from functools import cache

import numpy as np
import pytest

from cunorm.reference.activations import ACTIVATIONS
from tests.support.bounds import assert_within, gate_error, gate_slope_error

# --- exact arithmetic -----------------------------------------------------------------------------


@cache
def pi():
    """Return 16 arctan(1/5) - 4 arctan(1/239), which is pi."""
    total = Decimal(0)
    for factor, x in ((16, Decimal(1) / 5), (-4, Decimal(1) / 239)):
        total += factor * sum((-1) ** n * x ** (2 * n + 1) / (2 * n + 1) for n in range(230))
    return total


def erfc(x):
    """Return 1 - erf(x) from erf's power series: 300 digits leave enough after what cancels."""
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
    "swish": lambda z: z * sigmoid(z),
    "tanh": lambda z: 2 * sigmoid(2 * z) - 1,
    "relu": lambda z: max(z, Decimal(0)),
    "gelu": lambda z: z / 2 * erfc(-z / Decimal(2).sqrt()),
    "gelu_tanh": lambda z: z * sigmoid((8 / pi()).sqrt() * (z + Decimal("0.044715") * z**3)),
}
SIZES = [1e-9, 1e-3, 0.1, 0.5, 0.75, 1.0, 1.2785, 2.0, 3.3, 5.0, 6.0, 9.5, 12.0, 17.0, 20.0]
POINTS = np.array([sign * size for size in SIZES for sign in (-1, 1)])


def exact(activation):
    """Return g and, from a quotient of differences over 2e-60, g' at the points."""
    g, h = EXACT[activation], Decimal("1e-60")
    with localcontext() as context:
        context.prec = 300
        points = [Decimal(float(z)) for z in POINTS]
        values = [float(g(z)) for z in points]
        slopes = [float((g(z + h) - g(z - h)) / (2 * h)) for z in points]
    return np.array(values), np.array(slopes)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_are_exact_to_half_their_bounds_and_their_slopes_too(activation):
    # The other half is for the kernel, when both compute in float64.
    value, slope = exact(activation)
    got = ACTIVATIONS[activation]
    assert_within(got.value(POINTS), value, gate_error(POINTS, activation, "float64") / 2, "g")
    bound = gate_slope_error(POINTS, activation, "float64") / 2
    assert_within(got.slope(POINTS), slope, bound, "g'")


@pytest.mark.parametrize("activation", ["sigmoid", "silu", "tanh", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("size", [6.0, 9.5])
def test_tails_keep_fourteen_digits(activation, size):
    tail = np.flatnonzero(np.abs(POINTS) == size)
    value, slope = exact(activation)
    got = ACTIVATIONS[activation]
    # The argument of an exponential of -z**2 / 2 is rounded, which at 9.5 costs two digits.
    rtol = 1e-14 if size == 6 else 3e-14
    np.testing.assert_allclose(got.value(POINTS[tail]), value[tail], rtol=rtol, atol=0)
    np.testing.assert_allclose(got.slope(POINTS[tail]), slope[tail], rtol=rtol, atol=0)


def test_tails_are_what_tables_say():
    value = {name: float(a.value(np.array(-6.0))) for name, a in ACTIVATIONS.items()}
    assert value["gelu"] == pytest.approx(-6 * 9.865876450376981e-10, rel=1e-14)
    assert value["sigmoid"] == pytest.approx(np.exp(-6) / (1 + np.exp(-6)), rel=1e-15)
    slope = ACTIVATIONS["tanh"].slope(np.array([20.0, -20.0]))
    np.testing.assert_allclose(slope, 4 * np.exp(-40.0), rtol=1e-15)


# --- PyTorch --------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_and_their_slopes_are_those_of_torch(activation):
    torch = pytest.importorskip("torch")
    names = {"swish": "silu", "gelu_tanh": "gelu"}
    more = {"approximate": "tanh"} if activation == "gelu_tanh" else {}
    z = torch.linspace(-4, 4, 1001, dtype=torch.float64).requires_grad_()
    if activation == "identity":
        g = 1 * z
    else:
        g = getattr(torch.nn.functional, names.get(activation, activation))(z, **more)
    g.sum().backward()
    points = z.detach().numpy()
    got = ACTIVATIONS[activation]
    np.testing.assert_allclose(got.value(points), g.detach().numpy(), rtol=1e-13, atol=1e-16)
    np.testing.assert_allclose(got.slope(points), z.grad.numpy(), rtol=1e-12, atol=1e-15)


# --- special numbers ------------------------------------------------------------------------------

# activation: g(-inf), g(inf), g'(-inf), g'(inf)
AT_INFINITIES = {
    "identity": (-np.inf, np.inf, 1, 1),
    "sigmoid": (0, 1, 0, 0),
    "silu": (np.nan, np.inf, 0, 1),
    "swish": (np.nan, np.inf, 0, 1),
    "tanh": (-1, 1, 0, 0),
    "relu": (0, np.inf, 0, 1),
    "gelu": (np.nan, np.inf, 0, 1),
    "gelu_tanh": (np.nan, np.inf, 0, 1),
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_infinities_give_what_the_docstring_says_and_nan_gives_nan(activation):
    got = ACTIVATIONS[activation]
    with np.errstate(all="ignore"):
        for z in (np.array([-np.inf, np.inf]), np.array([-1e300, 1e300])):
            value, slope = got.value(z), got.slope(z)
            np.testing.assert_array_equal(slope, AT_INFINITIES[activation][2:])
            if np.isinf(z).all():
                np.testing.assert_array_equal(value, AT_INFINITIES[activation][:2])
        if activation != "identity":  # whose derivative is 1 everywhere
            assert np.isnan(got.slope(np.array(np.nan)))
        assert np.isnan(got.value(np.array(np.nan)))


def test_relu_has_no_slope_at_0():
    np.testing.assert_array_equal(ACTIVATIONS["relu"].slope(np.array([-0.0, 0.0])), [0, 0])


def test_swish_is_another_name_of_silu():
    assert ACTIVATIONS["swish"] is ACTIVATIONS["silu"]
