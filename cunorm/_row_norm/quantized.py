# SPDX-License-Identifier: MIT
"""Row norms with a quantised result; `normalize_quantized` documents what they have in common."""

from __future__ import annotations  # keeps the names of type aliases in help()

from typing import Any

from cunorm._core import validate
from cunorm._core.memo import typed_key
from cunorm._core.tensor import Arrays
from cunorm._core.types import (
    Activation,
    ArrayT,
    DTypeLike,
    GatePosition,
    QuantizedDType,
    ScaleDType,
    SupportsDLPack,
)
from cunorm._dispatch import dispatch
from cunorm._row_norm.kernels import forward_inputs
from cunorm._row_norm.quantized_plan import ROW_QUANTIZED
from cunorm._row_norm.quantized_spec import array_or_none, quantized_scalars
from cunorm._row_norm.spec import Scalars, forward_scalars
from cunorm.results import QuantizedNorm


def normalize_quantized(
    x: ArrayT,
    weight: SupportsDLPack | None = None,
    bias: SupportsDLPack | None = None,
    *,
    residual: SupportsDLPack | None = None,
    residual_dtype: DTypeLike | None = None,
    c: float | None = None,
    center: bool = False,
    eps: float = 1e-6,
    axis: int = -1,
    groups: int = 1,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    gate: SupportsDLPack | None = None,
    gate_activation: Activation = "silu",
    gate_position: GatePosition = "post",
    dtype: QuantizedDType = "float8_e4m3fn",
    scale: SupportsDLPack | float | None = None,
    block: int | None = None,
    scale_dtype: ScaleDType = "float32",
    absmax_bound: float | None = None,
    return_y: bool = False,
    out: QuantizedNorm[SupportsDLPack | None] | None = None,
) -> QuantizedNorm[ArrayT]:
    """Normalise rows as `normalize` does, and quantise the result: y is about q * scale.

    The norm y is rounded to its dtype. Then it is quantised, with a given scale or with one that is
    found for each row or block of columns::

        a = max |y|                              at most absmax_bound, if that is given
        scale = max(a / largest, least)          or 2 ** ceil(log2(a / largest)) as float8_e8m0fnu
        q = y / scale                            int8: y * (1 / scale)

    q is clamped to +-largest and rounded to nearest even. largest is 448 (float8_e4m3fn), 57344
    (float8_e5m2) or 127 (int8). least is 1 / (448 * 512) for the floats, 2**-23 for int8.

    Sources: the rules of vLLM's kernels for each token and each group; "OCP Microscaling Formats
    (MX) v1.0", with powers of two rounded up. Results are for inference: nothing is recorded.

    Parameters
    ----------
    x, weight, bias, c, center, eps, axis, groups, weight_offset, round_before_weight : optional
    gate, gate_activation, gate_position, residual, residual_dtype : optional
        As for `normalize_forward`. Rows are normalised, rounded and gated as there.
    dtype : str or dtype, optional
        The dtype of q: float8_e4m3fn, float8_e5m2 or int8, as a name or a dtype of any framework.
    scale : float or array, optional
        The scale, instead of one that is found: a positive number, or float32 with one element or
        with one for each row or group, of the shape of a scale that is found for rows. The elements
        of an array are not checked; they are to be positive, finite and not subnormal, and for int8
        at most 2**126.
    block : int, optional
        32, 64 or 128: each so many columns of a row share a scale. The last block of a row may be
        shorter. A row is then the last axis, the width of a row or group a multiple of 4, and x
        and its residual stream are not float64.
    scale_dtype : str or dtype, optional
        float32, or float8_e8m0fnu for powers of two, which are rounded up. With ``block=32`` and
        float8_e8m0fnu, q and scale are MXFP8; int8 has float32 only.
    absmax_bound : float, optional
        A positive number. Larger elements no longer make the scale larger; those for which it is
        too small are clamped to largest * scale.
    return_y : bool, optional
        Whether y is returned, too. It has the bits of `normalize`.
    out : QuantizedNorm, optional
        For each result, an array to write instead of a new one, or None. scale may have any strides
        before and along its last axis: scales of columns side by side are a transposed array. y is
        returned if there is an array for it. y and residual may be inputs as in `add_normalize`.

    Returns
    -------
    QuantizedNorm
        ``q`` is like x. ``scale`` has the shape ``(*x.shape[:axis], 1)``, with a number for each
        group or block on its last axis, the blocks of each group side by side, and one more axis of
        1 for each further axis of a row. It is float32 or float8_e8m0fnu, or the scale that was
        given. ``y`` and ``residual``, the new stream, are None unless they are asked for. 8-bit
        floats are dtypes of ml_dtypes in NumPy and CuPy.

    Raises
    ------
    TypeError, ValueError, ImportError, RuntimeError
        As for `normalize`. A tensor that requires grad is a ValueError.

    Notes
    -----
    Rounding: quotients are rounded once to float32 (float64 if x or its stream is float64), then to
    the dtype of scale or q. So q and scale have the bits of "norm, then quantise" with y in memory.
    They depend on no other row, nor on strides.

    Special values: a row or block of zeros has the least scale (2**-127 in float8_e8m0fnu). With a
    NaN in y, scale and q of the row or block are NaN. With an infinite element (or, in float64, one
    of which the scale exceeds float32) and no absmax_bound, the scale is infinite, in
    float8_e8m0fnu NaN, so q * scale is NaN. With a given scale, only the element is concerned: NaN
    stays NaN, infinity becomes largest. The NaN of q has the bits 0x7f; in int8 it is 0.

    Examples
    --------
    >>> import numpy as np
    >>> import cunorm
    >>> x = np.array([[3, 4], [-30, 40]], dtype=np.float32)
    >>> q, scale, *_ = cunorm.normalize_quantized(x, c=1, dtype="int8")
    >>> q, scale.round(5)
    (array([[ 95, 127],
           [-95, 127]], dtype=int8), array([[0.0063],
           [0.0063]], dtype=float32))
    >>> (q * scale).round(3)
    array([[ 0.598,  0.8  ],
           [-0.598,  0.8  ]], dtype=float32)
    """
    options = (axis, groups, weight_offset, round_before_weight, gate_activation, gate_position)
    quantized = (dtype, scale, block, scale_dtype, absmax_bound, return_y)
    forward = forward_scalars(
        "normalize_quantized", options, eps, None, residual_dtype, center=center, c=typed_key(c)
    )
    inputs = forward_inputs(x, weight=weight, bias=bias, gate=gate, residual=residual)
    return _quantized(quantized_scalars(forward, quantized), inputs, scale, out)


