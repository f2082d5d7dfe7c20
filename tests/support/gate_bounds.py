# SPDX-License-Identifier: MIT
"""Error bounds of an activation g and its derivative g'.

g' is a sum of at most two terms. One term, here called T, contains an exponential of an argument
a(z). In the exponential's tail, the rounding of a(z) matters.

    sigmoid, tanh   g' = T                  a = z, 2z
    silu            g' = s(z) + T           a = z           T = z * s'(z)
    gelu            g' = Phi(z) + T         a = z**2 / 2    T = z * phi(z)
    gelu_tanh       g' = s(2v) + T          a = 2v          T = z * s'(2v) * 2v'

s is the sigmoid, v = sqrt(2/pi) * (z + 0.044715 z**3), u is `unit`. identity and relu are exact.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from cunorm.reference.activations import ACTIVATIONS
from tests.support.ulps import Array, narrows, smallest_normal, ulp, unit

EXACT = ("identity", "relu")


class Gate(NamedTuple):
    """The exact g and g' of a gate, and their error bounds."""

    value: Array
    slope: Array
    value_error: Array
    slope_error: Array


@np.errstate(all="ignore")
def gate_of(z: Array, activation: str, dtype: str, compute: str) -> Gate:
    """Return the Gate of values z, in float64, that are stored in a dtype."""
    value, slope = (f(z) for f in ACTIVATIONS[activation])
    errors = gate_error(z, activation, compute, dtype), gate_slope_error(z, activation, compute)
    return Gate(value, slope, *errors)


@np.errstate(all="ignore")
def gate_error(z: Array, activation: str, compute: str, dtype: str = "bfloat16") -> Array:
    """Bound the error of g(z): 4 ulp(g(z)) + 2 u * abs(z * T).

    exp, tanh or erfc is within 2 ulp; a sum, a division and the product with z round once each.
    An exponential's argument is a rounded product with a rounded constant. A gate of a wider dtype
    is rounded first. Subnormal numbers may become 0, because CUDA flushes them.
    """
    g, slope = (f(z) for f in ACTIVATIONS[activation])
    error = 0.5 * ulp(z, compute) * np.abs(slope) if narrows(compute, dtype) else np.zeros(z.shape)
    if activation in EXACT:
        return error
    z = _clipped(z)
    tail = np.abs(z * exponential_term(z, activation)[0])
    error += count(4, compute) * ulp(g, compute) + count(2, compute) * unit(compute) * tail
    return error + smallest_normal(compute) * (1 + np.abs(z))


@np.errstate(all="ignore")
def gate_slope_error(z: Array, activation: str, compute: str) -> Array:
    """Bound the error of g'(z): 8 u * (sum of the terms' sizes) + 2 u * abs(z * a' * T).

    The terms may cancel (silu' is 0 at -1.28), so the error is relative to the terms. Each term is
    e / (1 + e)**2 or similar, with an exponential e that is within 4 u; 4 roundings follow. The
    argument a of e is off by up to 2 u * abs(a) <= 2 u * abs(z * a'), which e has as a relative
    error, too. If a factor of a term is flushed to 0, the others are at most (1 + abs(z))**3.
    """
    if activation in EXACT:
        return np.zeros(z.shape)
    slope = ACTIVATIONS[activation].slope(z)
    tail, sensitivity = exponential_term(z, activation)
    sizes = np.abs(slope - tail) + np.abs(tail)
    error = count(8, compute) * sizes + count(2, compute) * np.abs(sensitivity * tail)
    return unit(compute) * error + smallest_normal(compute) * (1 + np.abs(_clipped(z))) ** 3


def exponential_term(z: Array, activation: str) -> tuple[Array, Array]:
    """Return T and z * a'(z)."""
    z, sigmoid_slope = _clipped(z), ACTIVATIONS["sigmoid"].slope
    if activation == "gelu":
        return z * np.exp(-z * z / 2) / math.sqrt(2 * math.pi), z * z
    if activation == "gelu_tanh":
        root = math.sqrt(8 / math.pi)
        slope = root * (1 + 3 * 0.044715 * z * z)
        return z * sigmoid_slope(root * (z + 0.044715 * z**3)) * slope, z * slope
    if activation == "tanh":
        return ACTIVATIONS["tanh"].slope(z), 2 * z
    return sigmoid_slope(z) * (1 if activation == "sigmoid" else z), z


def _clipped(z: Array) -> Array:
    """Clip z to limits at which exponentials are already 0, but products with z still finite."""
    return np.clip(z, -1000.0, 1000.0)


def count(base: int, compute: str, width: int = 1) -> int:
    """Return a bound in ulps of the compute type; `base` is the bound of short rows in float32.

    Long rows have twice the bound. float64 has twice the bound, because the oracle rounds too.
    """
    return base * (2 if width > 16384 else 1) * (2 if compute == "float64" else 1)
