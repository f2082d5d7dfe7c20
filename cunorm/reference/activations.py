# SPDX-License-Identifier: MIT
"""The activations and their derivatives, in float64.

The formulas avoid cancellation: sigmoid uses exp(-abs(z)), the normal distribution uses erfc, and
the derivative of tanh is sech**2. The tails are therefore accurate, except for the rounding of an
exponential's argument. NaN gives NaN.

At an infinity a derivative is its limit, 0 or 1, and at +infinity a value is its limit. At
-infinity sigmoid, tanh and relu are 0, -1 and 0, but silu, gelu and gelu_tanh are NaN, because they
are products of z and a factor that vanishes.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from cunorm.reference.rows import Float64

Elementwise = Callable[[Float64], Float64]

_erfc: Elementwise = np.vectorize(math.erfc, otypes=[np.float64])


class Activation(NamedTuple):
    """A function and its derivative, elementwise."""

    value: Elementwise
    slope: Elementwise


def sigmoid(z: Float64) -> Float64:
    """Return 1 / (1 + exp(-z))."""
    e = np.exp(-np.abs(z))  # at most 1, whatever the sign of z
    return np.asarray(np.where(z >= 0, 1.0, e) / (1.0 + e))


def _sigmoid_slope(z: Float64) -> Float64:
    e = np.exp(-np.abs(z))
    return np.asarray(e / (1.0 + e) ** 2)


def _tanh_slope(z: Float64) -> Float64:
    e = np.exp(-2.0 * np.abs(z))
    return np.asarray(4.0 * e / (1.0 + e) ** 2)


def _normal_cdf(z: Float64) -> Float64:
    return 0.5 * _erfc(-math.sqrt(0.5) * z)


def _normal_density(z: Float64) -> Float64:
    return np.asarray(np.exp(-0.5 * z * z) / math.sqrt(2.0 * math.pi))


# z * (1 + tanh(u)) / 2 with u = sqrt(2 / pi) * (z + 0.044715 * z**3) is z * sigmoid(2 * u).
_TWICE_U = 2.0 * math.sqrt(2.0 / math.pi)
_CUBIC = 0.044715


def _twice_u(z: Float64) -> Float64:
    return _TWICE_U * (z + _CUBIC * z * z * z)


def _twice_u_slope(z: Float64) -> Float64:
    return _TWICE_U * (1.0 + 3.0 * _CUBIC * z * z)


# For each activation with an exponential of a function a(z): a pair of T and z * a'(z). For sigmoid
# and tanh, T is the derivative. For z * factor(z), T is z * factor'(z), a part of the derivative.
TAILS: dict[str, tuple[Elementwise, Elementwise]] = {
    "sigmoid": (_sigmoid_slope, np.positive),
    "silu": (lambda z: z * _sigmoid_slope(z), np.positive),
    "tanh": (_tanh_slope, lambda z: 2.0 * z),
    "gelu": (lambda z: z * _normal_density(z), np.square),
    "gelu_tanh": (
        lambda z: z * _sigmoid_slope(_twice_u(z)) * _twice_u_slope(z),
        lambda z: z * _twice_u_slope(z),
    ),
}
TAILS["swish"] = TAILS["silu"]


def _product(name: str, factor: Elementwise) -> Activation:
    """Return the activation z * factor(z)."""
    tail, _ = TAILS[name]

    def slope(z: Float64) -> Float64:
        z = np.clip(z, -1000.0, 1000.0)  # beyond, exponentials are 0; products stay finite
        return factor(z) + tail(z)

    return Activation(lambda z: z * factor(z), slope)


ACTIVATIONS = {
    "identity": Activation(np.positive, np.ones_like),
    "sigmoid": Activation(sigmoid, _sigmoid_slope),
    "silu": _product("silu", sigmoid),
    "swish": _product("swish", sigmoid),
    "tanh": Activation(np.tanh, _tanh_slope),
    "relu": Activation(lambda z: np.maximum(z, 0.0), lambda z: np.where(np.isnan(z), z, z > 0)),
    "gelu": _product("gelu", _normal_cdf),
    "gelu_tanh": _product("gelu_tanh", lambda z: sigmoid(_twice_u(z))),
}