def rms_norm_quantized(
    x: ArrayT,
    weight: SupportsDLPack | None = None,
    *,
    bias: SupportsDLPack | None = None,
    residual: SupportsDLPack | None = None,
    residual_dtype: DTypeLike | None = None,
    eps: float = 1e-6,
    axis: int = -1,
    groups: int = 1,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    gate: SupportsDLPack | None = None,
    gate_activation: Activation = "silu",
    gate_position: GatePosition = "post",
    dtype: QuantizedDType = "float8_e4m3fn",
    scale: SupportsDLPack | float | None = None,
    block: int | None = None,
    scale_dtype: ScaleDType = "float32",
    absmax_bound: float | None = None,
    return_y: bool = False,
    out: QuantizedNorm[SupportsDLPack | None] | None = None,
) -> QuantizedNorm[ArrayT]:
    """Divide rows by their root mean square as `rms_norm` does, and quantise the result.

    ::

        s = x + residual              rounded to its dtype; without residual, s = x
        y = rms_norm(s, weight, bias=bias)
        q = y / scale                 clamped and rounded; the scale is given or found

    Sources, results, errors, rounding and special values are as for `normalize_quantized`.

    Parameters
    ----------
    x, weight, bias, residual : array
    residual_dtype, eps, axis, groups, weight_offset, round_before_weight : optional
    gate, gate_activation, gate_position : optional
        As for `rms_norm_forward`; weight, bias and residual are optional.
    dtype, scale, block, scale_dtype, absmax_bound, return_y, out : optional
        As for `normalize_quantized`.

    Examples
    --------
    >>> import numpy as np
    >>> import cunorm
    >>> x = np.array([[1, 7], [10, -70]], dtype=np.float32)
    >>> q, scale, *_ = cunorm.rms_norm_quantized(x)
    >>> q.astype(np.float32), scale.round(6)
    (array([[  64.,  448.],
           [  64., -448.]], dtype=float32), array([[0.003125],
           [0.003125]], dtype=float32))

    With the residual stream, and a scale that was calibrated before:

    >>> found = cunorm.rms_norm_quantized(x, residual=x, scale=0.01)
    >>> found.q.astype(np.float32), found.scale, found.residual
    (array([[  20.,  144.],
           [  20., -144.]], dtype=float32), 0.01, array([[   2.,   14.],
           [  20., -140.]], dtype=float32))
    """
    options = (axis, groups, weight_offset, round_before_weight, gate_activation, gate_position)
    quantized = (dtype, scale, block, scale_dtype, absmax_bound, return_y)
    forward = forward_scalars("rms_norm_quantized", options, eps, None, residual_dtype)
    inputs = forward_inputs(x, weight=weight, bias=bias, gate=gate, residual=residual)
    return _quantized(quantized_scalars(forward, quantized), inputs, scale, out)


