# SPDX-License-Identifier: MIT
"""Group norm and instance norm with an activation, for inference and for training."""

from __future__ import annotations  # keeps the names of type aliases in help()

from cunorm._core import validate
from cunorm._core.types import Activation, ArrayT, DTypeLike, GroupNeeds, SupportsDLPack
from cunorm._dispatch import dispatch
from cunorm._group_norm.kernels import backward_inputs, forward_inputs
from cunorm._group_norm.plan import GROUP_BACKWARD, GROUP_FORWARD
from cunorm._group_norm.spec import EACH_CHANNEL, NEEDS, backward_scalars, forward_scalars
from cunorm.results import GroupNormForward, GroupNormGrads


def group_norm(
    x: ArrayT,
    num_groups: int,
    weight: SupportsDLPack | None = None,
    bias: SupportsDLPack | None = None,
    *,
    eps: float = 1e-5,
    activation: Activation | None = None,
    channel_axis: int = -1,
    dtype: DTypeLike | None = None,
    out: SupportsDLPack | None = None,
    workspace: SupportsDLPack | None = None,
) -> ArrayT:
    """Shift and scale each group of channels of each sample to mean 0 and variance 1.

    The mean is over all positions of a sample and all channels of a group. Each channel has its own
    weight and bias, which may also differ from sample to sample. g is the activation::

        n = (x - mean) / sqrt(mean((x - mean) ** 2) + eps) * weight + bias
        y = g(n)

    Source: Y. Wu and K. He, "Group Normalization", arXiv:1803.08494. The source of the formula with
    an activation is "GroupNorm Chronicles" (channels-last-groupnorm).

    Parameters
    ----------
    x : array
        The shape is ``(N, ..., C)`` or, with channel_axis 1, ``(N, C, ...)``: N samples, C channels
        and any number of axes of positions. The dtype is float16, bfloat16, float32 or float64. x
        is an array of NumPy, CuPy, PyTorch or JAX, or any other object with ``__dlpack__``.
    num_groups : int
        The number of groups of neighbouring channels, a divisor of C.
    weight, bias : array, optional
        Each has shape ``(C,)`` or, as in AdaGN and FiLM, a row for each sample, ``(N, C)``; ``(1,
        C)`` is the same as ``(C,)``. Rows may be views, as those of a chunk; only if a row is not
        contiguous, it is copied. Each has any of the four dtypes. All arrays are on one device.
    eps : float, optional
        The number, at least 0, that is added to the variance, in the unit of x squared.
    activation : str, optional
        g, such as "silu" or "relu"; None is "identity". The error for an unknown name lists all.
    channel_axis : int, optional
        The axis of the channels, the last or axis 1, counted from either end, whatever the memory
        layout: it is 1, or -3, for a PyTorch tensor of shape (N, C, H, W), even in
        ``torch.channels_last``. The default is -1 here and in `cunorm.jax`, and 1 in
        `cunorm.torch`.
    dtype : dtype, optional
        The dtype of y, as a name or a dtype of any framework; by default x's.
    out : array, optional
        The array that is written and returned instead of a new one. It has the memory layout of x,
        may be exactly x, and overlaps no other input.
    workspace : array, optional
        A contiguous array on x's device, of at least `workspace_size` bytes, which the call uses
        instead of allocating memory. The call overwrites its content.

    Returns
    -------
    array
        y, with x's shape, memory layout, framework and device.

    Raises
    ------
    TypeError, ValueError, ImportError, RuntimeError
        As for `normalize`, and also if x has no channels or positions, or `workspace` does not fit.

    Notes
    -----
    The strides decide which memory layout x has. With channels last, the channels of a position are
    contiguous, and one stride leads from position to position. With channels first, the positions
    of a channel are contiguous. y gets the layout of x. An x with other strides is copied once:
    channels or positions, whichever lie closer together, come last; channel_axis decides a tie.

    Rounding: statistics, sums and products are float64 if x is, else float32; y is rounded once, on
    the store. The mean is corrected by the mean of x - mean, so a constant group gives exactly
    g(bias) if eps > 0. No bit of a sample's y depends on other samples. Infinities and NaN stay in
    their group. In float32 a sum of squared deviations overflows beyond 3.4e38.

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

    A layer of a network has made a scale and a shift for each sample. There is no weight_offset, so
    the weight is 1 + scale:

    >>> embedding = np.array([[0, 1, 2, 3, 0, 0, 5, 5], [0] * 8], dtype=np.float32)
    >>> scale, shift = np.split(embedding, 2, axis=1)  # each of shape (2, 4)
    >>> cunorm.group_norm(x, 2, 1 + scale, shift, activation="silu")[:, 2].round(2)
    array([[ 0.79,  2.56,  8.18, 10.45],
           [ 0.79,  1.08,  0.79,  1.08]], dtype=float32)
    """
    scalars = forward_scalars("group_norm", num_groups, activation, channel_axis, eps, dtype)
    inputs = forward_inputs(x, weight=weight, bias=bias)
    arrays = (*inputs, out, None, None, workspace)  # there is no array for mean or rstd
    return dispatch(GROUP_FORWARD, scalars, arrays)[0]


