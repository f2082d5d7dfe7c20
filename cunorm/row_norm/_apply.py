# SPDX-License-Identifier: MIT
"""The row norms for inference: y alone. `normalize` documents what they all have in common."""

from __future__ import annotations

from typing import Any

from cunorm.results import NormForward
from cunorm.row_norm._forward import Arrays, Norm, Options, forward
from cunorm.row_norm._variant import Variant


def normalize(
    x: Any,
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
    out: Any = None,
) -> Any:
    """Normalise each row of x to the length c, by default the square root of its width.

    A row is all the axes from `axis` to the last, d its number of elements, mean() over a row::

        q = x - mean(x)     if center, else x
        r = q / sqrt(mean(q * q) + eps)
        y = c / sqrt(d) * r * weight + bias

    Source: "Normalize with Residual or Gate" (xopes), with eps added to the mean square.

    Parameters
    ----------
    x : array
        Of at least one axis; float16, bfloat16, float32 or float64. An array of NumPy, CuPy,
        PyTorch or JAX, or any other object with ``__dlpack__``.
    weight, bias : array, optional
        Of the row's shape, ``x.shape[axis:]``, each of its own dtype of the four, and on x's device
        as every array of a call. Without weight the factor is 1, without bias nothing is added.
    c : float, optional
        The length of a row before weight and bias, in y's unit; a constant, never learned. By
        default sqrt(d), with which the mean square of a row is 1.
    center : bool, optional
        Whether the mean of the row is subtracted first.
    eps : float, optional
        At least 0, in the unit of x squared. It is inside the root.
    axis : int, optional
        The first axis of a row, which goes to the last axis, as in ONNX's LayerNormalization.
        PyTorch's ``normalized_shape`` is the shape of such a row. PyTorch's ``dim=`` is another
        thing, one axis alone: the two agree only for the last.
    dtype : dtype, optional
        y's, as a name or a dtype of any of the frameworks. By default x's.
    out : array, optional
        Written and returned instead of a new array; its dtype is y's. It may be x itself, and
        overlaps an input in no other way.

    Returns
    -------
    array
        y, of x's shape, framework and device; on CUDA in the order of its current stream.

    Raises
    ------
    TypeError
        If an argument is of a type, or an array of a dtype, that is not among those above, or an
        array stands for something other than its memory (masked array, tensor subclass, tracer).
    ValueError
        If shapes, devices, `axis`, `eps`, `c` or `out` do not fit, a row has no or 2**31 elements,
        or a tensor requires grad. All this is checked before anything is written.
    ImportError
        If x is on CUDA and CuPy or NVRTC is not installed.
    RuntimeError
        If the kernel does not compile.

    Notes
    -----
    Rounding: statistics, sums and products are float64 if x is, else float32, and y is rounded to
    its dtype once, on the store. The mean is corrected by the mean of what it leaves, so a constant
    row gives y = bias exactly, with eps > 0. A row's y depends on no other row, nor on strides, bit
    for bit.

    Overflow: a sum of squares beyond 3.4e38 is infinite in float32, and the row then is what IEEE
    arithmetic makes of it, zeros or NaN. Elements of float16 are too small for that; those of
    bfloat16 and float32, from 1.8e19 on, are not.

    Strides: rows may lie anywhere, in any order, at no copy, if each row is contiguous and the axes
    before it, those that one stride walks taken as one, are at most three. Another input is copied
    once; another `out` is an error.

    Without a C++ compiler, host arrays are normalised by `cunorm.reference`, with one warning.

    Examples
    --------
    >>> import numpy as np
    >>> import cunorm
    >>> x = np.array([[3, 4], [-30, 40]], dtype=np.float32)
    >>> cunorm.normalize(x, c=1).round(4)
    array([[ 0.6,  0.8],
           [-0.6,  0.8]], dtype=float32)
    >>> cunorm.normalize(x, center=True).round(3)
    array([[-1.,  1.],
           [-1.,  1.]], dtype=float32)
    """
    variant = Variant(center, axis, groups, round_before_weight, gate_activation, gate_position)
    norm = Norm("normalize", variant, eps, c, weight_offset=weight_offset)
    arrays = Arrays(x, gate=gate, weight=weight, bias=bias)
    return _y(norm, arrays, Options(dtype), out)


