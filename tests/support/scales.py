# SPDX-License-Identifier: MIT
"""Checks of the roundings of rstd and of k * rstd, with rows that cause no other rounding."""

import math

import numpy as np

from tests.support.operands import assert_same_bits, at
from tests.support.ulps import ulp


def check_scales(forward, rows):
    """Check `forward(x, c)` with eps = 0: the error of rstd is hardly above half an ulp.

    A row is (1, b) with an integer b: the sum of squares is exact in any order, and the first y is
    k * rstd, where k = c / sqrt(2). The rounding of rstd changes this product by at most one ulp,
    and so does that of k. The product is rounded, too, so its error is at most 2.5 ulps.
    """
    b = np.arange(1, rows + 1)
    x = np.stack([np.ones(rows), b], axis=1).astype(np.float32)
    rstd = 1 / np.sqrt((1 + b * b) / 2)
    for c in (None, 3.0, 1 / 3, 1e30):
        k = 1.0 if c is None else c / math.sqrt(2)
        result = forward(x, c)
        y_check = (result.y[:, 0], k * rstd, 0.501 if c is None else 2.5)
        for actual, exact, ulps in ((result.rstd, rstd, 0.501), y_check):
            error = np.abs(actual.reshape(-1) - exact) / ulp(exact, "float32")
            with at(c):
                assert error.max() <= ulps


def check_scales_beyond_float32(forward):
    """Check `forward(x, c)`, with eps = 0, against float32 arithmetic with k = c / sqrt(2)."""
    for c in (1e40, -1e40, 1e-50, -1e-50, 0.0, -0.0):
        x = np.array([[1, 2], [-3, 4], [3e38, 3e38], [0, 0]], np.float32)
        with np.errstate(all="ignore"):
            k = np.float32(c / math.sqrt(2))
            expected = x * (k / np.sqrt(np.square(x).mean(axis=1, keepdims=True)))
        y = forward(x, c).y
        with at(c):
            np.testing.assert_array_equal(y, expected)
            assert (np.signbit(y[:2]) == np.signbit(expected[:2])).all()


def check_backward_rounds_what_the_forward_rounded(forward, backward, rows):
    """Check dweight of dy = 1, which is the backward's rounded k * r, against y of weight 1."""
    rng = np.random.default_rng(11)
    options = {"round_before_weight": True, "groups": rows}
    weight = np.ones(rows * 64, np.float32)
    x = rng.standard_normal((1, rows * 64)).astype(np.float16)
    for c in (None, 3.0, 1 / 3):
        saved = forward(x, weight, c=c, eps=0.0, **options)
        grads = backward(np.ones_like(x), x, weight, rstd=saved.rstd, c=c, **options)
        with at(c):
            assert_same_bits(grads.dweight, saved.y[0].astype(np.float32))
