# SPDX-License-Identifier: MIT
"""Calls of the oracle in float64: read-only operands, forward and backward."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from cunorm import reference

ROWS = ("x", "residual", "dy", "d_residual", "gate")


def operands(shape=(5, 8), parameter=None, dtype=np.float64, seed=0) -> SimpleNamespace:
    """Draw the operands of a norm; weight and bias have the last axis, or the shape `parameter`."""
    rng = np.random.default_rng(seed)
    arrays = {name: rng.standard_normal(shape) for name in ROWS}
    parameter = shape[-1:] if parameter is None else parameter
    arrays |= {name: rng.standard_normal(parameter) for name in ("weight", "bias")}
    arrays["gate"] *= 2
    arrays = {name: array.astype(dtype) for name, array in arrays.items()}
    for array in arrays.values():
        array.flags.writeable = False
    return SimpleNamespace(**arrays)


def row_norm(
    a, given=("weight", "bias"), *, eps=1e-6, needs=("x", "weight", "bias", "gate"), **options
) -> tuple[Any, Any]:
    """Run both directions; `given` names operands out of residual, weight, bias and gate."""
    arrays = {name: getattr(a, name) for name in given}
    residual = arrays.pop("residual", None)
    f = reference.normalize_forward(a.x, residual=residual, eps=eps, **arrays, **options)
    saved = {"rstd": f.rstd, "mean": f.mean, "x_dtype": a.x.dtype, "needs": needs}
    saved |= {"d_residual": None if residual is None else a.d_residual}
    stream = a.x if residual is None else f.residual
    return f, reference.normalize_backward(a.dy, stream, **saved, **arrays, **options)


def group_norm(
    a, groups, given=("weight", "bias"), *, eps=1e-5, needs=("x", "weight", "bias"), **options
):
    """Run both directions of a group norm."""
    options |= {name: getattr(a, name) for name in given}
    f = reference.group_norm_forward(a.x, groups, eps=eps, **options)
    options |= {"mean": f.mean, "rstd": f.rstd, "needs": needs}
    return f, reference.group_norm_backward(a.dy, a.x, groups, **options)