def rms_norm(
    x: Any,
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
    out: Any = None,
) -> Any:
    """Divide each row of x by its root mean square.

    ::

        y = x / sqrt(mean(x * x) + eps) * weight

    Source: B. Zhang and R. Sennrich, "Root Mean Square Layer Normalization", arXiv:1910.07467.

    Parameters
    ----------
    x : array
        Of at least one axis; float16, bfloat16, float32 or float64.
    weight : array, optional
        Of the row's shape, ``x.shape[axis:]``, of its own dtype of the four.
    eps : float, optional
        At least 0, in the unit of x squared. PyTorch's default is the resolution of x's dtype.
    axis : int, optional
        The first axis of a row, which goes to the last axis; not PyTorch's ``dim=``, see
        `normalize`.
    dtype : dtype, optional
        y's; by default x's.
    out : array, optional
        Written and returned instead of a new array; it may be x itself.

    Returns
    -------
    array
        y, of x's shape, framework and device.

    Raises
    ------
    TypeError, ValueError, ImportError, RuntimeError
        As `normalize` does.

    Notes
    -----
    Rounding, overflow and which strides are copied are those of `normalize`: in particular, the
    product with weight is not rounded before it is stored as y.

    Examples
    --------
    >>> import numpy as np
    >>> import cunorm
    >>> x = np.array([[1, 7], [10, -70]], dtype=np.float32)
    >>> weight = np.array([1, 10], dtype=np.float16)
    >>> cunorm.rms_norm(x, weight).round(4)
    array([[  0.2,  14. ],
           [  0.2, -14. ]], dtype=float32)
    """
    variant = Variant(False, axis, groups, round_before_weight, gate_activation, gate_position)
    norm = Norm("rms_norm", variant, eps, weight_offset=weight_offset)
    arrays = Arrays(x, gate=gate, weight=weight)
    return _y(norm, arrays, Options(dtype), out)


def layer_norm(
    x: Any,
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
    out: Any = None,
) -> Any:
    """Shift and scale each row of x to mean 0 and variance 1.

    ::

        q = x - mean(x)
        y = q / sqrt(mean(q * q) + eps) * weight + bias

    Source: J. L. Ba, J. R. Kiros and G. E. Hinton, "Layer Normalization", arXiv:1607.06450.

    Parameters
    ----------
    x : array
        Of at least one axis; float16, bfloat16, float32 or float64.
    weight, bias : array, optional
        Of the row's shape, ``x.shape[axis:]``, each of its own dtype of the four.
    eps : float, optional
        At least 0, in the unit of x squared; added to the variance.
    axis : int, optional
        The first axis of a row, which goes to the last axis, as in ONNX; PyTorch's
        ``normalized_shape`` is ``x.shape[axis:]``. See `normalize`.
    dtype : dtype, optional
        y's; by default x's.
    out : array, optional
        Written and returned instead of a new array; it may be x itself.

    Returns
    -------
    array
        y, of x's shape, framework and device.

    Raises
    ------
    TypeError, ValueError, ImportError, RuntimeError
        As `normalize` does.

    Notes
    -----
    Rounding, overflow and which strides are copied are those of `normalize`.

    Examples
    --------
    >>> import numpy as np
    >>> import cunorm
    >>> x = np.array([[1, 3], [10000, 10002]], dtype=np.float32)
    >>> cunorm.layer_norm(x, bias=np.array([0, 5], dtype=np.float32)).round(4)
    array([[-1.,  6.],
           [-1.,  6.]], dtype=float32)
    """
    variant = Variant(True, axis, groups, round_before_weight, gate_activation, gate_position)
    norm = Norm("layer_norm", variant, eps, weight_offset=weight_offset)
    arrays = Arrays(x, gate=gate, weight=weight, bias=bias)
    return _y(norm, arrays, Options(dtype), out)


def l2_norm(
    x: Any,
    *,
    eps: float = 1e-12,
    axis: int = -1,
    groups: int = 1,
    dtype: Any = None,
    out: Any = None,
) -> Any:
    """Scale each row of x to length 1.

    ::

        y = x / sqrt(sum(x * x) + eps)

    Source: `normalize` with c = 1. Note that eps is added to the sum of squares, not to their mean,
    and inside the root; ``torch.nn.functional.normalize`` divides by max(sqrt(sum(x * x)), eps).

    Parameters
    ----------
    x : array
        Of at least one axis; float16, bfloat16, float32 or float64.
    eps : float, optional
        At least 0, in the unit of x squared.
    axis : int, optional
        The first axis of a row, which goes to the last axis; PyTorch's ``dim=`` is one axis alone,
        so the two agree only for the last. See `normalize`.
    dtype : dtype, optional
        y's; by default x's.
    out : array, optional
        Written and returned instead of a new array; it may be x itself.

    Returns
    -------
    array
        y, of x's shape, framework and device.

    Raises
    ------
    TypeError, ValueError, ImportError, RuntimeError
        As `normalize` does.

    Notes
    -----
    Rounding, overflow and which strides are copied are those of `normalize`.

    Examples
    --------
    >>> import numpy as np
    >>> import cunorm
    >>> cunorm.l2_norm(np.array([[3, 4], [0, 0]], dtype=np.float32)).round(4)
    array([[0.6, 0.8],
           [0. , 0. ]], dtype=float32)
    """
    norm = Norm("l2_norm", Variant(axis=axis, groups=groups), eps, 1.0, eps_of_sum=True)
    arrays = Arrays(x)
    return _y(norm, arrays, Options(dtype), out)


_NOTHING = dict.fromkeys(NormForward._fields)


def _y(norm: Norm, arrays: Arrays, options: Options, out: Any) -> Any:
    return forward(norm, arrays, options, {**_NOTHING, "y": out}).y
