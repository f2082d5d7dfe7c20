# SPDX-License-Identifier: MIT
"""The row norms for training: explicit forward and backward, nothing kept in between."""

from __future__ import annotations

from typing import Any

from cunorm import _outputs
from cunorm.results import NormForward, NormGrads
from cunorm.row_norm._backward import NEEDS, NormBackward, backward
from cunorm.row_norm._forward import Norm, Options, forward


def normalize_forward(
    x: Any,
    weight: Any = None,
    bias: Any = None,
    *,
    residual: Any = None,
    residual_dtype: Any = None,
    c: float | None = None,
    center: bool = False,
    eps: float = 1e-6,
    axis: int = -1,
    dtype: Any = None,
    out: NormForward | None = None,
) -> NormForward:
    """Run `normalize` and return what its backward needs."""
    norm = Norm("normalize_forward", eps, center, c)
    options = Options(axis, dtype, residual_dtype, saves=True)
    return _forward(norm, x, residual, weight, bias, options, out)


def rms_norm_forward(
    x: Any,
    weight: Any = None,
    *,
    residual: Any = None,
    residual_dtype: Any = None,
    eps: float = 1e-6,
    axis: int = -1,
    dtype: Any = None,
    out: NormForward | None = None,
) -> NormForward:
    """Run `rms_norm` and return what its backward needs."""
    options = Options(axis, dtype, residual_dtype, saves=True)
    return _forward(Norm("rms_norm_forward", eps), x, residual, weight, None, options, out)


def layer_norm_forward(
    x: Any,
    weight: Any = None,
    bias: Any = None,
    *,
    residual: Any = None,
    residual_dtype: Any = None,
    eps: float = 1e-5,
    axis: int = -1,
    dtype: Any = None,
    out: NormForward | None = None,
) -> NormForward:
    """Run `layer_norm` and return what its backward needs."""
    norm = Norm("layer_norm_forward", eps, center=True)
    options = Options(axis, dtype, residual_dtype, saves=True)
    return _forward(norm, x, residual, weight, bias, options, out)


def l2_norm_forward(
    x: Any,
    *,
    eps: float = 1e-12,
    axis: int = -1,
    dtype: Any = None,
    out: NormForward | None = None,
) -> NormForward:
    """Run `l2_norm` and return what its backward needs."""
    norm = Norm("l2_norm_forward", eps, c=1.0, eps_of_sum=True)
    return _forward(norm, x, None, None, None, Options(axis, dtype, saves=True), out)


def normalize_backward(
    dy: Any,
    x: Any,
    weight: Any = None,
    bias: Any = None,
    *,
    rstd: Any,
    mean: Any = None,
    d_residual: Any = None,
    c: float | None = None,
    center: bool = False,
    axis: int = -1,
    x_dtype: Any = None,
    needs: tuple[str, ...] = NEEDS,
    out: NormGrads | None = None,
) -> NormGrads:
    """Return the gradients of `normalize`."""
    norm = NormBackward("normalize_backward", center, c, axis, x_dtype, needs)
    return _backward(norm, dy, x, weight, bias, rstd, mean, d_residual, out)


def rms_norm_backward(
    dy: Any,
    x: Any,
    weight: Any = None,
    *,
    rstd: Any,
    d_residual: Any = None,
    axis: int = -1,
    x_dtype: Any = None,
    needs: tuple[str, ...] = NEEDS,
    out: NormGrads | None = None,
) -> NormGrads:
    """Return the gradients of `rms_norm`."""
    norm = NormBackward("rms_norm_backward", axis=axis, x_dtype=x_dtype, needs=needs)
    return _backward(norm, dy, x, weight, None, rstd, None, d_residual, out)


def layer_norm_backward(
    dy: Any,
    x: Any,
    weight: Any = None,
    bias: Any = None,
    *,
    rstd: Any,
    mean: Any = None,
    d_residual: Any = None,
    axis: int = -1,
    x_dtype: Any = None,
    needs: tuple[str, ...] = NEEDS,
    out: NormGrads | None = None,
) -> NormGrads:
    """Return the gradients of `layer_norm`."""
    norm = NormBackward("layer_norm_backward", True, None, axis, x_dtype, needs)
    return _backward(norm, dy, x, weight, bias, rstd, mean, d_residual, out)


def l2_norm_backward(
    dy: Any, x: Any, *, rstd: Any, axis: int = -1, out: NormGrads | None = None
) -> NormGrads:
    """Return the gradient of `l2_norm`."""
    norm = NormBackward("l2_norm_backward", c=1.0, axis=axis)
    return _backward(norm, dy, x, None, None, rstd, None, None, out)


def _forward(
    norm: Norm,
    x: Any,
    residual: Any,
    weight: Any,
    bias: Any,
    options: Options,
    out: NormForward | None,
) -> NormForward:
    given = _outputs.fields(norm.function, out, NormForward)
    return forward(norm, x, residual, weight, bias, options, given)


def _backward(
    norm: NormBackward,
    dy: Any,
    x: Any,
    weight: Any,
    bias: Any,
    rstd: Any,
    mean: Any,
    d_residual: Any,
    out: NormGrads | None,
) -> NormGrads:
    arrays = {
        "dy": dy,
        "x": x,
        "weight": weight,
        "bias": bias,
        "rstd": rstd,
        "mean": mean,
        "d_residual": d_residual,
    }
    return backward(norm, arrays, _outputs.fields(norm.function, out, NormGrads))
