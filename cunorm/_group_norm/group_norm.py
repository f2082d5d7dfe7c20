# SPDX-License-Identifier: MIT
"""Group norm and instance norm with an activation, for inference."""

from __future__ import annotations

from typing import Any

from cunorm._dispatch import dispatch
from cunorm._group_norm.ops import GROUP_FORWARD
from cunorm._group_norm.spec import EACH_CHANNEL


def group_norm(
    x: Any,
    num_groups: int,
    weight: Any = None,
    bias: Any = None,
    *,
    eps: float = 1e-5,
    activation: str | None = None,
    channel_axis: int = -1,
    dtype: Any = None,
    out: Any = None,
    workspace: Any = None,
) -> Any:
    """Shift and scale each group of channels of each sample to mean 0 and variance 1.

    The mean is over all positions and the channels of one group of one sample, weight and bias are
    those of the channel, g is the activation::

        n = (x - mean) / sqrt(mean((x - mean) ** 2) + eps) * weight + bias
        y = g(n)

    Source: Y. Wu and K. He, "Group Normalization", arXiv:1803.08494; the formulas fused with an
    activation are those of "GroupNorm Chronicles" (channels-last-groupnorm).

    Parameters
    ----------
    x : array
        Samples, channels and any number of axes of positions, none to three and more: of shape
        ``(N, ..., C)`` or, with channel_axis 1, ``(N, C, ...)``. float16, bfloat16, float32 or
        float64; an array of NumPy, CuPy, PyTorch or JAX, or any other object with ``__dlpack__``.
    num_groups : int
        Into how many groups of neighbours the channels fall; a divisor of C.
    weight, bias : array, optional
        Of shape ``(C,)``, each of its own dtype of the four, and on x's device as every array of a
        call. Without weight the factor is 1, without bias nothing is added.
    eps : float, optional
        At least 0, in the unit of x squared; added to the variance.
    activation : str, optional
        g, by its name, such as "silu" or "relu"; None is "identity". The error for another name
        lists all.
    channel_axis : int, optional
        -1 or 1: which axis of x is that of the channels. It names the axis, not the layout of the
        memory: a PyTorch tensor of shape (N, C, H, W) has 1, in ``torch.channels_last`` too.
    dtype : dtype, optional
        y's, as a name or a dtype of any of the frameworks; by default x's.
    out : array, optional
        Written and returned instead of a new array; its dtype is y's. It has the memory layout of
        x, may be exactly x, and overlaps no other input.
    workspace : array, optional
        Contiguous memory to use instead of allocating some, on x's device and of at least the bytes
        that `workspace_size` says. What it held is lost.

    Returns
    -------
    array
        y, of x's shape, memory layout, framework and device.

    Raises
    ------
    TypeError
        If an argument is of a type, or an array of a dtype, that is not among those above, or an
        array stands for something other than its memory (masked array, tensor subclass, tracer).
    ValueError
        If shapes, devices, `eps`, `channel_axis`, `out` or `workspace` do not fit, `num_groups`
        does not divide C, x has less than two axes, no channels or no positions, the activation is
        unknown, or a tensor requires grad. All this is checked before anything is written.
    ImportError
        If x is on CUDA and CuPy or NVRTC is not installed.
    RuntimeError
        If the kernel does not compile.

    Notes
    -----
    The layout of the memory is read off the strides. With channels last, the channels of a position
    are contiguous and one stride leads from position to position; with channels first, the
    positions of a channel are contiguous. Both are read as they are, and y gets the same layout; x
    with other strides is copied once, to the one of the two that its strides are nearer to; where
    that says nothing, to that of its shape.

    Rounding: statistics, sums and products are float64 if x is, else float32, and y is rounded to
    its dtype once, on the store. The mean is corrected by the mean of what it leaves, so a constant
    group gives y = g(bias) exactly, with eps > 0. A sample's y depends on no other sample, bit for
    bit. What is not finite stays in its group. Squares of deviations whose sum passes 3.4e38
    overflow in float32.

    Examples
    --------
    Two samples of three positions, each of four channels in two groups:

    >>> import numpy as np
    >>> import cunorm
    >>> x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    >>> cunorm.group_norm(x, 2)[0].round(2)
    array([[-1.36, -1.06, -1.36, -1.06],
           [-0.15,  0.15, -0.15,  0.15],
           [ 1.06,  1.36,  1.06,  1.36]], dtype=float32)

    An image with the channels first, and with an activation:

    >>> image = x.reshape(1, 2, 3, 4)
    >>> cunorm.group_norm(image, 1, activation="relu", channel_axis=1)[0, 1, :, 3].round(2)
    array([0.51, 1.08, 1.66], dtype=float32)
    """
    params = ("group_norm", num_groups, activation, channel_axis, eps, dtype)
    return dispatch(GROUP_FORWARD, params, (x, weight, bias, out, None, None, workspace))[0]


def instance_norm(
    x: Any,
    weight: Any = None,
    bias: Any = None,
    *,
    eps: float = 1e-5,
    activation: str | None = None,
    channel_axis: int = -1,
    dtype: Any = None,
    out: Any = None,
    workspace: Any = None,
) -> Any:
    """Apply `group_norm` with each channel a group of its own.

    With the mean over the positions of one channel of one sample, and g the activation::

        n = (x - mean) / sqrt(mean((x - mean) ** 2) + eps) * weight + bias
        y = g(n)

    Source: D. Ulyanov, A. Vedaldi and V. Lempitsky, "Instance Normalization: The Missing Ingredient
    for Fast Stylization", arXiv:1607.08022.

    Parameters
    ----------
    x, weight, bias : array
        As for `group_norm`; its gradients are those of `group_norm_backward` with C groups.
    eps, activation, channel_axis, dtype, out, workspace : optional
        As for `group_norm`.

    Returns
    -------
    array
        y, as from `group_norm`.

    Raises
    ------
    TypeError, ValueError, ImportError, RuntimeError
        As `group_norm` does.

    Examples
    --------
    >>> import numpy as np
    >>> import cunorm
    >>> cunorm.instance_norm(np.array([[[1, 10], [3, 70]]], dtype=np.float32)).round(4)
    array([[[-1., -1.],
            [ 1.,  1.]]], dtype=float32)
    """
    params = ("instance_norm", EACH_CHANNEL, activation, channel_axis, eps, dtype)
    return dispatch(GROUP_FORWARD, params, (x, weight, bias, out, None, None, workspace))[0]