def instance_norm(
    x: ArrayT,
    weight: SupportsDLPack | None = None,
    bias: SupportsDLPack | None = None,
    *,
    eps: float = 1e-5,
    activation: Activation | None = None,
    channel_axis: int = -1,
    dtype: DTypeLike | None = None,
    out: SupportsDLPack | None = None,
    workspace: SupportsDLPack | None = None,
) -> ArrayT:
    """Apply `group_norm` with each channel as a separate group.

    The mean is over the positions of one channel of one sample, and g is the activation::

        n = (x - mean) / sqrt(mean((x - mean) ** 2) + eps) * weight + bias
        y = g(n)

    Source: D. Ulyanov, A. Vedaldi and V. Lempitsky, "Instance Normalization: The Missing Ingredient
    for Fast Stylization", arXiv:1607.08022. The backward is `group_norm_backward` with C groups.
    Result, errors and rounding are those of `group_norm`.

    Parameters
    ----------
    x, weight, bias : array
    eps, activation, channel_axis, dtype, out, workspace : optional
        As for `group_norm`; weight and bias are optional.

    Examples
    --------
    >>> import numpy as np
    >>> import cunorm
    >>> cunorm.instance_norm(np.array([[[1, 10], [3, 70]]], dtype=np.float32)).round(4)
    array([[[-1., -1.],
            [ 1.,  1.]]], dtype=float32)
    """
    scalars = forward_scalars("instance_norm", EACH_CHANNEL, activation, channel_axis, eps, dtype)
    inputs = forward_inputs(x, weight=weight, bias=bias)
    arrays = (*inputs, out, None, None, workspace)  # there is no array for mean or rstd
    return dispatch(GROUP_FORWARD, scalars, arrays)[0]


def group_norm_forward(
    x: ArrayT,
    num_groups: int,
    weight: SupportsDLPack | None = None,
    bias: SupportsDLPack | None = None,
    *,
    eps: float = 1e-5,
    activation: Activation | None = None,
    channel_axis: int = -1,
    dtype: DTypeLike | None = None,
    out: GroupNormForward[SupportsDLPack | None] | None = None,
    workspace: SupportsDLPack | None = None,
) -> GroupNormForward[ArrayT]:
    """Run `group_norm`, and also return what `group_norm_backward` needs.

    ::

        rstd = 1 / sqrt(mean((x - mean) ** 2) + eps)        over a group of a sample
        y = g((x - mean) * rstd * weight + bias)

    Source, y, errors and rounding are those of `group_norm`. mean and rstd have the shape ``(N,
    num_groups)`` and are float64 if x is, else float32.

    Parameters
    ----------
    x, num_groups, weight, bias : array, int, array and array
    eps, activation, channel_axis, dtype, workspace : optional
        As for `group_norm`; weight and bias are optional.
    out : GroupNormForward, optional
        For each result, an array to write instead of a new one, or None. y is like `out` of
        `group_norm`; mean and rstd are contiguous.

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
    scalars = forward_scalars(
        "group_norm_forward", num_groups, activation, channel_axis, eps, dtype, saves=True
    )
    inputs = forward_inputs(x, weight=weight, bias=bias)
    arrays = (*inputs, *(out or GROUP_FORWARD.no_outputs), workspace)
    return GroupNormForward(*dispatch(GROUP_FORWARD, scalars, arrays))


def group_norm_backward(
    dy: SupportsDLPack,
    x: ArrayT,
    num_groups: int,
    weight: SupportsDLPack | None = None,
    bias: SupportsDLPack | None = None,
    *,
    mean: SupportsDLPack,
    rstd: SupportsDLPack,
    activation: Activation | None = None,
    channel_axis: int = -1,
    needs: GroupNeeds = NEEDS,
    out: GroupNormGrads[SupportsDLPack | None] | None = None,
    workspace: SupportsDLPack | None = None,
    accumulate: bool = False,
) -> GroupNormGrads[ArrayT]:
    """Return the gradients of `group_norm`.

    mean() is over the positions and channels of a group of a sample, g' is the derivative of the
    activation (relu'(0) is 0), and n is computed again from x::

        r = (x - mean) * rstd
        n = r * weight + bias
        h = dy * g'(n)
        dx = rstd * (weight * h - mean(weight * h) - r * mean(weight * h * r))
        dweight = sum over samples and positions of h * r
        dbias = sum over samples and positions of h

    If weight or bias has a row for each sample, so has its gradient: the sum over the positions.

    Source: equations 52 to 72 of "GroupNorm Chronicles" (channels-last-groupnorm). Here the sums
    have x - mean in place of x, so they do not cancel where the mean is large.

    Parameters
    ----------
    dy : array
        The gradient of y has x's shape and is float16, bfloat16, float32 or float64. It is copied
        once if its memory layout is not that of x.
    x, num_groups, weight, bias, mean, rstd, activation, channel_axis : array, int and str
        The values of the forward. Without an activation, only the shape and dtype of bias are used,
        for dbias.
    needs : tuple of str, optional
        The operands whose gradients are wanted: "x", "weight" and "bias".
    out : GroupNormGrads, optional
        For each gradient, an array of its dtype to write instead of a new one, or None. dx has the
        memory layout of x and may be exactly dy or x.
    workspace, accumulate : optional
        As for `group_norm` and `normalize_backward`.

    Returns
    -------
    GroupNormGrads
        ``dx`` has x's dtype and memory layout. ``dweight`` and ``dbias`` have the shape and dtype
        of their parameter. A field is None if its operand is absent or its gradient not wanted.

    Raises
    ------
    TypeError, ValueError, ImportError, RuntimeError
        As for `group_norm`, and also if `needs` has another name, or `accumulate` has no array.

    Notes
    -----
    Rounding: as in `group_norm`, once on each store. The rounding error of the mean is measured on
    x and removed, but n keeps it. All results repeat bit for bit. No sample changes another's dx,
    or another's row of dweight and dbias.

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
    norm = ("group_norm_backward", num_groups, activation, channel_axis)
    scalars = backward_scalars(*norm, needs=needs, accumulate=accumulate)
    inputs = backward_inputs(dy, x, weight=weight, bias=bias, mean=mean, rstd=rstd)
    arrays = (*inputs, *(out or GROUP_BACKWARD.no_outputs), workspace)
    return GroupNormGrads(*dispatch(GROUP_BACKWARD, scalars, arrays))
