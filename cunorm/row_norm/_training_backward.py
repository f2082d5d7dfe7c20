# SPDX-License-Identifier: MIT
"""The row norms' backward: gradients from what the forward returned. Nothing is kept inside."""

from __future__ import annotations

from typing import Any

from cunorm import _outputs
from cunorm.results import NormGrads
from cunorm.row_norm._backward import NEEDS, GradArrays, NormBackward, Places, backward
from cunorm.row_norm._variant import Variant


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
    groups: int = 1,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    gate: Any = None,
    gate_activation: str = "silu",
    gate_position: str = "post",
    x_dtype: Any = None,
    needs: tuple[str, ...] = NEEDS,
    out: NormGrads | None = None,
    workspace: Any = None,
    accumulate: bool = False,
) -> NormGrads:
    """Return the gradients of `normalize` and of `add_normalize`.

    With k = c / sqrt(d), d the number of elements of a row, and mean() over a row::

        r = (x - mean) * rstd                                   without center, x * rstd
        dr = k * dy * weight
        dx = rstd * (dr - r * mean(r * dr) - mean(dr)) + d_residual     mean(dr) only with center
        dweight = sum over rows of k * dy * r
        dbias = sum over rows of dy

    Source: "Normalize with Residual or Gate" (xopes). It is exact with eps, which rstd contains.

    Parameters
    ----------
    dy : array
        Gradient that reaches y, of x's shape; float16, bfloat16, float32 or float64.
    x : array
        What was normalised: the forward's ``residual`` where it has one, else its x. Of its own
        dtype of the four, as every array here but rstd and mean.
    weight, bias : array, optional
        The forward's. Of bias only the shape and the dtype matter, which dbias gets.
    rstd, mean : array
        The forward's, of shape ``x.shape[:axis]``; float64 if x or dx is, else float32. The mean is
        needed with center, and not read without.
    d_residual : array, optional
        Gradient that reaches the new residual stream from above, of x's shape.
    c, center, axis : float, bool and int, optional
        As the forward got them: the row's length, whether its mean was subtracted, its first axis
        (not PyTorch's ``dim=``, see `normalize`).
    x_dtype : dtype, optional
        dx's; by default x's. Where the forward added an x of bfloat16 to a stream of float32, give
        bfloat16: then dx (bfloat16) and dresidual (float32) are written in one pass.
    needs : tuple of str, optional
        The operands whose gradients are wanted, of "x" (dx and dresidual), "weight" and "bias".
        "gate" is understood too, and asks for nothing. By default all that there are.
    out : NormGrads, optional
        Arrays to write in place of new ones, or None, for each gradient. An array may be exactly an
        input, and overlaps none otherwise.

    Returns
    -------
    NormGrads
        ``dx``, the branch's gradient, and ``dresidual``, the stream's, of x's shape: the same
        numbers, dresidual in x's dtype, and the same array where the dtypes agree. ``dweight`` and
        ``dbias``, of the row's shape and their parameter's dtype. None for what is not in `needs`
        or has no operand; ``dgate`` is always None.

    Raises
    ------
    TypeError, ValueError, ImportError, RuntimeError
        As `normalize` does; also where the mean is missing or `needs` has another name.

    Notes
    -----
    Rounding: everything is computed in rstd's dtype, and each result rounded once, on the store.
    The rounding error of the mean is measured on x and taken out. dweight and dbias are sums of
    parts in a fixed order, so that they repeat bit for bit, on a CPU with any number of threads.
    Overflow and which strides are copied are as for `normalize`.

    Examples
    --------
    >>> import numpy as np
    >>> import cunorm
    >>> x, weight = np.array([[3, 4]], dtype=np.float32), np.ones(2, dtype=np.float16)
    >>> saved = cunorm.normalize_forward(x, weight, c=1)
    >>> dy = np.array([[1, 0]], dtype=np.float32)
    >>> grads = cunorm.normalize_backward(dy, x, weight, rstd=saved.rstd, c=1)
    >>> grads.dx.round(4), grads.dweight.round(1)
    (array([[ 0.128, -0.096]], dtype=float32), array([0.6, 0. ], dtype=float16))
    """
    variant = Variant(center, axis, groups, round_before_weight, gate_activation, gate_position)
    norm = NormBackward(
        "normalize_backward",
        variant,
        c,
        weight_offset=weight_offset,
        x_dtype=x_dtype,
        needs=needs,
        accumulate=accumulate,
    )
    arrays = GradArrays(
        dy, x, rstd, mean=mean, d_residual=d_residual, gate=gate, weight=weight, bias=bias
    )
    return _backward(norm, arrays, out, workspace)


