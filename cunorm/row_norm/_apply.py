# SPDX-License-Identifier: MIT
"""The row norms for inference: y alone, and y with the new residual stream."""

from __future__ import annotations

from typing import Any

from cunorm import _outputs
from cunorm.results import AddNorm, NormForward
from cunorm.row_norm._forward import Norm, Options, forward


def normalize(
    x: Any,
    weight: Any = None,
    bias: Any = None,
    *,
    c: float | None = None,
    center: bool = False,
    eps: float = 1e-6,
    axis: int = -1,
    dtype: Any = None,
    out: Any = None,
) -> Any:
    """Normalise each row of x to the length c (by default the square root of its width)."""
    norm = Norm("normalize", eps, center, c)
    return _y(norm, x, weight, bias, Options(axis, dtype), out)


def rms_norm(
    x: Any,
    weight: Any = None,
    *,
    eps: float = 1e-6,
    axis: int = -1,
    dtype: Any = None,
    out: Any = None,
) -> Any:
    """Divide each row of x by its root mean square."""
    return _y(Norm("rms_norm", eps), x, weight, None, Options(axis, dtype), out)


def layer_norm(
    x: Any,
    weight: Any = None,
    bias: Any = None,
    *,
    eps: float = 1e-5,
    axis: int = -1,
    dtype: Any = None,
    out: Any = None,
) -> Any:
    """Shift and scale each row of x to mean 0 and variance 1."""
    norm = Norm("layer_norm", eps, center=True)
    return _y(norm, x, weight, bias, Options(axis, dtype), out)


def l2_norm(
    x: Any, *, eps: float = 1e-12, axis: int = -1, dtype: Any = None, out: Any = None
) -> Any:
    """Scale each row of x to length 1."""
    norm = Norm("l2_norm", eps, c=1.0, eps_of_sum=True)
    return _y(norm, x, None, None, Options(axis, dtype), out)


def add_normalize(
    x: Any,
    residual: Any,
    weight: Any = None,
    bias: Any = None,
    *,
    c: float | None = None,
    center: bool = False,
    eps: float = 1e-6,
    axis: int = -1,
    dtype: Any = None,
    residual_dtype: Any = None,
    out: AddNorm | None = None,
) -> AddNorm:
    """Add x to the residual stream and normalise the sum."""
    norm = Norm("add_normalize", eps, center, c)
    options = Options(axis, dtype, residual_dtype, streams=True)
    return _add(norm, x, residual, weight, bias, options, out)


def add_rms_norm(
    x: Any,
    residual: Any,
    weight: Any = None,
    *,
    eps: float = 1e-6,
    axis: int = -1,
    dtype: Any = None,
    residual_dtype: Any = None,
    out: AddNorm | None = None,
) -> AddNorm:
    """Add x to the residual stream and apply `rms_norm` to the sum."""
    options = Options(axis, dtype, residual_dtype, streams=True)
    return _add(Norm("add_rms_norm", eps), x, residual, weight, None, options, out)


def add_layer_norm(
    x: Any,
    residual: Any,
    weight: Any = None,
    bias: Any = None,
    *,
    eps: float = 1e-5,
    axis: int = -1,
    dtype: Any = None,
    residual_dtype: Any = None,
    out: AddNorm | None = None,
) -> AddNorm:
    """Add x to the residual stream and apply `layer_norm` to the sum."""
    norm = Norm("add_layer_norm", eps, center=True)
    options = Options(axis, dtype, residual_dtype, streams=True)
    return _add(norm, x, residual, weight, bias, options, out)


_NOTHING = dict.fromkeys(NormForward._fields)


def _y(norm: Norm, x: Any, weight: Any, bias: Any, options: Options, out: Any) -> Any:
    return forward(norm, x, None, weight, bias, options, {**_NOTHING, "y": out}).y


def _add(
    norm: Norm,
    x: Any,
    residual: Any,
    weight: Any,
    bias: Any,
    options: Options,
    out: AddNorm | None,
) -> AddNorm:
    given = {**_NOTHING, **_outputs.fields(norm.function, out, AddNorm)}
    result = forward(norm, x, residual, weight, bias, options, given)
    return AddNorm(result.y, result.residual)
