# SPDX-License-Identifier: MIT
"""The named row norms, as cases of the generic one."""

from __future__ import annotations  # keeps the names of type aliases in help()

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import DTypeLike

from cunorm.reference.axes import Axis, width
from cunorm.reference.generic import (
    BackwardOptions,
    ForwardOptions,
    normalize_backward,
    normalize_forward,
)
from cunorm.reference.jvp import JvpOptions, normalize_jvp
from cunorm.reference.rows import Array, Float64
from cunorm.results import AddNorm, NormForward, NormGrads

if TYPE_CHECKING:
    from typing_extensions import Unpack  # in typing from Python 3.11 on


def rms_norm_forward(
    x: Array,
    weight: Array | None = None,
    *,
    bias: Array | None = None,
    residual: Array | None = None,
    residual_dtype: DTypeLike | None = None,
    eps: float = 1e-6,
    **options: Unpack[ForwardOptions],
) -> NormForward[Array]:
    """Divide each row by its root mean square: `normalize_forward` with its defaults."""
    return normalize_forward(
        x, weight, bias, residual=residual, residual_dtype=residual_dtype, eps=eps, **options
    )


def layer_norm_forward(
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    residual: Array | None = None,
    residual_dtype: DTypeLike | None = None,
    eps: float = 1e-5,
    **options: Unpack[ForwardOptions],
) -> NormForward[Array]:
    """Centre each row and divide it by its deviation: `normalize_forward` with center."""
    inputs = x, weight, bias
    return normalize_forward(
        *inputs, residual=residual, residual_dtype=residual_dtype, center=True, eps=eps, **options
    )


def l2_norm_forward(
    x: Array,
    *,
    residual: Array | None = None,
    residual_dtype: DTypeLike | None = None,
    eps: float = 1e-12,
    axis: Axis = -1,
    groups: int = 1,
) -> NormForward[Array]:
    """Return y = x / sqrt(sum(x * x) + eps), with rstd = sqrt(d) / sqrt(sum(x * x) + eps)."""
    eps /= width(x.shape, axis) // groups
    options: ForwardOptions = {"axis": axis, "groups": groups}
    return normalize_forward(
        x, residual=residual, residual_dtype=residual_dtype, c=1.0, eps=eps, **options
    )


def rms_norm_backward(
    dy: Array,
    x: Array,
    weight: Array | None = None,
    *,
    bias: Array | None = None,
    rstd: Array,
    **options: Unpack[BackwardOptions],
) -> NormGrads[Array]:
    """Differentiate `rms_norm_forward`."""
    return normalize_backward(dy, x, weight, bias, rstd=rstd, **options)


def layer_norm_backward(
    dy: Array,
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    rstd: Array,
    mean: Array,
    **options: Unpack[BackwardOptions],
) -> NormGrads[Array]:
    """Differentiate `layer_norm_forward`."""
    return normalize_backward(dy, x, weight, bias, rstd=rstd, mean=mean, center=True, **options)


def l2_norm_backward(
    dy: Array, x: Array, *, rstd: Array, axis: Axis = -1, groups: int = 1
) -> NormGrads[Array]:
    """Differentiate `l2_norm_forward`."""
    return normalize_backward(dy, x, rstd=rstd, c=1.0, axis=axis, groups=groups)


def rms_norm_jvp(
    x: Array,
    weight: Array | None = None,
    *,
    bias: Array | None = None,
    rstd: Array,
    **options: Unpack[JvpOptions],
) -> Float64:
    """Return the tangent of y of `rms_norm_forward`."""
    return normalize_jvp(x, weight, bias, rstd=rstd, **options)


def layer_norm_jvp(
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    rstd: Array,
    mean: Array,
    **options: Unpack[JvpOptions],
) -> Float64:
    """Return the tangent of y of `layer_norm_forward`."""
    return normalize_jvp(x, weight, bias, rstd=rstd, mean=mean, center=True, **options)


def l2_norm_jvp(
    x: Array, *, x_tangent: Array, rstd: Array, axis: Axis = -1, groups: int = 1
) -> Float64:
    """Return the tangent of y of `l2_norm_forward`."""
    return normalize_jvp(x, x_tangent=x_tangent, rstd=rstd, c=1.0, axis=axis, groups=groups)


def normalize(
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    c: float | None = None,
    center: bool = False,
    eps: float = 1e-6,
    **options: Unpack[ForwardOptions],
) -> Float64:
    """Return y of `normalize_forward`."""
    return np.asarray(normalize_forward(x, weight, bias, c=c, center=center, eps=eps, **options).y)


def rms_norm(
    x: Array,
    weight: Array | None = None,
    *,
    bias: Array | None = None,
    eps: float = 1e-6,
    **options: Unpack[ForwardOptions],
) -> Float64:
    """Return y of `rms_norm_forward`."""
    return np.asarray(rms_norm_forward(x, weight, bias=bias, eps=eps, **options).y)


def layer_norm(
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    eps: float = 1e-5,
    **options: Unpack[ForwardOptions],
) -> Float64:
    """Return y of `layer_norm_forward`."""
    return np.asarray(layer_norm_forward(x, weight, bias, eps=eps, **options).y)


def l2_norm(x: Array, *, eps: float = 1e-12, axis: Axis = -1, groups: int = 1) -> Float64:
    """Return y of `l2_norm_forward`."""
    return np.asarray(l2_norm_forward(x, eps=eps, axis=axis, groups=groups).y)


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
    **options: Unpack[ForwardOptions],
) -> AddNorm[Array]:
    """Return y and the new stream of `normalize_forward`; without a residual the stream is x."""
    inputs, dtype = (x, weight, bias), residual_dtype
    if residual is None and dtype is None:
        dtype = x.dtype
    result = normalize_forward(
        *inputs, residual=residual, residual_dtype=dtype, c=c, center=center, eps=eps, **options
    )
    assert result.residual is not None
    return AddNorm(result.y, result.residual)


def add_rms_norm(
    x: Array,
    residual: Array | None,
    weight: Array | None = None,
    *,
    bias: Array | None = None,
    residual_dtype: DTypeLike | None = None,
    eps: float = 1e-6,
    **options: Unpack[ForwardOptions],
) -> AddNorm[Array]:
    """Return y and the new residual stream of `rms_norm_forward`."""
    inputs = x, residual, weight, bias
    return add_normalize(*inputs, residual_dtype=residual_dtype, eps=eps, **options)


def add_layer_norm(
    x: Array,
    residual: Array | None,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    residual_dtype: DTypeLike | None = None,
    eps: float = 1e-5,
    **options: Unpack[ForwardOptions],
) -> AddNorm[Array]:
    """Return y and the new residual stream of `layer_norm_forward`."""
    return add_normalize(
        x, residual, weight, bias, residual_dtype=residual_dtype, center=True, eps=eps, **options
    )
