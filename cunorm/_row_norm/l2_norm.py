# SPDX-License-Identifier: MIT
"""The L2 norm: the function for inference, and the forward and the backward for training."""

from __future__ import annotations  # keeps the names of type aliases in help()

from cunorm._core import validate
from cunorm._core.types import ArrayT, Axis, DTypeLike, SupportsDLPack
from cunorm._dispatch import dispatch
from cunorm._row_norm.kernels import backward_inputs, forward_arrays
from cunorm._row_norm.plan import ROW_BACKWARD, ROW_FORWARD
from cunorm._row_norm.spec import UNIT_LENGTH, RowOptions, backward_scalars, l2_scalars
from cunorm._row_norm.split import given_backward, given_norm
from cunorm.results import NormForward, NormGrads, Sums


def l2_norm(
    x: ArrayT,
    *,
    eps: float = 1e-12,
    axis: Axis = -1,
    groups: int = 1,
    rstd: SupportsDLPack | None = None,
    count: int | None = None,
    dtype: DTypeLike | None = None,
    out: SupportsDLPack | None = None,
) -> ArrayT:
    """Scale each row of x to length 1.

    ::

        y = x / sqrt(sum(x * x) + eps)

    The source is `normalize` with c = 1, but eps is added to the sum of squares, not to their
    mean. ``torch.nn.functional.normalize`` divides by max(sqrt(sum(x * x)), eps) instead. The
    result, errors, rounding, overflow and strides are as for `normalize`.

    Parameters
    ----------
    x : array
    eps, axis, groups, rstd, count, dtype, out : optional
        As for `normalize`.

    Examples
    --------
    >>> import numpy as np
    >>> import cunorm
    >>> x = np.array([[3, 4, 0, 0]], dtype=np.float32)
    >>> cunorm.l2_norm(x).round(4)
    array([[0.6, 0.8, 0. , 0. ]], dtype=float32)
    >>> cunorm.l2_norm(x + 3, groups=2).round(4)
    array([[0.6508, 0.7593, 0.7071, 0.7071]], dtype=float32)
    """
    scalars = l2_scalars("l2_norm", axis, groups, eps=eps, dtype=dtype)
    if rstd is not None or count is not None:
        given = (x, None, None, None, None, rstd, None, out)
        return given_norm(scalars, given, count)
    return dispatch(ROW_FORWARD, scalars, forward_arrays(x, y=out))[0]


def l2_norm_forward(
    x: ArrayT,
    *,
    eps: float = 1e-12,
    axis: Axis = -1,
    groups: int = 1,
    dtype: DTypeLike | None = None,
    out: NormForward[SupportsDLPack | None] | None = None,
) -> NormForward[ArrayT]:
    """Run `l2_norm`, and also return what `l2_norm_backward` needs.

    d is the number of elements of a row, or of a group's slice of a row::

        rstd = sqrt(d) / sqrt(sum(x * x) + eps)
        y = x * rstd / sqrt(d)

    The source, errors and rounding are those of `normalize_forward` with c = 1 and eps / d. mean
    and residual are None.

    Parameters
    ----------
    x : array
    eps, axis, groups, dtype, out : optional
        As for `normalize_forward`, but eps is added to the sum of squares.

    Examples
    --------
    >>> import numpy as np
    >>> import cunorm
    >>> saved = cunorm.l2_norm_forward(np.array([[5, 5, 5, 5]], dtype=np.float32))
    >>> saved.y.round(4), saved.rstd.round(4)
    (array([[0.5, 0.5, 0.5, 0.5]], dtype=float32), array([0.2], dtype=float32))
    """
    validate.out_type("l2_norm_forward", out, NormForward)
    scalars = l2_scalars("l2_norm_forward", axis, groups, eps=eps, dtype=dtype, saves=True)
    return NormForward(*dispatch(ROW_FORWARD, scalars, forward_arrays(x, out=out)))


def l2_norm_backward(
    dy: SupportsDLPack,
    x: ArrayT,
    *,
    rstd: SupportsDLPack,
    axis: Axis = -1,
    groups: int = 1,
    sums: Sums[SupportsDLPack | None] | None = None,
    count: int | None = None,
    out: NormGrads[SupportsDLPack | None] | None = None,
) -> NormGrads[ArrayT]:
    """Return the gradient of `l2_norm`.

    d is the number of elements of a row, or of a group's slice of a row::

        r = x * rstd
        dr = dy / sqrt(d)
        dx = rstd * (dr - r * mean(r * dr))

    The source, errors and rounding are those of `normalize_backward` with c = 1. dresidual is dx
    unless `out` has both; the other gradients are None.

    Parameters
    ----------
    dy, x, rstd : array
    axis, groups, sums, count, out : optional
        As for `normalize_backward`.

    Examples
    --------
    >>> import numpy as np
    >>> import cunorm
    >>> x, dy = np.array([[3, 4]], dtype=np.float32), np.array([[1, 0]], dtype=np.float32)
    >>> saved = cunorm.l2_norm_forward(x)
    >>> cunorm.l2_norm_backward(dy, x, rstd=saved.rstd).dx.round(4)
    array([[ 0.128, -0.096]], dtype=float32)
    """
    validate.out_type("l2_norm_backward", out, NormGrads)
    scalars = backward_scalars("l2_norm_backward", RowOptions(axis, groups), c=UNIT_LENGTH)
    inputs = backward_inputs(dy, x, rstd=rstd)
    outputs = (*(out or ROW_BACKWARD.no_outputs), None)
    if sums is not None or count is not None:
        return given_backward(scalars, inputs, (sums, None, count), outputs)
    return NormGrads(*dispatch(ROW_BACKWARD, scalars, (*inputs, *outputs)))
