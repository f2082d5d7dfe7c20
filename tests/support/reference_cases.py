# SPDX-License-Identifier: MIT
"""Calls of the oracle in float64: read-only operands, forward and backward."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from cunorm import reference

ROWS = ("x", "residual", "dy", "d_residual", "gate")


def operands(shape=(5, 8), parameter=None, dtype=np.float64, seed=0, **shapes) -> SimpleNamespace:
    """Draw the operands of a norm; weight and bias have the last axis, or the shape `parameter`.

    `shapes` has the shapes of other operands, or those of weight and bias where they differ.
    """
    rng = np.random.default_rng(seed)
    arrays = {name: rng.standard_normal(shape) for name in ROWS}
    parameter = shape[-1:] if parameter is None else parameter
    arrays |= {name: rng.standard_normal(parameter) for name in ("weight", "bias")}
    arrays |= {name: rng.standard_normal(other) for name, other in shapes.items()}
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
    stream = a.x if f.residual is None else f.residual
    saved |= {"d_residual": None if f.residual is None else a.d_residual, "branch": a.x}
    return f, reference.normalize_backward(a.dy, stream, **saved, **arrays, **options)


def group_norm(
    a, groups, given=("weight", "bias"), *, eps=1e-5, needs=("x", "weight", "bias"), **options
):
    """Run both directions of a group norm."""
    options |= {name: getattr(a, name) for name in given}
    f = reference.group_norm_forward(a.x, groups, eps=eps, **options)
    options |= {"mean": f.mean, "rstd": f.rstd, "needs": needs}
    return f, reference.group_norm_backward(a.dy, a.x, groups, **options)
