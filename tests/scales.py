# SPDX-License-Identifier: MIT
"""Whether rstd, and k * rstd, are rounded once, seen in rows whose mean square has no error."""

import math

import numpy as np
from operands import at
from ulps import ulp


def check_scales_are_rounded_once(forward, rows):
    """Hold `forward(x, c)`, with eps = 0, to half an ulp and little more.

    A row is (1, b) with a whole b: the sum of squares is exact in any order, and y of the 1 is
    k * rstd. Rounding root, quotient, k and product one after the other is up to 2.5 ulp.
    """
    b = np.arange(1, rows + 1)
    x = np.stack([np.ones(rows), b], axis=1).astype(np.float32)
    rstd = 1 / np.sqrt((1 + b * b) / 2)
    for c in (None, 3.0, 1 / 3, 1e30):
        k = 1.0 if c is None else c / math.sqrt(2)
        result = forward(x, c)
        for name, actual, exact in (("rstd", result.rstd, rstd), ("y", result.y[:, 0], k * rstd)):
            error = np.abs(actual.reshape(-1) - exact) / ulp(exact, "float32")
            with at(name, c):
                assert error.max() <= 0.501
