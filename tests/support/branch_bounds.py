# SPDX-License-Identifier: MIT
"""Error bounds of a gate on the branch: the stream s = x * g + residual, dx and dgate.

    dx = ds * g        dgate = g' * (sum of ds * x over the elements that share a gate)

Arrays have the shape of the branch x; the gate broadcasts to it. `row_errors` has the bounds of the
norm of s, which is the stream that the call returned.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cunorm.reference.rows import sum_to
from tests.support.gate_bounds import Gate, count, gate_of
from tests.support.row_errors import Options, product_error
from tests.support.ulps import Array, ulp, unit


class Branch(NamedTuple):
    """A branch and its gate, and the compute type."""

    x: Array | None  # None: dgate is not wanted
    gate: Gate
    compute: str

    def stream(self, residual: Array | None) -> Array:
        """Return s, before it is rounded."""
        product = self.x.astype(np.float64) * self.gate.value
        return product if residual is None else product + residual.astype(np.float64)

    def stream_error(self, residual: Array | None) -> Array:
        """Bound the error of s before the store: that of g, and one rounding by fma.

        The oracle rounds the product, too, which is large relative to s if the sum cancels. As all
        float64 errors, this one is counted twice.
        """
        x, s = self.x.astype(np.float64), self.stream(residual)
        oracle = 2 * 0.5 * ulp(x * self.gate.value, "float64")
        return np.abs(x) * self.gate.value_error + product_error(s, self.compute) + oracle

    def dx_error(self, ds: Array, error: Array) -> Array:
        """Bound the error of dx, whose ds has an error."""
        g = self.gate
        product = product_error(ds * g.value, self.compute)
        return np.abs(g.value) * error + np.abs(ds) * g.value_error + product

    def dgate_error(self, ds: Array, error: Array) -> Array:
        """Bound the error of dgate before the store.

        A sum has 8 u times the sum of its summands' magnitudes, as dweight has. Without a sum, two
        products and a branch of a wider dtype are rounded.
        """
        g, x, compute = self.gate, self.x.astype(np.float64), self.compute
        shape, terms, more = g.value.shape, ds * x, np.abs(x) * error
        if shape != x.shape:
            more = more + count(8, compute) * unit(compute) * np.abs(terms)
        total, more = sum_to(terms, shape), sum_to(more, shape)
        products = 3 * product_error(g.slope * total, compute)
        return np.abs(g.slope) * more + np.abs(total) * g.slope_error + products


def branch_of(x: Array | None, options: Options, compute: str) -> Branch | None:
    """Return the branch, or None if the gate has another position."""
    gate = options.gate
    if gate is None or options.gate_position != "branch":
        return None
    names = options.gate_activation, str(gate.dtype), compute
    return Branch(x, gate_of(gate.astype(np.float64), *names), compute)
