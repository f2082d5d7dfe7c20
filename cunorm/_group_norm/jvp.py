# SPDX-License-Identifier: MIT
"""Group norms in forward mode: the tangent of y."""

from __future__ import annotations  # keeps the names of type aliases in help()

from cunorm._core.types import Activation, ArrayT, DTypeLike, SupportsDLPack
from cunorm._dispatch import dispatch
from cunorm._group_norm.plan import GROUP_JVP
from cunorm._group_norm.spec import jvp_scalars


def group_norm_jvp(
    x: ArrayT,
    num_groups: int,
    weight: SupportsDLPack | None = None,
    bias: SupportsDLPack | None = None,
    *,
    x_tangent: SupportsDLPack,
    weight_tangent: SupportsDLPack | None = None,
    bias_tangent: SupportsDLPack | None = None,
    mean: SupportsDLPack,
    rstd: SupportsDLPack,
    activation: Activation | None = None,
    channel_axis: int = -1,
    dtype: DTypeLike | None = None,
    out: SupportsDLPack | None = None,
) -> ArrayT:
    """Return the tangent of y of `group_norm`: a Jacobian-vector product, for forward mode.

    A tangent is marked by '; that of weight or bias is 0 if it is not given. mean() is over a
    group, g is the activation, and g' its derivative::

        r = (x - mean) * rstd
        r' = rstd * (x' - mean(x') - r * mean(r * x'))
        n = weight * r + bias
        y' = g'(n) * (weight * r' + weight' * r + bias')

    The source is that of `group_norm_backward`, of which this is the transpose. It is exact for
    any eps: rstd contains eps. For `instance_norm`, give C groups.

    Parameters
    ----------
    x, weight, bias : array
        Those of the forward; weight and bias are optional.
    x_tangent : array
        The tangent of x, of x's shape; if x has none, give zeros. Each tangent may have any of the
        four dtypes.
    weight_tangent, bias_tangent : array, optional
        The tangents of weight and bias, of any shape that weight may have.
    mean, rstd : array
        The forward's results.
    num_groups, activation, channel_axis : int, str and int
        The values that the forward got; the last two are optional.
    dtype : dtype, optional
        The dtype of the tangent; by default x's.
    out : array, optional
        The array that is written and returned instead of a new one. It has the memory layout of x,
        may be exactly x or x_tangent, and overlaps no other input.

    Returns
    -------
    array
        The tangent of y, with x's shape, memory layout, framework and device.

    Raises
    ------
    TypeError, ValueError, ImportError, RuntimeError
        As for `group_norm`, and also if weight is missing beside its tangent.

    Notes
    -----
    Rounding: as in `group_norm`, once, on the store. The rounding error of the mean is measured on
    x and removed. No bit of a sample's tangent depends on other samples.

    Examples
    --------
    >>> import numpy as np
    >>> import cunorm
    >>> x, x_tangent = np.float32([[[1], [2], [3]]]), np.float32([[[1], [0], [0]]])
    >>> saved = cunorm.group_norm_forward(x, 1)
    >>> statistics = {"mean": saved.mean, "rstd": saved.rstd}
    >>> cunorm.group_norm_jvp(x, 1, x_tangent=x_tangent, **statistics)[0, :, 0].round(3)
    array([ 0.204, -0.408,  0.204], dtype=float32)
    """
    scalars = jvp_scalars("group_norm_jvp", num_groups, activation, channel_axis, dtype)
    operands = (x, weight, bias, mean, rstd)
    tangents = (x_tangent, weight_tangent, bias_tangent)
    return dispatch(GROUP_JVP, scalars, (*operands, *tangents, out, None))[0]
