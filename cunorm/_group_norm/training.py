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

    Source: that of `group_norm`, which also says where results are rounded.

    Parameters
    ----------
    x, num_groups : array, int
        As for `group_norm`.
    weight, bias, eps, activation, channel_axis, dtype, workspace : optional
        As for `group_norm`.
    out : GroupNormForward, optional
        Arrays for some of the results, None for the others: y as for `group_norm`, mean and rstd
        contiguous.

    Returns
    -------
    GroupNormForward
        ``y``, as from `group_norm`; ``mean`` and ``rstd``, of shape ``(N, num_groups)``, float64 if
        x is, else float32.

    Raises
    ------
    TypeError, ValueError, ImportError, RuntimeError
        As `group_norm` does.

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
        Gradient that reaches y, of x's shape; float16, bfloat16, float32 or float64. It is copied
        once where its memory layout is not that of x.
    x, num_groups : array, int
        As the forward got them.
    weight, bias, activation, channel_axis : optional
        As the forward got them. Without an activation, only shape and dtype of bias matter, which
        dbias gets.
    mean, rstd : array
        The forward's.
    needs : tuple of str, optional
        Those of "x", "weight" and "bias" whose gradients are wanted; the others are None.
    out : GroupNormGrads, optional
        Arrays for some of the gradients, which set their dtypes, None for the others. dx has the
        memory layout of x and may be exactly dy or x.
    workspace : array, optional
        As for `group_norm`.
    accumulate : bool, optional
        Whether dweight and dbias are added to what the arrays given for them in `out`, of float32
        or float64, hold.

    Returns
    -------
    GroupNormGrads
        ``dx``, in x's dtype and memory layout, ``dweight`` and ``dbias``, in their parameter's
        dtype; None where the operand is absent or not in `needs`.

    Raises
    ------
    TypeError, ValueError, ImportError, RuntimeError
        As `group_norm` does, and ValueError if a name in `needs` is none of those, or `accumulate`
        has nothing to add to.

    Notes
    -----
    Rounding: as in `group_norm`, once on each store. The mean, which is rounded, is corrected by
    the mean of x - mean where that counts; n is computed with the mean as it is given, as g' is
    needed before. Every result is the same from run to run, and a sample's dx depends on no other
    sample, bit for bit.

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
