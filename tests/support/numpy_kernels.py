# SPDX-License-Identifier: MIT
"""The norms of `arithmetic` with operands of their own, and what their results are held to."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.support import arithmetic, bounds, group_bounds
from tests.support.operands import DTYPES


class Kernel:
    """A norm done in NumPy: operands by name, what it is told, and what its results are held to."""

    def __init__(self, operands: dict[str, Any], told: dict[str, Any]) -> None:
        self.operands, self.told = operands, told
        self.is_row = "num_groups" not in told

    def forward(self, wrong: str = "", **changed: Any) -> Any:
        given, told = self._given(changed, "x", "weight", "bias", "residual")
        return (arithmetic.forward if self.is_row else arithmetic.group_forward)(
            **given, **told, wrong=wrong
        )

    def backward(self, wrong: str = "", **changed: Any) -> Any:
        given, told = self._given(changed, "dy", "x", "weight", "bias", "d_residual")
        if self.is_row:
            given |= self._stream(changed)
            return arithmetic.backward(**given, **told, wrong=wrong)
        f = self.forward()
        del told["eps"]
        return arithmetic.group_backward(**given, **told, mean=f.mean, rstd=f.rstd, wrong=wrong)

    def check_forward(self, result: Any) -> dict[str, float]:
        given, told = self._given({}, "x", "weight", "bias", "residual")
        of = bounds.of_forward if self.is_row else group_bounds.of_group_forward
        return of(**given, **told).check(result)

    def check_backward(self, result: Any) -> dict[str, float]:
        given, told = self._given({}, "dy", "x", "weight", "bias", "d_residual")
        if self.is_row:
            return bounds.of_backward(**given | self._stream({}), **told).check(result)
        return group_bounds.of_group_backward(**given, **told).check(result)

    def check_both(self) -> dict[str, float]:
        return self.check_forward(self.forward()) | self.check_backward(self.backward())

    def _given(self, changed: dict[str, Any], *names: str) -> tuple[Any, Any]:
        told = self.told | {n: v for n, v in changed.items() if n not in self.operands}
        told.pop("x_dtype", None)
        operands = self.operands | {n: v for n, v in changed.items() if n in self.operands}
        return {name: operands[name] for name in names if name in operands}, told

    def _stream(self, changed: dict[str, Any]) -> dict[str, Any]:
        """Return what is normalised, which a backward reads, and the dtype of the forward's x."""
        x, residual = self.operands["x"], self.operands["residual"]
        given, told = self._given({}, "x", "weight", "bias", "residual")
        stream = x if residual is None else arithmetic.forward(**given, **told).residual
        return {"x": stream, "x_dtype": changed.get("x_dtype", x.dtype)}


def row(dtype="float32", stream=None, rows=60, width=512, mean=0.0, gate=2.0, **told):
    rng = np.random.default_rng(0)
    names = ("x", "residual", "dy", "d_residual", "gate")
    given = {name: rng.standard_normal((rows, width)).astype(DTYPES[dtype]) for name in names}
    for name in ("weight", "bias"):
        given[name] = (1 + rng.standard_normal(width)).astype(DTYPES[dtype])
    for name in ("residual", "d_residual"):
        given[name] = (given[name] + mean * (name == "residual")).astype(DTYPES[stream or dtype])
    told["gate"] = given.pop("gate") * DTYPES[dtype].type(gate) if gate else None
    return Kernel(given, {"eps": 1e-6, **told})


def group(dtype="float32", shape=(4, 10, 6, 8), mean=0.0, spread=1.0, **told):
    """Return a kernel whose n spreads as told."""
    rng, told = np.random.default_rng(0), {"eps": 1e-5, "num_groups": 2, **told}
    channels = shape[told.get("channel_axis", -1)]
    given = {name: rng.standard_normal(shape) for name in ("x", "dy")}
    given["x"] = given["x"] + mean
    given |= {name: spread * (0.5 + rng.standard_normal(channels)) for name in ("weight", "bias")}
    return Kernel({name: v.astype(DTYPES[dtype]) for name, v in given.items()}, told)
