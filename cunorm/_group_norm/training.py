# SPDX-License-Identifier: MIT
"""Group norm for training: the forward that saves statistics, and the backward."""

from __future__ import annotations

from typing import Any

from cunorm._core import validate
from cunorm._dispatch import dispatch
from cunorm._group_norm.ops import GROUP_BACKWARD, GROUP_FORWARD
from cunorm._group_norm.spec import NEEDS
from cunorm.results import GroupNormForward, GroupNormGrads


def group_norm_forward(
    x: Any,
    num_groups: int,
    weight: Any = None,
    bias: Any = None,
    *,
    eps: float = 1e-5,
    activation: str | None = None,
    channel_axis: int = -1,
    dtype: Any = None,
    out: GroupNormForward | None = None,
    workspace: Any = None,
) -> GroupNormForward:
    """Run `group_norm`, and return what `group_norm_backward` needs too.

    ::

        rstd = 1 / sqrt(mean((x - mean) ** 2) + eps)        over a group of a sample
        y = g((x - mean) * rstd * weight + bias)

    Source: that of `group_norm`.

    Parameters
    ----------
    x, num_groups, weight, bias : array, int, array and array
    eps, activation, channel_axis, dtype, workspace : optional
        As for `group_norm`; weight and bias are optional.
    out : GroupNormForward, optional
        Arrays to write in place of new ones, or None, for each result: y as for `group_norm`, mean
        and rstd contiguous.

    Returns
    -------
    GroupNormForward
        ``y``, as from `group_norm`; ``mean`` and ``rstd``, of shape ``(N, num_groups)``, float64 if
        x is, else float32.

    Raises
    ------
    TypeError, ValueError, ImportError, RuntimeError
        As `group_norm`, which also says where results are rounded.

    Examples
    --------
    >>> import numpy as np
    >>> import cunorm
    >>> x = np.array([[[1, 3], [5, 7]]], dtype=np.float32)
    >>> saved = cunorm.group_norm_forward(x, 1)
    >>> saved.mean, saved.rstd.round(4)
    (array([[4.]], dtype=float32), array([[0.4472]], dtype=float32))
    """
    validate.out_type("group_norm_forward", out, GroupNormForward)
    params = ("group_norm_forward", num_groups, activation, channel_axis, eps, dtype, True)
    arrays = (x, weight, bias, *(out or GroupNormForward()), workspace)
    return GroupNormForward(*dispatch(GROUP_FORWARD, params, arrays))


def group_norm_backward(
    dy: Any,
    x: Any,
    num_groups: int,
    weight: Any = None,
    bias: Any = None,
    *,
    mean: Any,
    rstd: Any,
    activation: str | None = None,
    channel_axis: int = -1,
    needs: tuple[str, ...] = NEEDS,
    out: GroupNormGrads | None = None,
    workspace: Any = None,
    accumulate: bool = False,
) -> GroupNormGrads:
    """Return the gradients of `group_norm`.

    With mean() over the positions and channels of a group of a sample, g' the derivative of the
    activation (relu'(0) is 0), and n computed again from x::

        r = (x - mean) * rstd
        n = r * weight + bias
        h = dy * g'(n)
        dx = rstd * (weight * h - mean(weight * h) - r * mean(weight * h * r))
        dweight = sum over samples and positions of h * r
        dbias = sum over samples and positions of h

    Source: equations 52 to 72 of "GroupNorm Chronicles" (channels-last-groupnorm), with their sums
    taken about the mean, which does not cancel where the mean is large.

    Parameters
    ----------
    dy : array
        Gradient of y, of x's shape; float16, bfloat16, float32 or float64. It is copied once where
        its memory layout is not that of x.
    x, num_groups, weight, bias, mean, rstd, activation, channel_axis : array, int and str
        As the forward got or returned them. Without an activation, of bias only shape and dtype are
        used, for dbias.
    needs : tuple of str, optional
        The operands whose gradients are wanted, of "x", "weight" and "bias".
    out : GroupNormGrads, optional
        Arrays to write in place of new ones, or None, for each gradient; their dtypes are those of
        the gradients. dx has the memory layout of x and may be exactly dy or x.
    workspace, accumulate : optional
        As for `group_norm` and `normalize_backward`.

    Returns
    -------
    GroupNormGrads
        ``dx``, in x's dtype and memory layout, ``dweight`` and ``dbias``, in their parameter's
        dtype. None for what is not in `needs` or has no operand.

    Raises
    ------
    TypeError, ValueError, ImportError, RuntimeError
        As `group_norm`; also where `needs` has another name, or `accumulate` has nothing to add to.

    Notes
    -----
    Rounding: as in `group_norm`, once on each store. The mean, which is rounded, is corrected by
    the mean of x - mean where that counts, but not in n, which g' needs before. Every result
    repeats bit for bit, and a sample's dx depends on no other sample.

    Examples
    --------
    >>> import numpy as np
    >>> import cunorm
    >>> x, dy = np.array([[[1], [2], [3]]], dtype=np.float32), np.eye(3, 1, dtype=np.float32)[None]
    >>> saved = cunorm.group_norm_forward(x, 1)
    >>> grads = cunorm.group_norm_backward(dy, x, 1, mean=saved.mean, rstd=saved.rstd)
    >>> grads.dx[0, :, 0].round(3)
    array([ 0.204, -0.408,  0.204], dtype=float32)
    """
    validate.out_type("group_norm_backward", out, GroupNormGrads)
    params = ("group_norm_backward", num_groups, activation, channel_axis, needs, accumulate)
    arrays = (dy, x, mean, rstd, weight, bias, *(out or GroupNormGrads()), workspace)
    return GroupNormGrads(*dispatch(GROUP_BACKWARD, params, arrays))
