# SPDX-License-Identifier: MIT
"""The largest error of a norm that is computed in float32 and rounded once, on the store.

The bounds hold for finite operands of at most 32 bits whose squares do not overflow. The docstring
of `cunorm.normalize_backward` defines n, r, k, dn, dr and dp; a group norm's rows are the groups of
its samples. u is 2**-24; many is 2 for rows of more than 16384 elements, else 1. The errors are:

- n: 4 * many ulp of the row's largest n or k * r * weight. rstd: 8 * many * u * rstd. mean: one ulp
  of the mean, plus 4 * many * u / rstd.
- dx: 8 * many ulp of the row's largest rstd * dr, rstd * r * mean(r * dr), rstd * mean(dr) or
  d_residual. (These terms may cancel. With a pre-gate, dp has this error, without d_residual.)
- dweight and dbias: 8 * u times the sum of their summands' magnitudes. With center, each summand of
  dweight adds 2 * u * abs(k * dn), because r has a rounded correction of the mean.

The errors of earlier steps are added to first order; only `_apply` and `_rounded` compute a result
anew for arguments that are off by their error. Further errors are:

- An activation with an exponential: 4 ulp. Its derivative: 8 * u times the sum of its summands'
  magnitudes. Each also has 3 * u of its magnitude, for the product that it is a factor of, and an
  error that `_apply` adds for the argument of the exponential.
- The backward of a group norm takes the activation's derivative at an n with the rounded mean.
- Below `LOST`, the smallest normal number, a CPU has fewer digits and CUDA has zero, so every
  input, sum and product may be off by `LOST`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

import numpy as np

from cunorm.reference.activations import ACTIVATIONS, TAILS
from cunorm.reference.rows import Array, round_to, sum_to

U = 2.0**-24
LOST = 2.0**-126
_FORMATS = {  # digits, and the lowest exponent of a normal number
    **{"float16": (11, -14), "bfloat16": (8, -126), "float32": (24, -126)},
    "float8_e4m3fn": (4, -6),
}
_ROW = (-4, -2, -1)  # the axes of `Tolerance.shape` that make up a row


@dataclass(frozen=True)
class Number:
    """Exact values, and the largest error of each; `LOST` is the error of an input."""

    value: Any
    error: Any = LOST

    def __add__(self, other: "Number") -> "Number":
        return Number(self.value + other.value, self.error + other.error + LOST)

    def __mul__(self, other: "Number") -> "Number":
        if other is ONE:
            return self
        error = abs(self.value) * other.error + self.error * abs(other.value)
        return Number(self.value * other.value, error + LOST)

    def __neg__(self) -> "Number":
        return Number(-self.value, self.error)

    def mean(self) -> "Number":
        """Return the mean of each row."""
        return Number(_mean(self.value), _mean(np.broadcast_to(self.error, self.value.shape)))


ONE = Number(1.0, 0.0)


class Tolerance:
    """The exact rows of a norm, and the largest errors of its float32 results."""

    def __init__(
        self,
        operands: Mapping[str, Any],
        options: Mapping[str, Any],
        eps: float,
        exact: Any,
        stream: Array | None = None,
    ) -> None:
        """Take operands and options of a call, and the exact results of its forward for training.

        The options are those that forward and backward have in common. For `l2_norm`, c and eps are
        those of the `normalize` that equals it. With a gate on the branch, `stream` is what the
        call returned, and `exact` is from `exact_of_stream`.
        """
        x = operands["x"]
        if stream is None:
            stream = exact.residual if "residual" in operands else x
        self._set_shape(x, options)
        self.center, self.activation = exact.mean is not None, options.get("activation")
        self.s, self.branch = self._rows(stream), self._rows(x)
        d, c = math.prod(self.s.value.shape[axis] for axis in _ROW), options.get("c")
        self.k = ONE if c is None else Number(c / math.sqrt(d), 0.0)
        self.many = 2 if d > 16384 else 1
        self._set_gate(operands, options)

        p = self.s * self.before
        q = p + -p.mean() if self.center else p
        rstd = 1 / np.sqrt(_mean(q.value**2) + eps)
        self.rstd = Number(rstd, rstd**3 * _mean(abs(q.value) * q.error))
        self.mean = p.mean().value
        self.mean_error = p.mean().error + ulp(self.mean) + 4 * self.many * U / rstd
        self.r = q * self.rstd
        self.kr = self.r * self.k
        if options.get("round_before_weight"):
            self.kr = self._rounded(self.kr, x.dtype)
        self._set_n(operands, options)

    def forward(self) -> dict[str, Array]:
        """Return the error of each result, before the store."""
        y = self.n if self.activation is None else _apply(self.activation, 0, self.n)
        rstd = self.rstd.error + 8 * self.many * U * self.rstd.value
        errors = {"y": (y * self.after).error, "mean": self.mean_error, "rstd": rstd}
        return errors | {"residual": self.stream_error}

    def backward(self, dy: Array, d_residual: Array | None = None) -> dict[str, Array]:
        """Return the error of each gradient, before the store."""
        dn, rstd, r, kr = self._rows(dy), self.rstd, self.r, self.kr
        dgate = dn * self.n
        if self.activation is not None:
            shift = abs(self.w.value) * rstd.value * 0.5 * ulp(self.mean)
            n_error = np.where(self.w.value == 0, 0.0, self.n.error + shift)
            dn = dn * _apply(self.activation, 1, Number(self.n.value, n_error))
        dn = dn * self.after
        dr = dn * self.w * self.k
        terms = [rstd * dr, -(rstd * r * (r * dr).mean()), *[-(rstd * dr.mean())] * self.center]
        above = [] if d_residual is None else [self._rows(d_residual)]
        dp, ds = (reduce(add, t) + self._ulps(8, *t) for t in (terms, terms + above))
        if self.position == "pre":
            dgate, ds = dp * self.s, reduce(add, [dp * self.before, *above])
            ds = Number(ds.value, ds.error + U * abs(ds.value))
        product, size = dn * kr, 8 * U * abs(dn.value)
        weighted = size * (abs(kr.value) + 0.25 * self.center * abs(self.k.value))
        sums = {
            "dweight": Number(product.value, product.error + weighted),
            "dbias": Number(dn.value, dn.error + size),
        }
        errors = {
            f"d{name}": _sum(sums[f"d{name}"], parameter).error
            for name, parameter in self.parameters.items()
        }
        errors["dx"], errors["dresidual"] = (ds * self.of_branch).error, ds.error
        if self.position == "branch":
            product = ds * self.branch
            own = 8 * U * abs(product.value)
            dgate = _sum(Number(product.value, product.error + own), self.of_branch)
        return errors if self.slope is None else errors | {"dgate": (self.slope * dgate).error}

    def _set_shape(self, x: Array, options: Mapping[str, Any]) -> None:
        """Set the shape of rows: samples, positions (channels last), groups, channels, positions.

        Channels are those of a group; the last positions are those of channels first. In a row norm
        each row is a sample, and samples may have several axes.
        """
        axis, groups = (
            options.get("channel_axis", options.get("axis", -1)),
            options.get("groups", 1),
        )
        if "num_groups" in options:
            before, after = (1, -1) if axis % x.ndim == 1 else (-1, 1)
            groups, self.row_axes = options["num_groups"], 1
            self.shape = (len(x), before, groups, x.shape[axis] // groups, after)
        else:
            row = x.shape[axis:]
            self.row_axes = len(row)
            self.shape = (*x.shape[:axis], 1, groups, math.prod(row) // groups, 1)

    def _set_gate(self, operands: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        """Set the gate's factors of the branch, before the norm and after it, and the stream."""
        factors: dict[str | None, Number] = {}
        self.position, self.slope = None, None
        if operands.get("gate") is not None:
            self.position = options.get("gate_position", "post")
            name, gate = options.get("gate_activation", "silu"), self._parameter(operands["gate"])
            factors[self.position], self.slope = (_apply(name, order, gate) for order in (0, 1))
        self.of_branch, self.before, self.after = (
            factors.get(position, ONE) for position in ("branch", "pre", "post")
        )
        self.stream_error = np.full(self.s.value.shape, LOST)
        if self.position == "branch":
            g, residual = self.of_branch, operands.get("residual")
            g = Number(g.value, g.error - 3 * U * abs(g.value))  # fma does not round the product
            s = self.branch * g if residual is None else self.branch * g + self._rows(residual)
            self.stream_error = s.error + 0.5 * ulp(s.value)

    def _set_n(self, operands: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        """Set weight, bias and n."""
        self.parameters = {
            name: self._parameter(operands[name])
            for name in ("weight", "bias")
            if operands.get(name) is not None
        }
        weight, bias = (self.parameters.get(name) for name in ("weight", "bias"))
        self.w = ONE if weight is None else Number(weight.value + options.get("weight_offset", 0.0))
        product = self.kr * self.w
        n = product if bias is None else product + bias
        self.n = n + self._ulps(4, n, product)

    def _rounded(self, kr: Number, dtype: Any) -> Number:
        """Round k * r to a dtype; where its error reaches a tie, allow both sides of the tie."""
        if dtype.itemsize >= 4:
            return kr
        error = kr.error + self._ulps(4, kr).error
        ends = (round_to(kr.value + i * error, dtype) for i in (-1, 0, 1))
        low, exact, high = (end.astype(np.float64) for end in ends)
        return Number(exact, np.maximum(exact - low, high - exact) + LOST)

    def _ulps(self, count: int, *terms: Number) -> Number:
        """Return an error of `count` ulps of the largest term of each row."""
        largest = (np.max(abs(term.value), axis=_ROW, keepdims=True) for term in terms)
        return Number(0.0, count * self.many * ulp(reduce(np.maximum, largest)))

    def _rows(self, x: Array) -> Number:
        return Number(x.astype(np.float64).reshape(self.shape))

    def _parameter(self, array: Array) -> Number:
        """Return weight, bias or gate in a shape that broadcasts to the rows."""
        lead, row = array.shape[: -self.row_axes], array.shape[-self.row_axes :]
        shape = (1, *self.shape[-3:-1], 1) if math.prod(row) > 1 else (1, 1, 1, 1)
        return Number(array.astype(np.float64).reshape(*lead, *shape))


def exact_of_stream(
    forward: Callable[[Mapping[str, Any]], Any],
    operands: Mapping[str, Any],
    activation: str,
    stream: Array,
) -> Any:
    """Return the exact results of a forward with a gate on the branch, which returned `stream`.

    y and the statistics are those of the norm of `stream`; the exact stream is not rounded.
    `forward` computes the exact results from operands.
    """
    x, residual = operands["x"], operands.get("residual")
    given = {name: array for name, array in operands.items() if name != "gate"}
    found = forward(given | {"x": np.zeros_like(x), "residual": stream})  # their sum is the stream
    s = x.astype(np.float64) * ACTIVATIONS[activation].value(operands["gate"].astype(np.float64))
    return found._replace(residual=s if residual is None else s + residual.astype(np.float64))


def bound(exact: Array, error: Array, dtype: str) -> Array:
    """Return the error bound of a result, with half an ulp if storing the result rounds it.

    A float32 result is stored as computed; a new residual stream is rounded by the oracle, too.
    """
    error = error.reshape(exact.shape) + LOST
    is_rounded = exact.dtype == np.float64 and dtype != "float32"
    return np.asarray(error + (0.5 * ulp(abs(exact) + error, dtype) if is_rounded else 0.0))


def worst_error(result: Any, exact: Any, errors: Mapping[str, Array]) -> float:
    """Return the largest error of a result in units of its bound.

    `result` is y, or a named tuple of results, in NumPy or CuPy arrays. An exact value beyond the
    largest of the array's dtype is expected to be stored as an infinity.
    """
    worst, arrays = 0.0, {"y": result} if hasattr(result, "dtype") else result._asdict()
    for name, actual in arrays.items():
        right = getattr(exact, name, None)
        if right is None:
            continue
        if actual is None:
            return math.inf
        got = (actual.get() if hasattr(actual, "get") else actual).astype(np.float64)
        with np.errstate(all="ignore"):
            stored = right.astype(actual.dtype).astype(np.float64)
            expected = np.where(np.isinf(stored), stored, right.astype(np.float64))
            same = (got == expected) | (np.isnan(got) & np.isnan(expected))
            units = abs(got - expected) / bound(right, errors[name], str(actual.dtype))
            units = np.where(same, 0.0, np.where(np.isnan(units), np.inf, units))
        worst = max(worst, float(units.max()))
    return worst


def ulp(values: Array, dtype: str = "float32") -> Array:
    """Return the spacing of a dtype's numbers at each value."""
    digits, lowest = _FORMATS[dtype]
    exponent = np.where(values == 0, lowest, np.maximum(np.frexp(values)[1] - 1, lowest))
    return np.asarray(np.ldexp(1.0, exponent - (digits - 1)))


def _apply(activation: str, order: int, z: Number) -> Number:
    """Return g(z), or g'(z) for order 1.

    For a g with an exponential of a(z), `TAILS` has T and z * a'(z). The rounding of a(z) moves g
    by at most 2 * u * abs(z * T), and g' by at most 2 * u * abs(z * a'(z) * T).
    """
    function = ACTIVATIONS[activation][order]
    value, z_value = function(z.value), np.clip(z.value, -1000.0, 1000.0)
    changes = (abs(function(z.value + i * z.error) - value) for i in (-1, -0.5, 0.5, 1))
    own = 3 * U * abs(value) + LOST * (1 + abs(z_value)) ** 3
    if activation in TAILS:
        tail, sensitivity = (part(z_value) for part in TAILS[activation])
        if order == 0:
            own += 4 * ulp(value) + 2 * U * abs(z_value * tail)
        else:
            own += 8 * U * (abs(value - tail) + abs(tail)) + 2 * U * abs(sensitivity * tail)
    return Number(value, reduce(np.maximum, changes) + own)


def _sum(terms: Number, parameter: Number) -> Number:
    """Sum over the rows that share a parameter, and round once."""
    value, error = (sum_to(part, parameter.value.shape) for part in (terms.value, terms.error))
    return Number(value, error + 0.5 * ulp(value))


def _mean(values: Array) -> Array:
    return np.asarray(values.mean(axis=_ROW, keepdims=True))
