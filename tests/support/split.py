# SPDX-License-Identifier: MIT
"""Norms of rows that are cut into parts, as several devices have them, and their checks.

Rows are cut along the last axis, each group in the same way. The results of all parts are put
together and checked against the oracle for whole rows, with the bounds of norms that are not cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

import cunorm
from cunorm import Moments, NormForward, NormGrads, Statistics, Sums, reference
from tests.support.bounds import check_backward, check_forward
from tests.support.gpu_arrays import OnNumpy
from tests.support.operands import DTYPES, Array

PARAMETERS = ("weight", "bias", "gate")
OF_ROWS = ("axis", "groups", "gate_activation", "gate_position")
DEFAULTS: dict[str, Any] = {
    **{"x": "float32", "weight": "float32", "bias": "float32", "residual": None, "stream": None},
    **{"dy": "float32", "d_residual": None, "gate": None, "gate_shape": None, "own": ()},
    **{"rows": (5,), "sizes": (13, 1, 20), "mean": 0.0, "apart": 0.0, "deviation": 1.0},
    **{"c": None, "center": True, "eps": 1e-5, "axis": -1, "groups": 1, "weight_offset": 0.0},
    **{"round_before_weight": False, "gate_activation": "silu", "gate_position": "post"},
    **{"seed": 0, "needs": ("x", "weight", "bias", "gate")},
}


class Parts(NamedTuple):
    """The sizes into which the last axis, or each group of it, is cut."""

    sizes: tuple[int, ...]
    groups: int = 1

    def cut(self, array: Array | None) -> list[Any]:
        """Return the parts of an array: views, if rows have one group."""
        if array is None:
            return [None] * len(self.sizes)
        ends = np.cumsum(self.sizes)[:-1]
        if self.groups == 1:
            return np.split(array, ends, axis=-1)
        grouped = array.reshape(*array.shape[:-1], self.groups, -1)
        found = np.split(grouped, ends, axis=-1)
        return [part.reshape(*array.shape[:-1], -1).copy() for part in found]

    def join(self, parts: Sequence[Any]) -> Any:
        """Return the array of which these are the parts; None if they are None."""
        if parts[0] is None:
            return None
        if self.groups > 1:
            parts = [part.reshape(*part.shape[:-1], self.groups, -1) for part in parts]
        joined = np.concatenate(parts, axis=-1)
        return joined.reshape(*joined.shape[:-2], -1) if self.groups > 1 else joined


def stacked(moments: Sequence[Moments[Any]], put: Callable[[Array], Any]) -> Moments[Any]:
    """Return the moments of all parts, NumPy arrays, on a new first axis; counts are an array."""
    m2, mean, correction = (
        None if getattr(moments[0], name) is None else np.stack([getattr(m, name) for m in moments])
        for name in ("m2", "mean", "correction")
    )
    count = np.array([one.count for one in moments], m2.dtype)
    arrays = (None if one is None else put(one) for one in (mean, m2, count, correction))
    return Moments(*arrays)


def added(sums: Sequence[Sums[Any]]) -> Sums[Any]:
    """Return the sums over whole rows: NumPy arrays, added in the order of the parts."""
    found = (None if one[0] is None else reduce(np.add, one) for one in zip(*sums, strict=True))
    return Sums(*found)


class SplitCall:
    """A norm of rows that are cut into parts: the operands, drawn for a case."""

    def __init__(self, case: Mapping[str, Any], on: Any = None) -> None:
        self.case, self.on = DEFAULTS | case, on or OnNumpy()
        self.options = {n: self.case[n] for n in ("c", "center", "eps", "weight_offset", *OF_ROWS)}
        self.options["round_before_weight"] = self.case["round_before_weight"]
        self.parts = Parts(self.case["sizes"], self.case["groups"])
        self.count = sum(self.case["sizes"])
        if self.case["axis"] != -1:
            self.count *= self.case["rows"][-1]
        self.arrays = self._draw(np.random.default_rng(self.case["seed"]))
        if self.arrays["gate"] is None:
            self.options |= {"gate_activation": "silu", "gate_position": "post"}
        self.is_branch = self.options["gate_position"] == "branch"

    def _draw(self, rng: np.random.Generator) -> dict[str, Array | None]:
        case, width = self.case, self.case["groups"] * sum(self.case["sizes"])
        shape, row = (*case["rows"], width), (width,)
        if case["axis"] != -1:
            row = shape[case["axis"] :]
        shapes = {"weight": (*case["own"], *row), "bias": (*case["own"], *row)}
        shapes["gate"] = case["gate_shape"] or shape

        def draw(name: str) -> Array | None:
            if case[name] is None:
                return None
            values = rng.standard_normal(shapes.get(name, shape))
            if name in ("x", "residual"):
                means = self.parts.join(
                    [
                        np.full((*shape[:-1], case["groups"] * size), part * case["apart"])
                        for part, size in enumerate(case["sizes"])
                    ]
                )
                values = case["mean"] + means + case["deviation"] * values
            return (values + (name == "weight")).astype(DTYPES[case[name]])

        names = ("x", "weight", "bias", "residual", "dy", "d_residual", "gate")
        return {name: draw(name) for name in names}

    # Each of these calls a function for each part, or for all; arrays are NumPy's.

    def _put(self, array: Any) -> Any:
        return None if array is None else self.on.put(array)

    def _get(self, result: Any) -> Any:
        arrays = (a if a is None or isinstance(a, int) else self.on.get(a) for a in result)
        return type(result)(*arrays)

    def _of_parts(self, *names: str) -> list[dict[str, Any]]:
        cut = {name: self.parts.cut(self.arrays[name]) for name in names}
        return [
            {name: self._put(cut[name][i]) for name in names} for i in range(len(self.parts[0]))
        ]

    def moments(self) -> list[Moments[Any]]:
        """Return the moments of each part."""
        options = {name: self.options[name] for name in ("center", *OF_ROWS)}
        is_read = options["gate_position"] != "post"
        if not is_read:
            options |= {"gate_position": "pre", "gate_activation": "silu"}
        if self.case["stream"]:
            options["residual_dtype"] = self.case["stream"]
        names = ("x", "residual", *["gate"] * is_read)
        parts = self._of_parts(*names)
        return [self._get(cunorm.row_moments(**part, **options)) for part in parts]

    def statistics(self, moments: Sequence[Moments[Any]]) -> Statistics[Any]:
        given = stacked(moments, self.on.put)
        return self._get(cunorm.combine_moments(given, eps=self.case["eps"]))

    def forward(self) -> tuple[NormForward[Any], Statistics[Any]]:
        """Return y, the stream and the statistics."""
        moments = self.moments()
        found = self.statistics(moments)
        stream = self.parts.join([one.residual for one in moments])
        self.stream = self.arrays["x"] if stream is None else stream
        options = dict(self.options)
        names = ["weight", "bias", *["gate"] * (not self.is_branch)]
        if self.is_branch:
            options |= {"gate_activation": "silu", "gate_position": "post"}
        given = {name: self._put(array) for name, array in found._asdict().items()}
        xs = self.parts.cut(self.stream)
        y = [
            self.on.get(
                cunorm.normalize(
                    self._put(x), **part, **given, **options, count=self.count, dtype=self.case["x"]
                )
            )
            for x, part in zip(xs, self._of_parts(*names), strict=True)
        ]
        return NormForward(self.parts.join(y), stream, found.mean, found.rstd), found

    def sums(self, found: Statistics[Any]) -> list[Sums[Any]]:
        """Return the sums of each part."""
        kept = ("center", "weight_offset", *OF_ROWS)
        options = {name: self.options[name] for name in kept}
        names = ["dy", "weight", *["gate"] * (not self.is_branch)]
        if self.is_branch:
            options |= {"gate_activation": "silu", "gate_position": "post"}
        given = {name: self._put(array) for name, array in found._asdict().items()}
        return [
            self._get(cunorm.normalize_backward_sums(x=self._put(x), **part, **given, **options))
            for x, part in zip(self.parts.cut(self.stream), self._of_parts(*names), strict=True)
        ]

    def gradients(self, found: Statistics[Any], sums: Sums[Any], **more: Any) -> list[Any]:
        """Return the gradients of each part."""
        options = {n: v for n, v in self.options.items() if n != "eps"}
        names = ("dy", "weight", "bias", "gate", "d_residual")
        given = {name: self._put(array) for name, array in found._asdict().items()}
        given |= {"sums": Sums(*map(self._put, sums)), "count": self.count}
        given |= {"x_dtype": self.case["x"], "needs": self.case["needs"]} | more
        branches = self.parts.cut(self.arrays["x"] if self.is_branch else None)
        xs, parts = self.parts.cut(self.stream), self._of_parts(*names)
        return [
            self._get(
                cunorm.normalize_backward(
                    x=self._put(x), branch=self._put(branch), **part, **given, **options
                )
            )
            for x, branch, part in zip(xs, branches, parts, strict=True)
        ]

    def backward(self, found: Statistics[Any]) -> NormGrads[Any]:
        grads = self.gradients(found, added(self.sums(found)))
        return NormGrads(*map(self.parts.join, zip(*grads, strict=True)))

    def check(self) -> tuple[NormForward[Any], NormGrads[Any]]:
        """Run both directions, check them against their bounds, and return their results."""
        f, found = self.check_forward()
        return f, self.check_backward(found)

    def check_forward(self) -> tuple[NormForward[Any], Statistics[Any]]:
        f, found = self.forward()
        dtype = self.case["stream"] and DTYPES[self.case["stream"]]
        names = ("x", "residual", *PARAMETERS)
        given = {name: self.arrays[name] for name in names} | self.options
        check_forward(f, **given, residual_dtype=dtype)
        self._check_mean(found)
        return f, found

    def check_backward(self, found: Statistics[Any]) -> NormGrads[Any]:
        grads = self.backward(found)
        given = {name: self.arrays[name] for name in ("dy", "d_residual", *PARAMETERS)}
        x = self.arrays["x"]
        branch = {"branch": x} if self.is_branch else {}
        check_backward(grads, x=self.stream, x_dtype=x.dtype, **branch, **given, **self.options)
        return grads

    def exact(self) -> Statistics[Any]:
        """Return the statistics, rounded, of rows that are x: no group, pre-gate or residual."""
        self.stream, dtype = self.arrays["x"], "f8" if self.case["x"] == "float64" else "f4"
        x, eps = self.stream.astype(np.float64), self.case["eps"]
        if not self.case["center"]:
            return Statistics(None, (1 / np.sqrt((x * x).mean(-1) + eps)).astype(dtype))
        mean = x.mean(-1).astype(dtype)
        q = x - mean[..., None]
        correction = q.mean(-1)
        rstd = 1 / np.sqrt(((q - correction[..., None]) ** 2).mean(-1) + eps)
        return Statistics(mean, rstd.astype(dtype), correction.astype(dtype))

    def _check_mean(self, found: Statistics[Any]) -> None:
        """Check mean + correction: about 48 bits of p, and 4 u of its standard deviation.

        A pre-gate has an error of its own, which changes the mean.
        """
        if found.mean is None or self.options["gate_position"] == "pre":
            return
        options = {name: self.options[name] for name in ("center", "axis", "groups")}
        exact = reference.row_moments(self.stream, **options)
        mean = found.mean.astype(np.float64) + found.correction.astype(np.float64)
        u = float(np.finfo(found.rstd.dtype).eps) / 2
        spread = 1 / found.rstd.astype(np.float64)
        bound = 4 * u * spread + np.maximum(u * u, 2.0**-52) * np.abs(exact.mean)
        assert (np.abs(mean - exact.mean) <= bound).all(), "mean + correction"
