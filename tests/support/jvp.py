# SPDX-License-Identifier: MIT
"""Tangents of row norms, drawn for a case, and their checks against the oracle.

With the names of `cunorm.normalize_jvp` and u for half an ulp of the compute type at 1, the error
of a tangent before its store is at most 4 u times the largest element in its row of

    |g(gate)| * (k * rstd * |w| * (|p'| + |r| * mean|r * p'| + mean|p'|) + |k * r * weight'|)
    + |g(gate) * bias'| + |n * g'(gate) * gate'|

and three times that with a pre-gate, whose own error changes p, r and p'. The error of a backward's
derivative is at most 2 u times the same of rstd**2 times

    mean|r * dr| * (|x'| + mean|x'|) + mean|r * x'| * (|dr| + mean|dr|)
    + |r| * (mean|dr * x'| + 3 * mean|r * dr| * mean|r * x'| + mean|dr| * mean|x'|)

Rows of more than 16,384 elements may have twice the error; so has float64, because the oracle
rounds, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

import cunorm
from cunorm import reference
from tests.support.gate_bounds import count, gate_of
from tests.support.gpu_arrays import OnNumpy
from tests.support.internals import ROW_SECOND, dispatch, jvp_scalars, normalize_backward_jvp
from tests.support.operands import DTYPES, Array
from tests.support.ulps import assert_within, narrows, rounding, unit

OPERANDS = ("x", "weight", "bias", "gate")
DEFAULTS: dict[str, Any] = {
    **{"x": "float32", "weight": "float32", "bias": "float32", "gate": None, "dy": "float32"},
    **{"tangents": OPERANDS, "tangent": None, "shape": (5, 34), "mean": 0.0, "deviation": 1.0},
    **{"c": None, "center": True, "axis": -1, "groups": 1, "weight_offset": 0.0, "own": ()},
    **{"round_before_weight": False, "gate_activation": "silu", "gate_position": "post"},
    **{"eps": 1e-5, "seed": 0, "dtype": None},
}
OPTIONS = ("c", "center", "axis", "groups", "weight_offset", "round_before_weight")


class JvpCall:
    """A call of `normalize_jvp`, and of the derivative of `normalize_backward`."""

    def __init__(self, case: Mapping[str, Any], on: Any = None) -> None:
        self.case, self.on = DEFAULTS | case, on or OnNumpy()
        case, rng = self.case, np.random.default_rng(self.case["seed"])
        self.options = {name: case[name] for name in OPTIONS}
        if case["gate"] is not None:
            self.options |= {name: case[name] for name in ("gate_activation", "gate_position")}
        self.is_pre = case["gate"] is not None and case["gate_position"] == "pre"
        row = (*case["own"], *case["shape"][case["axis"] :])
        shapes = {"weight": row, "bias": row}

        def draw(name: str, dtype: str | None) -> Array | None:
            if dtype is None:
                return None
            values = rng.standard_normal(shapes.get(name, case["shape"]))
            return np.asarray(values).astype(DTYPES[dtype])

        self.operands = {name: draw(name, case[name]) for name in OPERANDS}
        x = case["mean"] + case["deviation"] * self.operands["x"].astype(np.float64)
        self.operands["x"] = x.astype(DTYPES[case["x"]])
        self.dy = draw("dy", case["dy"])
        has = {name: case[name] if name in case["tangents"] else None for name in OPERANDS}
        self.tangents = {
            f"{name}_tangent": draw(name, dtype and (case["tangent"] or dtype))
            for name, dtype in has.items()
        }
        self.compute = "float64" if case["x"] == "float64" else "float32"
        self.statistics = self._statistics(**self.operands, **self.options)

    def _statistics(self, x: Array, **options: Any) -> dict[str, Array | None]:
        f = reference.normalize_forward(x, eps=self.case["eps"], **options)
        found = {"mean": f.mean, "rstd": f.rstd}
        return {n: None if one is None else one.astype(self.compute) for n, one in found.items()}

    def _put(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        return {name: None if a is None else self.on.put(a) for name, a in arrays.items()}

    def jvp(self, **more: Any) -> Array:
        """Return what `normalize_jvp` returns."""
        arrays = self._put(self.operands | self.tangents | self.statistics)
        dtype = {} if self.case["dtype"] is None else {"dtype": self.case["dtype"]}
        return self.on.get(cunorm.normalize_jvp(**arrays, **self.options, **dtype, **more))

    def second(self) -> Array:
        """Return the derivative of the dx of `normalize_backward`, without a gate."""
        names = ("axis", "groups", "weight_offset")
        c, center = self.options["c"], self.options["center"]
        options = (*map(self.options.get, names), False, "silu", "post")
        key = None if c is None else (c, float)
        scalars = jvp_scalars("second", options, center=center, c=key)
        arrays = self._put(self._of_second())
        inputs = [*map(arrays.get, ROW_SECOND.inputs), None, None]
        return self.on.get(dispatch(ROW_SECOND, scalars, tuple(inputs))[0])

    def _of_second(self) -> dict[str, Any]:
        x, options = self.operands["x"], {n: self.options[n] for n in ("center", "axis", "groups")}
        given = {"dy": self.dy, "x": x, "weight": self.operands["weight"]}
        given |= {"x_tangent": self.tangents["x_tangent"]}
        return given | self._statistics(x, **options)

    def check(self) -> tuple[float, float]:
        """Check both; return the worst errors in units of their bounds."""
        worst = self.check_jvp(self.jvp()), 0.0
        if self.tangents["x_tangent"] is None or self.dy is None:
            return worst
        return worst[0], self.check_second(self.second())

    @np.errstate(all="ignore")
    def check_jvp(self, got: Array) -> float:
        given = self.operands | self.tangents | self.statistics
        exact = reference.normalize_jvp(**given, **self.options)
        error = self._error(self._terms(), 12 if self.is_pre else 4) + self._more()
        return self._assert_within(got, exact, error)

    @np.errstate(all="ignore")
    def check_second(self, got: Array) -> float:
        given = self._of_second()
        options = {name: one for name, one in self.options.items() if name in OPTIONS[:-1]}
        exact = normalize_backward_jvp(**given, **options)
        r, rstd = self._r(given["x"], given)
        k, v = self._k(), self._rows(given["x_tangent"])
        dr = k * self._rows(self._times_weight(given["dy"].astype(np.float64)))
        a, b, of_a, of_b = mean(r * dr), mean(r * v), mean(dr), mean(v)
        terms = a * (np.abs(v) + of_b) + b * (np.abs(dr) + of_a)
        terms += np.abs(r) * (mean(dr * v) + 3 * a * b + of_a * of_b)
        error = self._error((rstd**2 * terms).reshape(exact.shape), 2)
        return self._assert_within(got, exact, error)

    def _assert_within(self, got: Array, exact: Array, error: Array) -> float:
        stored = rounding(np.abs(exact) + error, str(got.dtype), self.compute)
        return assert_within(got, exact, error + stored)

    def _error(self, terms: Array, base: int) -> Array:
        """Return the bound: so many u times the largest term of each row."""
        rows = self._rows(terms)
        largest = np.broadcast_to(rows.max(axis=-1, keepdims=True), rows.shape)
        ulps = count(base, self.compute, rows.shape[-1])
        return ulps * unit(self.compute) * largest.reshape(terms.shape)

    def _rows(self, array: Array) -> Array:
        shape, axis, groups = (self.case[name] for name in ("shape", "axis", "groups"))
        rows, width = math.prod(shape[:axis]), math.prod(shape[axis:]) // groups
        return array.astype(np.float64).reshape(rows, groups, width)

    def _k(self) -> float:
        c, width = self.options["c"], self._rows(self.operands["x"]).shape[-1]
        return 1.0 if c is None else c / math.sqrt(width)

    def _r(self, p: Array, statistics: Mapping[str, Any]) -> tuple[Array, Array]:
        rows, rstd = self._rows(p), self._rows_of(statistics["rstd"])
        if self.options["center"]:
            rows = rows - rows.mean(axis=-1, keepdims=True)
            rows = rows - rows.mean(axis=-1, keepdims=True)
        return rows * rstd, rstd

    def _rows_of(self, statistic: Array) -> Array:
        return statistic.astype(np.float64).reshape(*self._rows(self.operands["x"]).shape[:2], 1)

    def _times_weight(self, values: Array) -> Array:
        weight = self.operands["weight"]
        offset = self.options["weight_offset"]
        return values if weight is None else values * (weight.astype(np.float64) + offset)

    def _gate(self) -> Any:
        gate = self.operands["gate"]
        names = (self.case["gate_activation"], self.case["gate"], self.compute)
        return None if gate is None else gate_of(gate.astype(np.float64), *names)

    def _parts(self) -> tuple[Array, Array, Array, Array, Array]:
        """Return k * r, p', the magnitude of n', n, and gate', in x's shape."""
        x, shape = self.operands["x"].astype(np.float64), self.case["shape"]
        wide = {n: 0.0 if a is None else a.astype(np.float64) for n, a in self.tangents.items()}
        gate, p, v = self._gate(), x, wide["x_tangent"] + np.zeros(shape)
        if self.is_pre:
            p, v = x * gate.value, np.abs(v * gate.value)
            v = v + np.abs(x * gate.slope * wide["gate_tangent"])
        r, rstd = self._r(p, self.statistics)
        rows = np.abs(self._rows(v))
        of_r = rstd * (rows + np.abs(r) * mean(r * rows) + mean(rows))
        k_r = (self._k() * r).reshape(shape)
        of_n = np.abs(self._times_weight(self._k() * of_r.reshape(shape)))
        of_n = of_n + np.abs(k_r * wide["weight_tangent"]) + np.abs(wide["bias_tangent"])
        bias = self.operands["bias"]
        n = np.abs(self._times_weight(k_r)) + (0.0 if bias is None else np.abs(bias.astype(float)))
        return k_r, v, of_n, n, wide["gate_tangent"] + np.zeros(shape)

    def _terms(self) -> Array:
        _, _, of_n, n, of_gate = self._parts()
        gate = self._gate()
        if gate is None or self.is_pre:
            return of_n
        return of_n * np.abs(gate.value) + n * np.abs(gate.slope * of_gate)

    def _more(self) -> Array:
        """Return the errors of a gate, and of roundings of k * r next to a tie."""
        (k_r, _, of_n, n, of_gate), gate = self._parts(), self._gate()
        more = np.zeros(k_r.shape)
        if gate is not None and not self.is_pre:
            more = of_n * gate.value_error + n * gate.slope_error * np.abs(of_gate)
        elif gate is not None:  # the errors of p and p', as if rows had one element each
            more = 24 * self._error(of_n, 1)
        if self.options["round_before_weight"] and narrows(self.case["x"], self.compute):
            error = 8 * unit(self.compute) * np.abs(k_r).max()
            dtype = DTYPES[self.case["x"]]
            low, high = (reference.round_to(k_r + e, dtype).astype(float) for e in (-error, error))
            factor = self.tangents["weight_tangent"]
            factor = 0.0 if factor is None else np.abs(factor.astype(float))
            if gate is not None and not self.is_pre:
                slope = np.abs(gate.slope * of_gate)
                factor = factor * np.abs(gate.value) + np.abs(self._times_weight(slope))
            more = more + (high - low) * factor
        return more


def mean(rows: Array) -> Array:
    return np.abs(rows).mean(axis=-1, keepdims=True)
