# SPDX-License-Identifier: MIT
"""The row norms of a residual stream: y, and the new stream that it was normalised from."""

from __future__ import annotations

from typing import Any

from cunorm import _outputs
from cunorm.results import AddNorm, NormForward
from cunorm.row_norm._forward import Arrays, Norm, Options, forward
from cunorm.row_norm._variant import Variant


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
    groups: int = 1,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    gate: Any = None,
    gate_activation: str = "silu",
    gate_position: str = "post",
    dtype: Any = None,
    residual_dtype: Any = None,
    out: AddNorm | None = None,
) -> AddNorm:
    """Add x to the residual stream, and `normalize` the new stream.

    ::

        s = x + residual                        rounded to residual's dtype: the new stream
        y = normalize(s, weight, bias)

    Source: "Normalize with Residual or Gate" (xopes), with eps added to the mean square. A stack of
    layers ``x = f(norm(x)) + x`` becomes ``y, stream = add_norm(branch, stream); branch = f(y)``,
    which begins with ``residual=None`` and ends with ``branch + stream``.

    Parameters
    ----------
    x : array
        What the last layer adds to the stream. Of at least one axis; float16, bfloat16, float32 or
        float64.
    residual : array or None
        The stream, of x's shape, of its own dtype of the four. None where it begins: then x is the
        new stream, and no zeros are read.
    weight, bias : array, optional
        Of the row's shape, ``x.shape[axis:]``, each of its own dtype of the four.
    c : float, optional
        The length of a row before weight and bias; by default sqrt(d), d being its width.
    center : bool, optional
        Whether the mean of the row is subtracted first.
    eps : float, optional
        At least 0, in the unit of x squared; added to the mean square.
    axis : int, optional
        The first axis of a row, which goes to the last axis; not PyTorch's ``dim=``, see
        `normalize`.
    dtype : dtype, optional
        y's; by default x's.
    residual_dtype : dtype, optional
        The new stream's. By default residual's, which it has to agree with, or else x's.
    out : AddNorm, optional
        Arrays to write in place of new ones, or None, for each result. An array may be exactly an
        input (``out=AddNorm(residual=residual)`` updates the stream), and overlaps none otherwise.

    Returns
    -------
    AddNorm
        ``y`` and ``residual``, the new stream, both of x's shape, framework and device. Without
        residual the new stream is x itself, unless another dtype or an array in `out` is asked for.

    Raises
    ------
    TypeError, ValueError, ImportError, RuntimeError
        As `normalize` does.

    Notes
    -----
    Rounding: everything is computed in float64 if x or the stream is, else in float32. The sum is
    rounded to the stream's dtype and the norm reads the rounded values, as after a separate
    addition; y is rounded once more, on the store. Overflow and which strides are copied are those
    of `normalize`.

    Examples
    --------
    >>> import numpy as np
    >>> import cunorm
    >>> x = np.array([[1, 2]], dtype=np.float16)
    >>> stream = np.array([[2, 2]], dtype=np.float32)
    >>> y, stream = cunorm.add_normalize(x, stream, c=1)
    >>> y, stream
    (array([[0.6, 0.8]], dtype=float16), array([[3., 4.]], dtype=float32))
    """
    variant = Variant(center, axis, groups, round_before_weight, gate_activation, gate_position)
    norm = Norm("add_normalize", variant, eps, c, weight_offset=weight_offset)
    arrays = Arrays(x, residual, gate=gate, weight=weight, bias=bias)
    return _add(norm, arrays, Options(dtype, residual_dtype, streams=True), out)


