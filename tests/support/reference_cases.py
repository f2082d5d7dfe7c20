# SPDX-License-Identifier: MIT
"""Calls of the oracle in float64: read-only operands, forward and backward, torch's activations."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from cunorm import reference

ROWS = ("x", "residual", "dy", "d_residual", "gate")


def operands(shape=(5, 8), parameter=None, dtype=np.float64, seed=0) -> SimpleNamespace:
    """Draw what a norm takes; weight and bias have the last axis, or a shape of their own."""
    rng = np.random.default_rng(seed)
    arrays = {name: rng.standard_normal(shape) for name in ROWS}
    parameter = shape[-1:] if parameter is None else parameter
    arrays |= {name: rng.standard_normal(parameter) for name in ("weight", "bias")}
    arrays["gate"] *= 2
    arrays = {name: array.astype(dtype) for name, array in arrays.items()}
    for array in arrays.values():
        array.flags.writeable = False
    return SimpleNamespace(**arrays)


def row_norm(a, given=("weight", "bias"), *, eps=1e-6, needs=None, **told) -> tuple[Any, Any]:
    """Run both directions with those of residual, weight, bias and gate that are given."""
    arrays = {name: getattr(a, name) for name in given}
    residual, norm = arrays.pop("residual", None), {**arrays, **told}
    f = reference.normalize_forward(a.x, residual=residual, eps=eps, **norm)
    more = {} if needs is None else {"needs": needs}
    grads = reference.normalize_backward(
        a.dy,
        a.x if residual is None else f.residual,
        rstd=f.rstd,
        mean=f.mean,
        d_residual=None if residual is None else a.d_residual,
        x_dtype=a.x.dtype,
        **norm,
        **more,
    )
    return f, grads


def group_norm(a, groups, given=("weight", "bias"), *, eps=1e-5, needs=None, **told):
    """Run both directions of a group norm."""
    norm = {name: getattr(a, name) for name in given} | told
    f = reference.group_norm_forward(a.x, groups, eps=eps, **norm)
    more = {} if needs is None else {"needs": needs}
    saved = {"mean": f.mean, "rstd": f.rstd}
    return f, reference.group_norm_backward(a.dy, a.x, groups, **saved, **norm, **more)


def torch_activation(torch, name):
    functions = torch.nn.functional
    if name in (None, "identity"):
        return lambda z: 1 * z
    if name == "gelu_tanh":
        return lambda z: functions.gelu(z, approximate="tanh")
    return getattr(functions, {"swish": "silu"}.get(name, name))
