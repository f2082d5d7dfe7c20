# SPDX-License-Identifier: MIT
"""The named row norms, each as the case of the generic one that it is."""

from __future__ import annotations

import math
from collections.abc import Collection

from numpy.typing import DTypeLike

from cunorm.reference.generic import (
    OPERANDS,
    Array,
    Float64,
    normalize_backward,
    normalize_forward,
)
from cunorm.results import AddNorm, NormForward, NormGrads


def rms_norm_forward(
    x: Array,
    weight: Array | None = None,
    *,
    residual: Array | None = None,
    residual_dtype: DTypeLike | None = None,
    eps: float = 1e-6,
    axis: int = -1,
) -> NormForward:
    """Divide each row by its root mean square: `normalize_forward` with its defaults."""
    return normalize_forward(
        x, weight, residual=residual, residual_dtype=residual_dtype, eps=eps, axis=axis
    )


def layer_norm_forward(
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    residual: Array | None = None,
    residual_dtype: DTypeLike | None = None,
    eps: float = 1e-5,
    axis: int = -1,
) -> NormForward:
    """Centre each row and divide it by its deviation: `normalize_forward` with center."""
    return normalize_forward(
        x,
        weight,
        bias,
        residual=residual,
        residual_dtype=residual_dtype,
        center=True,
        eps=eps,
        axis=axis,
    )


def l2_norm_forward(
    x: Array,
    *,
    residual: Array | None = None,
    residual_dtype: DTypeLike | None = None,
    eps: float = 1e-12,
    axis: int = -1,
) -> NormForward:
    """Return y = x / sqrt(sum(x * x) + eps), with rstd = sqrt(d) / sqrt(sum(x * x) + eps)."""
    d = math.prod(x.shape[axis:])
    return normalize_forward(
        x, residual=residual, residual_dtype=residual_dtype, c=1.0, eps=eps / d, axis=axis
    )


def rms_norm_backward(
    dy: Array,
    x: Array,
    weight: Array | None = None,
    *,
    rstd: Array,
    d_residual: Array | None = None,
    axis: int = -1,
    needs: Collection[str] = OPERANDS,
) -> NormGrads:
    """Differentiate `rms_norm_forward`."""
    return normalize_backward(
        dy, x, weight, rstd=rstd, d_residual=d_residual, axis=axis, needs=needs
    )


def layer_norm_backward(
    dy: Array,
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    rstd: Array,
    mean: Array,
    d_residual: Array | None = None,
    axis: int = -1,
    needs: Collection[str] = OPERANDS,
) -> NormGrads:
    """Differentiate `layer_norm_forward`."""
    return normalize_backward(
        dy,
        x,
        weight,
        bias,
        rstd=rstd,
        mean=mean,
        d_residual=d_residual,
        center=True,
        axis=axis,
        needs=needs,
    )


def l2_norm_backward(dy: Array, x: Array, *, rstd: Array, axis: int = -1) -> NormGrads:
    """Differentiate `l2_norm_forward`."""
    return normalize_backward(dy, x, rstd=rstd, c=1.0, axis=axis)


def normalize(
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    c: float | None = None,
    center: bool = False,
    eps: float = 1e-6,
    axis: int = -1,
) -> Float64:
    """Return y of `normalize_forward`."""
    y: Float64 = normalize_forward(x, weight, bias, c=c, center=center, eps=eps, axis=axis).y
    return y


def rms_norm(
    x: Array, weight: Array | None = None, *, eps: float = 1e-6, axis: int = -1
) -> Float64:
    """Return y of `rms_norm_forward`."""
    y: Float64 = rms_norm_forward(x, weight, eps=eps, axis=axis).y
    return y


def layer_norm(
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    eps: float = 1e-5,
    axis: int = -1,
) -> Float64:
    """Return y of `layer_norm_forward`."""
    y: Float64 = layer_norm_forward(x, weight, bias, eps=eps, axis=axis).y
    return y


def l2_norm(x: Array, *, eps: float = 1e-12, axis: int = -1) -> Float64:
    """Return y of `l2_norm_forward`."""
    y: Float64 = l2_norm_forward(x, eps=eps, axis=axis).y
    return y


def add_normalize(
    x: Array,
    residual: Array | None,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    residual_dtype: DTypeLike | None = None,
    c: float | None = None,
    center: bool = False,
    eps: float = 1e-6,
    axis: int = -1,
) -> AddNorm:
    """Return y and the new residual stream of `normalize_forward`; with no residual, that is x."""
    result = normalize_forward(
        x,
        weight,
        bias,
        residual=residual,
        residual_dtype=x.dtype if residual_dtype is None else residual_dtype,
        c=c,
        center=center,
        eps=eps,
        axis=axis,
    )
    return AddNorm(y=result.y, residual=result.residual)


def add_rms_norm(
    x: Array,
    residual: Array | None,
    weight: Array | None = None,
    *,
    residual_dtype: DTypeLike | None = None,
    eps: float = 1e-6,
    axis: int = -1,
) -> AddNorm:
    """Return y and the new residual stream of `rms_norm_forward`."""
    return add_normalize(x, residual, weight, residual_dtype=residual_dtype, eps=eps, axis=axis)


def add_layer_norm(
    x: Array,
    residual: Array | None,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    residual_dtype: DTypeLike | None = None,
    eps: float = 1e-5,
    axis: int = -1,
) -> AddNorm:
    """Return y and the new residual stream of `layer_norm_forward`."""
    return add_normalize(
        x,
        residual,
        weight,
        bias,
        residual_dtype=residual_dtype,
        center=True,
        eps=eps,
        axis=axis,
    )