def layer_norm_quantized(
    x: ArrayT,
    weight: SupportsDLPack | None = None,
    bias: SupportsDLPack | None = None,
    *,
    residual: SupportsDLPack | None = None,
    residual_dtype: DTypeLike | None = None,
    eps: float = 1e-5,
    axis: int = -1,
    groups: int = 1,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    gate: SupportsDLPack | None = None,
    gate_activation: Activation = "silu",
    gate_position: GatePosition = "post",
    dtype: QuantizedDType = "float8_e4m3fn",
    scale: SupportsDLPack | float | None = None,
    block: int | None = None,
    scale_dtype: ScaleDType = "float32",
    absmax_bound: float | None = None,
    return_y: bool = False,
    out: QuantizedNorm[SupportsDLPack | None] | None = None,
) -> QuantizedNorm[ArrayT]:
    """Normalise rows as `layer_norm` does, and quantise the result.

    ::

        s = x + residual              rounded to its dtype; without residual, s = x
        y = layer_norm(s, weight, bias)
        q = y / scale                 clamped and rounded; the scale is given or found

    Sources, results, errors, rounding and special values are as for `normalize_quantized`.

    Parameters
    ----------
    x, weight, bias, residual : array
    residual_dtype, eps, axis, groups, weight_offset, round_before_weight : optional
    gate, gate_activation, gate_position : optional
        As for `layer_norm_forward`; weight, bias and residual are optional.
    dtype, scale, block, scale_dtype, absmax_bound, return_y, out : optional
        As for `normalize_quantized`.

    Examples
    --------
    >>> import numpy as np
    >>> import cunorm
    >>> x = np.array([[1, 3]], dtype=np.float32)
    >>> found = cunorm.layer_norm_quantized(x, return_y=True)
    >>> found.q.astype(np.float32), found.y.round(4)
    (array([[-448.,  448.]], dtype=float32), array([[-1.,  1.]], dtype=float32))
    """
    options = (axis, groups, weight_offset, round_before_weight, gate_activation, gate_position)
    quantized = (dtype, scale, block, scale_dtype, absmax_bound, return_y)
    forward = forward_scalars(
        "layer_norm_quantized", options, eps, None, residual_dtype, center=True
    )
    inputs = forward_inputs(x, weight=weight, bias=bias, gate=gate, residual=residual)
    return _quantized(quantized_scalars(forward, quantized), inputs, scale, out)


def _quantized(
    scalars: Scalars, inputs: Arrays, scale: Any, out: QuantizedNorm[Any] | None
) -> QuantizedNorm[Any]:
    function: str = scalars[0]
    validate.out_type(function, out, QuantizedNorm)
    results = out or ROW_QUANTIZED.no_outputs
    arrays = (*inputs, array_or_none(scale), *results, None)
    found = QuantizedNorm(*dispatch(ROW_QUANTIZED, scalars, arrays))
    return found if scale is None else found._replace(scale=scale)
