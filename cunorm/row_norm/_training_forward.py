# SPDX-License-Identifier: MIT
"""The row norms' forward for training: also what their backward needs. Nothing is kept inside."""

from __future__ import annotations

from typing import Any

from cunorm import _outputs
from cunorm.results import NormForward
from cunorm.row_norm._forward import Arrays, Norm, Options, forward
from cunorm.row_norm._variant import Variant


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
    groups: int = 1,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    gate: Any = None,
    gate_activation: str = "silu",
    gate_position: str = "post",
    dtype: Any = None,
    out: NormForward | None = None,
) -> NormForward:
    """Run `normalize`, or `add_normalize`, and return what `normalize_backward` needs too.

    With d the number of elements of a row::

        s = x + residual    rounded to residual's dtype: the new residual stream; else s = x
        q = s - mean(s)     if center, else s
        rstd = 1 / sqrt(mean(q * q) + eps)
        y = c / sqrt(d) * (q * rstd) * weight + bias

    Source: "Normalize with Residual or Gate" (xopes), with eps added to the mean square.

    Parameters
    ----------
    x : array
        Of at least one axis; float16, bfloat16, float32 or float64.
    weight, bias : array, optional
        Of the row's shape, ``x.shape[axis:]``, each of its own dtype of the four.
    residual : array, optional
        The residual stream to which x is added, of x's shape, of its own dtype of the four.
    residual_dtype : dtype, optional
        The new stream's. By default residual's, which it has to agree with. Given without
        residual, x rounded to it is the new stream.
    c : float, optional
        The length of a row before weight and bias; by default sqrt(d).
    center : bool, optional
        Whether the mean of the row is subtracted first.
    eps : float, optional
        At least 0, in the unit of x squared; added to the mean square.
    axis : int, optional
        The first axis of a row, which goes to the last axis; not PyTorch's ``dim=``, see
        `normalize`.
    dtype : dtype, optional
        y's; by default x's.
    out : NormForward, optional
        Arrays to write in place of new ones, or None, for each result. An array may be exactly an
        input, and overlaps none otherwise.

    Returns
    -------
    NormForward
        ``y``; ``residual``, the new stream, None where neither residual nor its dtype was given;
        ``mean``, None without center; and ``rstd``. y and residual have x's shape, mean and rstd
        have the shape ``x.shape[:axis]`` and are float64 if x or the new stream is, else float32.

    Raises
    ------
    TypeError, ValueError, ImportError, RuntimeError
        As `normalize` does.

    Notes
    -----
    Rounding is that of `add_normalize`: mean and rstd are of the type everything is computed in,
    and rounded to nothing less. Overflow and which strides are copied are those of `normalize`.

    Examples
    --------
    >>> import numpy as np
    >>> import cunorm
    >>> saved = cunorm.normalize_forward(np.array([[2, 4], [3, 7]], dtype=np.float32), center=True)
    >>> saved.y.round(4)
    array([[-1.,  1.],
           [-1.,  1.]], dtype=float32)
    >>> saved.mean, saved.rstd.round(4)
    (array([3., 5.], dtype=float32), array([1. , 0.5], dtype=float32))
    """
    variant = Variant(center, axis, groups, round_before_weight, gate_activation, gate_position)
    norm = Norm("normalize_forward", variant, eps, c, weight_offset=weight_offset)
    arrays = Arrays(x, residual, gate=gate, weight=weight, bias=bias)
    return _forward(norm, arrays, Options(dtype, residual_dtype, saves=True), out)


def rms_norm_forward(
    x: Any,
    weight: Any = None,
    *,
    residual: Any = None,
    residual_dtype: Any = None,
    eps: float = 1e-6,
    axis: int = -1,
    groups: int = 1,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    gate: Any = None,
    gate_activation: str = "silu",
    gate_position: str = "post",
    dtype: Any = None,
    out: NormForward | None = None,
) -> NormForward:
    """Run `rms_norm`, or `add_rms_norm`, and return what `rms_norm_backward` needs too.

    ::

        s = x + residual    rounded to residual's dtype: the new residual stream; else s = x
        rstd = 1 / sqrt(mean(s * s) + eps)
        y = s * rstd * weight

    Sources: those of `rms_norm` and `add_normalize`.

    Parameters
    ----------
    x : array
        Of at least one axis; float16, bfloat16, float32 or float64.
    weight : array, optional
        Of the row's shape, ``x.shape[axis:]``, of its own dtype of the four.
    residual, residual_dtype : array and dtype, optional
        The residual stream and the new one's dtype, as for `normalize_forward`.
    eps : float, optional
        At least 0, in the unit of x squared; added to the mean square.
    axis : int, optional
        The first axis of a row, which goes to the last axis; not PyTorch's ``dim=``, see
        `normalize`.
    dtype : dtype, optional
        y's; by default x's.
    out : NormForward, optional
        Arrays to write in place of new ones, or None, for each result.

    Returns
    -------
    NormForward
        ``y``, ``residual`` and ``rstd`` as from `normalize_forward`; ``mean`` is None.

    Raises
    ------
    TypeError, ValueError, ImportError, RuntimeError
        As `normalize` does.

    Notes
    -----
    Rounding is that of `normalize_forward`; overflow and which strides are copied, of `normalize`.

    Examples
    --------
    >>> import numpy as np
    >>> import cunorm
    >>> saved = cunorm.rms_norm_forward(np.array([[1, 7]], dtype=np.float32))
    >>> saved.y.round(4), saved.rstd.round(4)
    (array([[0.2, 1.4]], dtype=float32), array([0.2], dtype=float32))
    """
    variant = Variant(False, axis, groups, round_before_weight, gate_activation, gate_position)
    norm = Norm("rms_norm_forward", variant, eps, weight_offset=weight_offset)
    arrays = Arrays(x, residual, gate=gate, weight=weight)
    return _forward(norm, arrays, Options(dtype, residual_dtype, saves=True), out)