def rms_norm_backward(
    dy: Any,
    x: Any,
    weight: Any = None,
    *,
    rstd: Any,
    d_residual: Any = None,
    axis: int = -1,
    groups: int = 1,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    gate: Any = None,
    gate_activation: str = "silu",
    gate_position: str = "post",
    x_dtype: Any = None,
    needs: tuple[str, ...] = NEEDS,
    out: NormGrads | None = None,
    workspace: Any = None,
    accumulate: bool = False,
) -> NormGrads:
    """Return the gradients of `rms_norm` and of `add_rms_norm`.

    ::

        r = x * rstd
        dr = dy * weight
        dx = rstd * (dr - r * mean(r * dr)) + d_residual
        dweight = sum over rows of dy * r

    Source: `normalize_backward`, of which this is a case. Rounding, overflow and which strides are
    copied are as said there.

    Parameters
    ----------
    dy : array
        Gradient that reaches y, of x's shape; float16, bfloat16, float32 or float64.
    x : array
        What was normalised: the forward's ``residual`` where it has one, else its x.
    weight : array, optional
        The forward's, of the row's shape.
    rstd : array
        The forward's, of shape ``x.shape[:axis]``; float64 if x or dx is, else float32.
    d_residual : array, optional
        Gradient that reaches the new residual stream from above, of x's shape.
    axis : int, optional
        The first axis of a row, as the forward got it; not PyTorch's ``dim=``, see `normalize`.
    x_dtype : dtype, optional
        dx's; by default x's.
    needs : tuple of str, optional
        Which gradients are wanted, of "x" and "weight"; by default both.
    out : NormGrads, optional
        Arrays to write in place of new ones, or None, for each gradient.

    Returns
    -------
    NormGrads
        ``dx``, ``dresidual`` and ``dweight`` as from `normalize_backward`.

    Raises
    ------
    TypeError, ValueError, ImportError, RuntimeError
        As `normalize_backward` does.

    Examples
    --------
    >>> import numpy as np
    >>> import cunorm
    >>> x, dy = np.array([[1, 7]], dtype=np.float32), np.array([[1, 0]], dtype=np.float32)
    >>> saved = cunorm.rms_norm_forward(x)
    >>> cunorm.rms_norm_backward(dy, x, rstd=saved.rstd).dx.round(4)
    array([[ 0.196, -0.028]], dtype=float32)
    """
    variant = Variant(False, axis, groups, round_before_weight, gate_activation, gate_position)
    norm = NormBackward(
        "rms_norm_backward",
        variant,
        weight_offset=weight_offset,
        x_dtype=x_dtype,
        needs=needs,
        accumulate=accumulate,
    )
    arrays = GradArrays(dy, x, rstd, d_residual=d_residual, gate=gate, weight=weight)
    return _backward(norm, arrays, out, workspace)


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
    groups: int = 1,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    gate: Any = None,
    gate_activation: str = "silu",
    gate_position: str = "post",
    x_dtype: Any = None,
    needs: tuple[str, ...] = NEEDS,
    out: NormGrads | None = None,
    workspace: Any = None,
    accumulate: bool = False,
) -> NormGrads:
    """Return the gradients of `layer_norm` and of `add_layer_norm`.

    ::

        r = (x - mean) * rstd
        dr = dy * weight
        dx = rstd * (dr - r * mean(r * dr) - mean(dr)) + d_residual
        dweight = sum over rows of dy * r
        dbias = sum over rows of dy

    Source: `normalize_backward`, of which this is a case. Rounding, overflow and which strides are
    copied are as said there.

    Parameters
    ----------
    dy : array
        Gradient that reaches y, of x's shape; float16, bfloat16, float32 or float64.
    x : array
        What was normalised: the forward's ``residual`` where it has one, else its x.
    weight, bias : array, optional
        The forward's, of the row's shape. The values of bias are not read.
    rstd, mean : array
        The forward's, of shape ``x.shape[:axis]``; float64 if x or dx is, else float32.
    d_residual : array, optional
        Gradient that reaches the new residual stream from above, of x's shape.
    axis : int, optional
        The first axis of a row, as the forward got it; not PyTorch's ``dim=``, see `normalize`.
    x_dtype : dtype, optional
        dx's; by default x's.
    needs : tuple of str, optional
        Which gradients are wanted, of "x", "weight" and "bias"; by default all.
    out : NormGrads, optional
        Arrays to write in place of new ones, or None, for each gradient.

    Returns
    -------
    NormGrads
        ``dx``, ``dresidual``, ``dweight`` and ``dbias`` as from `normalize_backward`.

    Raises
    ------
    TypeError, ValueError, ImportError, RuntimeError
        As `normalize_backward` does.

    Examples
    --------
    >>> import numpy as np
    >>> import cunorm
    >>> x, dy = np.array([[1, 2, 3]], dtype=np.float32), np.array([[1, 0, 0]], dtype=np.float32)
    >>> saved = cunorm.layer_norm_forward(x)
    >>> grads = cunorm.layer_norm_backward(dy, x, rstd=saved.rstd, mean=saved.mean)
    >>> grads.dx.round(3)
    array([[ 0.204, -0.408,  0.204]], dtype=float32)
    """
    variant = Variant(True, axis, groups, round_before_weight, gate_activation, gate_position)
    norm = NormBackward(
        "layer_norm_backward",
        variant,
        weight_offset=weight_offset,
        x_dtype=x_dtype,
        needs=needs,
        accumulate=accumulate,
    )
    arrays = GradArrays(
        dy, x, rstd, mean=mean, d_residual=d_residual, gate=gate, weight=weight, bias=bias
    )
    return _backward(norm, arrays, out, workspace)


