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
        Of shape ``(N, ..., C)`` or, with channel_axis 1, ``(N, C, ...)``: samples, channels and any
        number of axes of positions. float16, bfloat16, float32 or float64; an array of NumPy, CuPy,
        PyTorch or JAX, or any other object with ``__dlpack__``.
    num_groups : int
        The number of groups of neighbouring channels; a divisor of C.
    weight, bias : array, optional
        Of shape ``(C,)``, each of its own dtype of the four. All arrays of a call are on one
        device. By default the factor 1, and no bias.
    eps : float, optional
        At least 0, in the unit of x squared; added to the variance.
    activation : str, optional
        g, such as "silu" or "relu"; None is "identity". The error for an unknown name lists all.
    channel_axis : int, optional
        -1 or 1, the axis of the channels, whatever the memory layout: a PyTorch tensor of shape
        (N, C, H, W) has 1, in ``torch.channels_last`` too.
    dtype : dtype, optional
        y's, as a name or a dtype of any framework; by default x's.
    out : array, optional
        Written and returned instead of a new array. It has the memory layout of x, may be exactly
        x, and overlaps no other input.
    workspace : array, optional
        Contiguous memory to use instead of allocating some, on x's device and of at least
        `workspace_size` bytes. Its content is lost.

    Returns
    -------
    array
        y, of x's shape, memory layout, framework and device.

    Raises
    ------
    TypeError
        If an argument has another type or dtype than above, or an array is not plain memory (masked
        array, tensor subclass, tracer).
    ValueError
        If shapes, devices, scalars, `out` or `workspace` do not fit, x has no channels or no
        positions, or a tensor requires grad. All is checked before anything is written.
    ImportError
        If x is on CUDA and CuPy or NVRTC is not installed.
    RuntimeError
        If the kernel does not compile.

    Notes
    -----
    The memory layout is read off the strides. With channels last, the channels of a position are
    contiguous and one stride leads from position to position; with channels first, the positions of
    a channel are contiguous. Both are read as they are, and y gets the same layout. x with other
    strides is copied once, to the nearer of the two, or else to that of its shape.

    Rounding: statistics, sums and products are float64 if x is, else float32; y is rounded once, on
    the store. The mean is corrected by the mean of what it leaves, so a constant group gives y =
    g(bias) exactly, with eps > 0. A sample's y depends on no other sample, bit for bit. What is not
    finite stays in its group. In float32 squared deviations overflow where their sum passes 3.4e38.

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
    for Fast Stylization", arXiv:1607.08022. `group_norm_backward` with C groups has its gradients.

    Parameters
    ----------
    x, weight, bias : array
    eps, activation, channel_axis, dtype, out, workspace : optional
        As for `group_norm`; weight and bias are optional.

    Returns
    -------
    array
        y, as from `group_norm`.

    Raises
    ------
    TypeError, ValueError, ImportError, RuntimeError
        As `group_norm`, which also says where results are rounded.

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