def layer_norm_forward(
    x: Any,
    weight: Any = None,
    bias: Any = None,
    *,
    residual: Any = None,
    residual_dtype: Any = None,
    eps: float = 1e-5,
    axis: int = -1,
    groups: int = 1,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    gate: Any = None,
    gate_activation: str = "silu",
    gate_position: str = "post",
    dtype: Any = None,
    out: NormForward | None = None,
) -> NormForward:
    """Run `layer_norm`, or `add_layer_norm`, and return what `layer_norm_backward` needs too.

    ::

        s = x + residual    rounded to residual's dtype: the new residual stream; else s = x
        q = s - mean(s)
        rstd = 1 / sqrt(mean(q * q) + eps)
        y = q * rstd * weight + bias

    Sources: those of `layer_norm` and `add_normalize`.

    Parameters
    ----------
    x : array
        Of at least one axis; float16, bfloat16, float32 or float64.
    weight, bias : array, optional
        Of the row's shape, ``x.shape[axis:]``, each of its own dtype of the four.
    residual, residual_dtype : array and dtype, optional
        The residual stream and the new one's dtype, as for `normalize_forward`.
    eps : float, optional
        At least 0, in the unit of x squared; added to the variance.
    axis : int, optional
        The first axis of a row, which goes to the last axis; not PyTorch's ``dim=``, see
        `normalize`.
    dtype : dtype, optional
        y's; by default x's.
    out : NormForward, optional
        Arrays to write in place of new ones, or None, for each result.

    Returns
    -------
    NormForward
        ``y``, ``residual``, ``mean`` and ``rstd`` as from `normalize_forward`.

    Raises
    ------
    TypeError, ValueError, ImportError, RuntimeError
        As `normalize` does.

    Notes
    -----
    Rounding is that of `normalize_forward`; overflow and which strides are copied, of `normalize`.

    Examples
    --------
    >>> import numpy as np
    >>> import cunorm
    >>> saved = cunorm.layer_norm_forward(np.array([[3, 7]], dtype=np.float32))
    >>> saved.y.round(4), saved.mean, saved.rstd.round(4)
    (array([[-1.,  1.]], dtype=float32), array([5.], dtype=float32), array([0.5], dtype=float32))
    """
    variant = Variant(True, axis, groups, round_before_weight, gate_activation, gate_position)
    norm = Norm("layer_norm_forward", variant, eps, weight_offset=weight_offset)
    arrays = Arrays(x, residual, gate=gate, weight=weight, bias=bias)
    return _forward(norm, arrays, Options(dtype, residual_dtype, saves=True), out)


def l2_norm_forward(
    x: Any,
    *,
    eps: float = 1e-12,
    axis: int = -1,
    groups: int = 1,
    dtype: Any = None,
    out: NormForward | None = None,
) -> NormForward:
    """Run `l2_norm`, and return what `l2_norm_backward` needs too.

    With d the number of elements of a row::

        rstd = sqrt(d) / sqrt(sum(x * x) + eps)
        y = x * rstd / sqrt(d)

    Source: `normalize_forward` with c = 1 and eps / d.

    Parameters
    ----------
    x : array
        Of at least one axis; float16, bfloat16, float32 or float64.
    eps : float, optional
        At least 0, in the unit of x squared; added to the sum of squares.
    axis : int, optional
        The first axis of a row, which goes to the last axis; not PyTorch's ``dim=``, see
        `normalize`.
    dtype : dtype, optional
        y's; by default x's.
    out : NormForward, optional
        Arrays to write in place of new ones, or None, for each result.

    Returns
    -------
    NormForward
        ``y`` and ``rstd`` as from `normalize_forward`; ``mean`` and ``residual`` are None.

    Raises
    ------
    TypeError, ValueError, ImportError, RuntimeError
        As `normalize` does.

    Notes
    -----
    Rounding is that of `normalize_forward`; overflow and which strides are copied, of `normalize`.

    Examples
    --------
    >>> import numpy as np
    >>> import cunorm
    >>> saved = cunorm.l2_norm_forward(np.array([[5, 5, 5, 5]], dtype=np.float32))
    >>> saved.y.round(4), saved.rstd.round(4)
    (array([[0.5, 0.5, 0.5, 0.5]], dtype=float32), array([0.2], dtype=float32))
    """
    norm = Norm("l2_norm_forward", Variant(axis=axis, groups=groups), eps, 1.0, eps_of_sum=True)
    arrays = Arrays(x)
    return _forward(norm, arrays, Options(dtype, saves=True), out)


def _forward(norm: Norm, arrays: Arrays, options: Options, out: NormForward | None) -> NormForward:
    return forward(norm, arrays, options, _outputs.fields(norm.function, out, NormForward))
