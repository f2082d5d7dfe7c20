# SPDX-License-Identifier: MIT
"""The activations of a gate and their derivatives, in float64.

Each is written so that nothing cancels: sigmoid from exp(-abs(z)), the normal distribution from
erfc, the derivative of tanh as sech**2. So the tails keep their digits, but for what the rounding
of an exponential's argument costs. NaN gives NaN.

At an infinity a derivative is its limit, 0 or 1. A value is its limit at +infinity; at -infinity
sigmoid, tanh and relu are 0, -1 and 0, but silu, gelu and gelu_tanh, a product of z and a factor
that vanishes, are NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]

_erfc: Callable[[Any], Float64] = np.vectorize(math.erfc, otypes=[np.float64])


class Activation(NamedTuple):
    """A function and its derivative, elementwise."""

    value: Callable[[Float64], Float64]
    slope: Callable[[Float64], Float64]


def sigmoid(z: Float64) -> Float64:
    """Return 1 / (1 + exp(-z))."""
    e = np.exp(-np.abs(z))  # at most 1, whatever the sign of z
    return np.asarray(np.where(z >= 0, 1.0, e) / (1.0 + e))


def _sigmoid_slope(z: Float64) -> Float64:
    e = np.exp(-np.abs(z))
    return np.asarray(e / (1.0 + e) ** 2)


def _silu(z: Float64) -> Float64:
    return z * sigmoid(z)


def _silu_slope(z: Float64) -> Float64:
    z = _finite(z)
    return sigmoid(z) + z * _sigmoid_slope(z)


def _tanh_slope(z: Float64) -> Float64:
    e = np.exp(-2.0 * np.abs(z))
    return np.asarray(4.0 * e / (1.0 + e) ** 2)


def _relu(z: Float64) -> Float64:
    return np.asarray(np.maximum(z, 0.0))


def _relu_slope(z: Float64) -> Float64:
    return np.asarray(np.where(np.isnan(z), z, z > 0))


def _normal_cdf(z: Float64) -> Float64:
    return 0.5 * _erfc(-math.sqrt(0.5) * z)


def _gelu(z: Float64) -> Float64:
    return z * _normal_cdf(z)


def _gelu_slope(z: Float64) -> Float64:
    z = _finite(z)
    density = np.exp(-0.5 * z * z) / math.sqrt(2.0 * math.pi)
    return np.asarray(_normal_cdf(z) + z * density)


# z * (1 + tanh(u)) / 2 with u = sqrt(2 / pi) * (z + 0.044715 * z**3) is z * sigmoid(2 * u).
_TWICE_U = 2.0 * math.sqrt(2.0 / math.pi)
_CUBIC = 0.044715


def _gelu_tanh(z: Float64) -> Float64:
    return z * sigmoid(_TWICE_U * (z + _CUBIC * z * z * z))


def _gelu_tanh_slope(z: Float64) -> Float64:
    z = _finite(z)
    twice_u = _TWICE_U * (z + _CUBIC * z * z * z)
    slope = _TWICE_U * (1.0 + 3.0 * _CUBIC * z * z)
    return sigmoid(twice_u) + z * _sigmoid_slope(twice_u) * slope


def _finite(z: Float64) -> Float64:
    """Bring z to where no exponential is above 0 any more, but products with it are finite."""
    return np.asarray(np.clip(z, -1000.0, 1000.0))


_SILU = Activation(_silu, _silu_slope)

ACTIVATIONS = {
    "identity": Activation(np.positive, np.ones_like),
    "sigmoid": Activation(sigmoid, _sigmoid_slope),
    "silu": _SILU,
    "swish": _SILU,
    "tanh": Activation(np.tanh, _tanh_slope),
    "relu": Activation(_relu, _relu_slope),
    "gelu": Activation(_gelu, _gelu_slope),
    "gelu_tanh": Activation(_gelu_tanh, _gelu_tanh_slope),
}