def add_rms_norm(
    x: Any,
    residual: Any,
    weight: Any = None,
    *,
    eps: float = 1e-6,
    axis: int = -1,
    groups: int = 1,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    gate: Any = None,
    gate_activation: str = "silu",
    gate_position: str = "post",
    dtype: Any = None,
    residual_dtype: Any = None,
    out: AddNorm | None = None,
) -> AddNorm:
    """Add x to the residual stream, and apply `rms_norm` to the new stream.

    ::

        s = x + residual                        rounded to residual's dtype: the new stream
        y = s / sqrt(mean(s * s) + eps) * weight

    Sources: those of `add_normalize` and `rms_norm`.

    Parameters
    ----------
    x : array
        Of at least one axis; float16, bfloat16, float32 or float64.
    residual : array or None
        The stream, of x's shape, of its own dtype of the four; None where it begins with x.
    weight : array, optional
        Of the row's shape, ``x.shape[axis:]``, of its own dtype of the four.
    eps : float, optional
        At least 0, in the unit of x squared; added to the mean square.
    axis : int, optional
        The first axis of a row, which goes to the last axis; not PyTorch's ``dim=``, see
        `normalize`.
    dtype : dtype, optional
        y's; by default x's.
    residual_dtype : dtype, optional
        The new stream's; by default residual's, or else x's.
    out : AddNorm, optional
        Arrays to write in place of new ones, or None, for each result.

    Returns
    -------
    AddNorm
        ``y`` and ``residual``, the new stream, as from `add_normalize`.

    Raises
    ------
    TypeError, ValueError, ImportError, RuntimeError
        As `normalize` does.

    Notes
    -----
    Rounding is that of `add_normalize`; overflow and which strides are copied, of `normalize`.

    Examples
    --------
    >>> import numpy as np
    >>> import cunorm
    >>> x = np.array([[1, 7]], dtype=np.float32)
    >>> y, stream = cunorm.add_rms_norm(x, None)
    >>> stream is x
    True
    >>> y.round(4)
    array([[0.2, 1.4]], dtype=float32)
    """
    variant = Variant(False, axis, groups, round_before_weight, gate_activation, gate_position)
    norm = Norm("add_rms_norm", variant, eps, weight_offset=weight_offset)
    arrays = Arrays(x, residual, gate=gate, weight=weight)
    return _add(norm, arrays, Options(dtype, residual_dtype, streams=True), out)


def add_layer_norm(
    x: Any,
    residual: Any,
    weight: Any = None,
    bias: Any = None,
    *,
    eps: float = 1e-5,
    axis: int = -1,
    groups: int = 1,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    gate: Any = None,
    gate_activation: str = "silu",
    gate_position: str = "post",
    dtype: Any = None,
    residual_dtype: Any = None,
    out: AddNorm | None = None,
) -> AddNorm:
    """Add x to the residual stream, and apply `layer_norm` to the new stream.

    ::

        s = x + residual                        rounded to residual's dtype: the new stream
        q = s - mean(s)
        y = q / sqrt(mean(q * q) + eps) * weight + bias

    Sources: those of `add_normalize` and `layer_norm`.

    Parameters
    ----------
    x : array
        Of at least one axis; float16, bfloat16, float32 or float64.
    residual : array or None
        The stream, of x's shape, of its own dtype of the four; None where it begins with x.
    weight, bias : array, optional
        Of the row's shape, ``x.shape[axis:]``, each of its own dtype of the four.
    eps : float, optional
        At least 0, in the unit of x squared; added to the variance.
    axis : int, optional
        The first axis of a row, which goes to the last axis; not PyTorch's ``dim=``, see
        `normalize`.
    dtype : dtype, optional
        y's; by default x's.
    residual_dtype : dtype, optional
        The new stream's; by default residual's, or else x's.
    out : AddNorm, optional
        Arrays to write in place of new ones, or None, for each result.

    Returns
    -------
    AddNorm
        ``y`` and ``residual``, the new stream, as from `add_normalize`.

    Raises
    ------
    TypeError, ValueError, ImportError, RuntimeError
        As `normalize` does.

    Notes
    -----
    Rounding is that of `add_normalize`; overflow and which strides are copied, of `normalize`.

    Examples
    --------
    >>> import numpy as np
    >>> import cunorm
    >>> x, stream = np.array([[1, 2]], dtype=np.float32), np.array([[4, 7]], dtype=np.float32)
    >>> result = cunorm.add_layer_norm(x, stream, out=cunorm.AddNorm(residual=stream))
    >>> result.y.round(4)
    array([[-1.,  1.]], dtype=float32)
    >>> stream
    array([[5., 9.]], dtype=float32)
    """
    variant = Variant(True, axis, groups, round_before_weight, gate_activation, gate_position)
    norm = Norm("add_layer_norm", variant, eps, weight_offset=weight_offset)
    arrays = Arrays(x, residual, gate=gate, weight=weight, bias=bias)
    return _add(norm, arrays, Options(dtype, residual_dtype, streams=True), out)


_NOTHING = dict.fromkeys(NormForward._fields)


def _add(norm: Norm, arrays: Arrays, options: Options, out: AddNorm | None) -> AddNorm:
    given = {**_NOTHING, **_outputs.fields(norm.function, out, AddNorm)}
    result = forward(norm, arrays, options, given)
    return AddNorm(result.y, result.residual)
