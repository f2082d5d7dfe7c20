# SPDX-License-Identifier: MIT
"""The activations' formulas in extended precision, and how far a compiled one may be off.

With u half an ulp of 1: a value by 4 ulp, and by what moving z by 2 u of it does to the value. A
derivative by 8 u of the sizes of its terms, which may cancel. The exponents of sigmoid, silu, tanh
and, to first order, gelu are not rounded before the exponential is taken; that of gelu_tanh is, and
its derivative may be off by what moving z there by 2 u of it does. A tail that is subnormal keeps
only some of its bits; what it is multiplied by magnifies that.
"""

import math
from typing import NamedTuple

import numpy as np

Wide = np.longdouble
PI = Wide("3.14159265358979323846264338327950288")
TWICE_ROOT = 2 * np.sqrt(2 / PI)
CUBIC = Wide("0.044715")
NAMES = ("identity", "sigmoid", "silu", "tanh", "relu", "gelu", "gelu_tanh")


class Exact(NamedTuple):
    """An activation g at points z."""

    value: np.ndarray
    slope: np.ndarray  # g'(z)
    sizes: np.ndarray  # of the terms of g'(z), summed
    tail_factor: np.ndarray  # what multiplies the tail in g'(z)
    moved: np.ndarray | float = 0.0  # z times the derivative of g' by the z of a rounded exponent


def sigmoids(z):
    """s(z) and 1 - s(z)."""
    e = np.exp(-np.abs(z))
    return np.where(z < 0, e, 1) / (1 + e), np.where(z < 0, 1, e) / (1 + e)


def erfc(x):
    """math.erfc, corrected for what a double lacks of x."""
    near = x.astype(np.float64)
    erfc_near = np.vectorize(math.erfc, otypes=[np.float64])(near).astype(Wide)
    return erfc_near - (x - near) * 2 / np.sqrt(PI) * np.exp(-(near.astype(Wide) ** 2))


def exact(name, z):
    """Evaluate an activation at finite points z."""
    z = z.astype(Wide)
    size, one = np.abs(z), np.ones_like(z)
    with np.errstate(under="ignore", over="ignore"):
        if name == "identity":
            return Exact(z, one, one, 0 * z)
        if name == "relu":
            step = np.where(z > 0, one, 0)
            return Exact(np.maximum(z, 0), step, step, 0 * z)
        if name == "tanh":
            sech = 2 * np.exp(-size) / (1 + np.exp(-2 * size))
            return Exact(np.tanh(z), sech**2, sech**2, 4 * one)
        if name == "gelu":
            cumulative = erfc(-z / np.sqrt(Wide(2))) / 2
            term = z * np.exp(-z * z / 2) / np.sqrt(2 * PI)
            return Exact(z * cumulative, cumulative + term, cumulative + np.abs(term), 1 + size)
        u = TWICE_ROOT * (z + CUBIC * z**3) if name == "gelu_tanh" else z
        s, complement = sigmoids(u)
        if name == "sigmoid":
            return Exact(s, s * complement, s * complement, one)
        slope = TWICE_ROOT * (1 + 3 * CUBIC * z * z) if name == "gelu_tanh" else one
        term = z * s * complement * slope
        factor = 1 + size * slope
        moved = size * slope * np.abs(term) if name == "gelu_tanh" else 0.0
        return Exact(z * s, s + term, s + np.abs(term), factor, moved)


def bounds(name, z, expected):
    """Return how far the value and the derivative may be off, given the dtype of z."""
    info = np.finfo(z.dtype)
    # 1 / (1 + e^-z) is 0 from where e^-z overflows on, at less than the smallest normal number.
    logistic = name in ("sigmoid", "silu", "gelu_tanh")
    u, quantum = Wide(info.eps) / 2, Wide(info.tiny if logistic else info.smallest_subnormal)
    if name in ("identity", "relu"):
        return 0 * expected.value, 0 * expected.value
    size = np.abs(z.astype(Wide))
    exponent = np.maximum(np.frexp(expected.value)[1], info.minexp + 1)
    ulp = np.ldexp(Wide(info.eps), exponent - 1)
    value = 4 * ulp + 2 * u * size * np.abs(expected.slope) + quantum * (1 + size)
    slope = 8 * u * expected.sizes + 2 * u * expected.moved + quantum * expected.tail_factor
    return value, slope


def assert_within(name, what, z, actual, expected, bound):
    """Assert that actual is within the bound of expected, and return the worst as a part of it."""
    error = np.abs(actual.astype(Wide) - expected)
    bad = ~(error <= bound)  # NaN is bad too
    if bad.any():
        i = int(np.argmax(np.where(np.isnan(error), np.inf, error / np.maximum(bound, 1e-4900))))
        raise AssertionError(
            f"{name} {what} at {z[i]!r}: {actual[i]!r}, not {expected[i]!r} within {bound[i]!r}"
        )
    return float(np.max(error / np.where(bound > 0, bound, 1)))