def l2_norm_backward(
    dy: Any, x: Any, *, rstd: Any, axis: int = -1, groups: int = 1, out: NormGrads | None = None
) -> NormGrads:
    """Return the gradient of `l2_norm`.

    With d the number of elements of a row::

        r = x * rstd
        dr = dy / sqrt(d)
        dx = rstd * (dr - r * mean(r * dr))

    Source: `normalize_backward` with c = 1. Rounding, overflow and which strides are copied are as
    said there.

    Parameters
    ----------
    dy : array
        Gradient that reaches y, of x's shape; float16, bfloat16, float32 or float64.
    x : array
        The forward's.
    rstd : array
        The forward's, of shape ``x.shape[:axis]``; float64 if x is, else float32.
    axis : int, optional
        The first axis of a row, as the forward got it; not PyTorch's ``dim=``, see `normalize`.
    out : NormGrads, optional
        An array to write in place of a new one, as dx.

    Returns
    -------
    NormGrads
        ``dx``, and the same array as ``dresidual``, as from `normalize_backward`.

    Raises
    ------
    TypeError, ValueError, ImportError, RuntimeError
        As `normalize_backward` does.

    Examples
    --------
    >>> import numpy as np
    >>> import cunorm
    >>> x, dy = np.array([[3, 4]], dtype=np.float32), np.array([[1, 0]], dtype=np.float32)
    >>> saved = cunorm.l2_norm_forward(x)
    >>> cunorm.l2_norm_backward(dy, x, rstd=saved.rstd).dx.round(4)
    array([[ 0.128, -0.096]], dtype=float32)
    """
    norm = NormBackward("l2_norm_backward", Variant(axis=axis, groups=groups), 1.0)
    arrays = GradArrays(dy, x, rstd)
    return _backward(norm, arrays, out)


def _backward(
    norm: NormBackward, arrays: GradArrays, out: NormGrads | None, workspace: Any = None
) -> NormGrads:
    places = Places(_outputs.fields(norm.function, out, NormGrads), workspace)
    return backward(norm, arrays, places)
