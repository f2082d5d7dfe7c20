# SPDX-License-Identifier: MIT
"""The generic row norm. Its function `normalize` documents what all row norms have in common."""

from __future__ import annotations  # keeps the names of type aliases in help()

from cunorm._core import validate
from cunorm._core.memo import typed_key
from cunorm._core.types import (
    Activation,
    ArrayT,
    Axis,
    DTypeLike,
    GatePosition,
    Needs,
    SupportsDLPack,
)
from cunorm._dispatch import dispatch
from cunorm._row_norm.kernels import backward_inputs, forward_arrays
from cunorm._row_norm.plan import ROW_BACKWARD, ROW_FORWARD
from cunorm._row_norm.spec import NEEDS, backward_scalars, forward_scalars
from cunorm._row_norm.split import given_backward, given_norm
from cunorm.results import AddNorm, NormForward, NormGrads, Sums


def normalize(
    x: ArrayT,
    weight: SupportsDLPack | None = None,
    bias: SupportsDLPack | None = None,
    *,
    c: float | None = None,
    center: bool = False,
    eps: float = 1e-6,
    axis: Axis = -1,
    groups: int = 1,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    gate: SupportsDLPack | None = None,
    gate_activation: Activation = "silu",
    gate_position: GatePosition = "post",
    mean: SupportsDLPack | None = None,
    rstd: SupportsDLPack | None = None,
    correction: SupportsDLPack | None = None,
    count: int | None = None,
    x_dtype: DTypeLike | None = None,
    dtype: DTypeLike | None = None,
    out: SupportsDLPack | None = None,
) -> ArrayT:
    """Normalise each row of x to the length c, by default the square root of the row's width.

    A row is all axes from `axis` to the last, the axes of a tuple or, with `groups`, a slice of the
    last axis. d is the number of elements of a row, mean() is over a row, and g is the activation
    of the gate::

        p = x * g(gate)     if there is a pre-gate, else x
        q = p - mean(p)     if center, else p
        r = q / sqrt(mean(q * q) + eps)
        n = c / sqrt(d) * r * (weight + weight_offset) + bias
        y = n * g(gate)     if there is a post-gate, else n

    Source: "Normalize with Residual or Gate" (xopes). Here eps is added to the mean square.

    Parameters
    ----------
    x : array
        The input has at least one axis and is float16, bfloat16, float32 or float64. It is an array
        of NumPy, CuPy, PyTorch or JAX, or any other object with ``__dlpack__``.
    weight, bias : array, optional
        They have the row's shape, ``x.shape[axis:]`` (all groups side by side), or also axes before
        it, each of x's size or 1, if rows have their own: ``(B, 1, D)`` is a row for each sample of
        an x of shape ``(B, S, D)``. Each has any of the four dtypes. All arrays of a call are on
        one device.
    c : float, optional
        The length of a row before weight and bias; the default sqrt(d) gives a mean square of 1.
    center : bool, optional
        Whether the mean of the row is subtracted first.
    eps : float, optional
        The number, at least 0, that is added inside the root, in the unit of p squared.
    axis : int or tuple of int, optional
        An int is the first axis of a row, as in ONNX: the others follow it. PyTorch's
        ``normalized_shape`` is ``x.shape[axis:]``. A tuple has all axes of a row, which must be
        neighbours: ``axis=(1,)`` normalises the channels at each position of (N, C, H, W). weight
        and bias then have the row's shape, (C,), or x's number of axes, (1, C, 1, 1) or
        (N, C, 1, 1); statistics have the shape of the other axes, (N, H, W).
    groups : int, optional
        The number of equal slices of the last axis, each normalised separately; axis must be -1.
        Heads that share one weight need no groups: see the last example of `rms_norm`.
    weight_offset : float, optional
        The number added to the weight before any rounding: 1.0 for Gemma's ``1 + weight``. Without
        a weight it changes nothing.
    round_before_weight : bool, optional
        Whether c / sqrt(d) * r is rounded to x's dtype before it is multiplied by weight, as in
        Llama, Qwen and Mamba-2.
    gate, gate_activation, gate_position : array, str and str, optional
        The gate has x's shape and any of the four dtypes; it may be an expanded view. g is
        for example "silu" or "identity"; the error for an unknown name lists all. A "pre" gate
        multiplies x, a "post" gate the normalised row; "branch" is for `add_normalize`. Without a
        gate, leave out the other two.
    rstd, mean, correction : array, optional
        Statistics of the rows, such as those of `combine_moments`; then the rows' own are not
        computed, and eps is not used. They have the shape ``x.shape[:axis]`` (and `groups`, if
        not 1); they are float64 if x is, else float32 or float64, which is then the compute type.
        q is ``p - mean - correction``. mean is given with center, and only then; without
        correction, it is exact.
    count : int, optional
        With given statistics: d, the number of elements of a whole row, of which x may have a part.
        It must be given with c; nothing else needs it.
    x_dtype : dtype, optional
        With given statistics, if x is a residual stream: the dtype of the branch that was added to
        it. It is then the dtype to which rows are rounded before weight, and y's default dtype.
    dtype : dtype, optional
        The dtype of y, as a name or a dtype of any framework. By default it is x's; with
        round_before_weight and a weight, it is the dtype to which x's and weight's promote.
    out : array, optional
        The NumPy, CuPy or PyTorch array that is written and returned instead of a new one. It may
        be exactly an input, such as x; otherwise it overlaps no input.

    Returns
    -------
    array
        y, with x's shape, framework and device; on CUDA it is written on the current stream.

    Raises
    ------
    TypeError
        If an argument has another type or dtype than above, or if an array is not plain memory
        (masked array, tensor subclass, tracer).
    ValueError
        If shapes, devices, scalars or `out` do not fit, if a row has no element or 2**31 or more,
        or if a tensor requires grad. All checks come before anything is written.
    ImportError, RuntimeError
        If x is on CUDA and CuPy or NVRTC is not installed, or if the kernel does not compile.

    Notes
    -----
    Rounding: statistics, sums and products are float64 if x is float64, else float32. eps,
    weight_offset and the quotient c / sqrt(d) are rounded to this type, and become infinite or 0
    beyond its range. y is rounded once, on the store. The mean is corrected by the mean of
    p - mean, so a constant row gives exactly y = bias if eps > 0 and sum(p) is finite.
    No bit of a row's y depends on other rows or on strides, except that with a tuple as axis, on a
    GPU, sums have another order if rows lie side by side.

    Overflow: in float32 a sum, or a sum of squares, beyond 3.4e38 is infinite, and the row becomes
    zeros or NaN. This can happen with bfloat16 and float32 elements from 1.8e19 / sqrt(d) on, and
    with float16 only after a pre-gate. Squares below 1.2e-38 lose digits on a CPU and are 0 on
    CUDA: with eps 0, a row in which all squares are so small can become infinite or NaN.

    Strides: rows, also those of a weight or bias that varies over rows, are read and written in
    place if each is contiguous and aligned and at most three axes come before it. Axes that one
    stride walks count as one axis; groups count as one more. With a tuple as axis, rows may also
    lie side by side, as in a contiguous (N, C, H, W), if they have at most 16,384 elements; results
    then have x's memory layout, also channels_last. An input with other strides is copied once; an
    `out` with other strides is an error.

    Without a C++ compiler, `cunorm.reference` normalises host arrays in float64, with one warning.

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
    >>> gate = np.array([[1, -1], [2, 3]], dtype=np.float16)
    >>> cunorm.normalize(x, c=1, gate=gate, gate_activation="relu").round(4)
    array([[ 0.6,  0. ],
           [-1.2,  2.4]], dtype=float32)

    A scale and a shift for each sample, here for two samples of two rows:

    >>> scale, shift = np.float32([[[1, 1]], [[0, 4]]]), np.float32([[[0, 0]], [[9, 0]]])
    >>> y = cunorm.normalize(np.stack([x, x]), scale, shift, c=1, weight_offset=1.0)
    >>> y.round(4)
    array([[[ 1.2,  1.6],
            [-1.2,  1.6]],
    <BLANKLINE>
           [[ 9.6,  4. ],
            [ 8.4,  4. ]]], dtype=float32)
    """
    options = (axis, groups, weight_offset, round_before_weight, gate_activation, gate_position)
    scalars = forward_scalars("normalize", options, eps, dtype, center=center, c=typed_key(c))
    if not (
        mean is None and rstd is None and correction is None and count is None and x_dtype is None
    ):
        given = (x, weight, bias, gate, mean, rstd, correction, out)
        return given_norm(scalars, given, count, x_dtype)
    arrays = forward_arrays(x, weight=weight, bias=bias, gate=gate, y=out)
    return dispatch(ROW_FORWARD, scalars, arrays)[0]


def add_normalize(
    x: ArrayT,
    residual: SupportsDLPack | None,
    weight: SupportsDLPack | None = None,
    bias: SupportsDLPack | None = None,
    *,
    c: float | None = None,
    center: bool = False,
    eps: float = 1e-6,
    axis: Axis = -1,
    groups: int = 1,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    gate: SupportsDLPack | None = None,
    gate_activation: Activation = "silu",
    gate_position: GatePosition = "post",
    dtype: DTypeLike | None = None,
    residual_dtype: DTypeLike | None = None,
    out: AddNorm[SupportsDLPack | None] | None = None,
) -> AddNorm[ArrayT]:
    """Add x to the residual stream, and `normalize` the new stream.

    ::

        s = x + residual                        rounded to its dtype: the new stream
        s = x * g(gate) + residual              instead, if the gate is that of the branch
        y = normalize(s, weight, bias)          with the gate of `normalize`, if there is a gate

    The source, errors, overflow and strides are those of `normalize`. A stack of layers
    ``x = f(norm(x)) + x`` becomes ``y, stream = add_norm(branch, stream); branch = f(y)``. It
    begins with ``residual=None`` and ends with ``branch + stream``.

    Parameters
    ----------
    x : array
        As for `normalize`; x is what the previous layer adds to the stream.
    residual : array or None
        The stream has x's shape and any of the four dtypes. If it is None, x is the new stream.
    weight, bias, c, center, eps, axis, groups, weight_offset, round_before_weight, dtype : optional
        As for `normalize`. Rounding before weight is to x's dtype, not to the stream's.
    gate, gate_activation, gate_position : optional
        As for `normalize`. A pre-gate multiplies s only for y: the new stream has no gate. A gate
        of the "branch" multiplies x before x is added. It has x's shape or broadcasts to it as
        weight does, and its axes along the row may all be 1: for an x of shape ``(B, S, D)``, it
        may have ``(D,)``, ``(B, 1, D)``, ``(B, S, 1)`` or ``(B, 1, 1)``.
    residual_dtype : dtype, optional
        The new stream's dtype, by default residual's; without residual, that in `out`, else x's.
    out : AddNorm, optional
        For each result, an array to write instead of a new one, or None. y may be exactly an input
        other than an x that is returned as the new stream. The new stream may be exactly x or
        residual (``out=AddNorm(residual=residual)`` updates it). Neither overlaps another input.

    Returns
    -------
    AddNorm
        ``y`` and ``residual``, the new stream, both like x. Without residual the stream is x
        itself, unless `residual_dtype` is another dtype, `out` has an array for the stream, or the
        gate is that of the branch.

    Notes
    -----
    Rounding: the compute type is float64 if x or the new stream is, else float32, to which a wider
    residual is rounded first. The sum is rounded to the new stream's dtype before it is normalised,
    as a separate addition does. y is rounded once.

    Examples
    --------
    >>> import numpy as np
    >>> import cunorm
    >>> x = np.array([[1, 2]], dtype=np.float16)
    >>> stream = np.array([[2, 2]], dtype=np.float32)
    >>> y, stream = cunorm.add_normalize(x, stream, c=1)
    >>> y, stream
    (array([[0.6, 0.8]], dtype=float16), array([[3., 4.]], dtype=float32))

    A gate of the branch, one number for each row:

    >>> options = {"gate_activation": "identity", "gate_position": "branch"}
    >>> cunorm.add_normalize(x, stream, gate=np.float32([[0.5]]), **options).residual
    array([[3.5, 5. ]], dtype=float32)
    """
    validate.out_type("add_normalize", out, AddNorm)
    options = (axis, groups, weight_offset, round_before_weight, gate_activation, gate_position)
    key = typed_key(c)
    scalars = forward_scalars(
        "add_normalize", options, eps, dtype, residual_dtype, center=center, c=key, streams=True
    )
    arrays = forward_arrays(
        x, weight=weight, bias=bias, gate=gate, residual=residual, out=out and NormForward(*out)
    )
    return AddNorm(*dispatch(ROW_FORWARD, scalars, arrays)[:2])


def normalize_forward(
    x: ArrayT,
    weight: SupportsDLPack | None = None,
    bias: SupportsDLPack | None = None,
    *,
    residual: SupportsDLPack | None = None,
    residual_dtype: DTypeLike | None = None,
    c: float | None = None,
    center: bool = False,
    eps: float = 1e-6,
    axis: Axis = -1,
    groups: int = 1,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    gate: SupportsDLPack | None = None,
    gate_activation: Activation = "silu",
    gate_position: GatePosition = "post",
    dtype: DTypeLike | None = None,
    out: NormForward[SupportsDLPack | None] | None = None,
) -> NormForward[ArrayT]:
    """Run `normalize`, or `add_normalize`, and also return what `normalize_backward` needs.

    d is the number of elements of a row, and g is the activation of the gate::

        s = x + residual    rounded to its dtype: the new stream; without residual, s = x
        s = x * g(gate) + residual              instead, if the gate is that of the branch
        p = s * g(gate)     if there is a pre-gate, else s
        q = p - mean(p)     if center, else p
        rstd = 1 / sqrt(mean(q * q) + eps)
        n = c / sqrt(d) * (q * rstd) * (weight + weight_offset) + bias
        y = n * g(gate)     if there is a post-gate, else n

    The source and errors are those of `normalize`, the rounding is that of `add_normalize`.

    Parameters
    ----------
    x, weight, bias : array
    c, center, eps, axis, groups, weight_offset, round_before_weight : optional
    gate, gate_activation, gate_position, dtype, residual, residual_dtype, out : optional
        As for `add_normalize`. Without residual, the new stream is x, rounded to `residual_dtype`
        or to the dtype of the stream's array in `out`; if both are absent, there is no stream
        unless the gate is that of the branch. The mean and rstd of `out` overlap no input.

    Returns
    -------
    NormForward
        Its docstring describes the fields. ``mean`` is the mean of p. The compute type is float64
        if x or the new stream is float64, else float32.

    Examples
    --------
    >>> import numpy as np
    >>> import cunorm
    >>> saved = cunorm.normalize_forward(np.array([[2, 4], [3, 7]], dtype=np.float32), center=True)
    >>> saved.y.round(4)
    array([[-1.,  1.],
           [-1.,  1.]], dtype=float32)
    >>> saved.mean, saved.rstd.round(4)
    (array([3., 5.], dtype=float32), array([1. , 0.5], dtype=float32))
    """
    validate.out_type("normalize_forward", out, NormForward)
    options = (axis, groups, weight_offset, round_before_weight, gate_activation, gate_position)
    key = typed_key(c)
    scalars = forward_scalars(
        "normalize_forward", options, eps, dtype, residual_dtype, center=center, c=key, saves=True
    )
    arrays = forward_arrays(x, weight=weight, bias=bias, gate=gate, residual=residual, out=out)
    return NormForward(*dispatch(ROW_FORWARD, scalars, arrays))


def normalize_backward(
    dy: SupportsDLPack,
    x: ArrayT,
    weight: SupportsDLPack | None = None,
    bias: SupportsDLPack | None = None,
    *,
    rstd: SupportsDLPack,
    mean: SupportsDLPack | None = None,
    d_residual: SupportsDLPack | None = None,
    c: float | None = None,
    center: bool = False,
    axis: Axis = -1,
    groups: int = 1,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    gate: SupportsDLPack | None = None,
    gate_activation: Activation = "silu",
    gate_position: GatePosition = "post",
    branch: SupportsDLPack | None = None,
    x_dtype: DTypeLike | None = None,
    needs: Needs = NEEDS,
    sums: Sums[SupportsDLPack | None] | None = None,
    correction: SupportsDLPack | None = None,
    count: int | None = None,
    out: NormGrads[SupportsDLPack | None] | None = None,
    workspace: SupportsDLPack | None = None,
    accumulate: bool = False,
) -> NormGrads[ArrayT]:
    """Return the gradients of `normalize` and of `add_normalize`.

    k is c / sqrt(d), d is the number of elements of a row, mean() is over a row, g is the
    activation of the gate, and g' is the derivative of g (relu'(0) is 0)::

        p = x * g(gate)                                     if there is a pre-gate, else x
        r = (p - mean) * rstd                               without center, p * rstd
        n = k * r * (weight + weight_offset) + bias
        dn = dy * g(gate)                                   if there is a post-gate, else dy
        dr = k * dn * (weight + weight_offset)
        dp = rstd * (dr - r * mean(r * dr) - mean(dr))      mean(dr) only with center
        dx = dp * g(gate) + d_residual                      without a pre-gate, dp + d_residual
        dgate = g'(gate) * dp * x, pre-gate                 g'(gate) * dy * n, post-gate
        dweight = sum over rows of dn * k * r
        dbias = sum over rows of dn

    With a gate of the branch, dresidual is dp + d_residual, and the sum is over the elements that
    share an element of the gate::

        dx = dresidual * g(gate)
        dgate = g'(gate) * sum of dresidual * branch

    Source: "Normalize with Residual or Gate" (xopes). It is exact for any eps: rstd contains eps.

    Parameters
    ----------
    dy : array
        The gradient of y has x's shape and is float16, bfloat16, float32 or float64.
    x : array
        The array that was normalised: the forward's ``residual`` if it has one, else its x. Each
        array but rstd and mean may have any of the four dtypes.
    weight, bias : array, optional
        The weight and bias of the forward. Unless the dgate of a post-gate is wanted, only the
        shape and dtype of bias are used, for dbias.
    rstd, mean : array
        The forward's results, of shape ``x.shape[:axis]`` (and `groups`, if not 1); float64 if x or
        dx is, else float32. The mean must be given with center, and only then.
    d_residual : array, optional
        The gradient of the new residual stream, of x's shape. It is added to dp, or with a pre-gate
        to dp * g(gate).
    branch : array, optional
        The forward's x, of x's shape. Only the dgate of a gate of the branch needs it; otherwise it
        is not read.
    c, center, axis, groups, weight_offset, gate, gate_activation, gate_position : optional
        The values that the forward got.
    round_before_weight : bool, optional
        The value that the forward got. For n and dweight, k * r is rounded to dx's dtype, which is
        that of the forward's x. The derivative of this rounding counts as 1.
    x_dtype : dtype, optional
        The dtype of dx, by default x's. If the forward added an x of bfloat16 to a float32 stream,
        give bfloat16: then one pass writes dx (bfloat16) and dresidual (float32).
    needs : tuple of str, optional
        The operands whose gradients are wanted: "x" (dx and dresidual), "weight", "bias", "gate".
        Nothing else is computed or written, and arrays are read only if needed: ``("bias",)`` reads
        dy and a post-gate; ``("weight",)`` also reads x, rstd, mean and any gate.
    sums, correction, count : Sums, array and int, optional
        For rows that are split: the sums of `normalize_backward_sums` over whole rows, the
        correction of the mean (without it, the mean is exact), and the number of elements of a
        whole row, which must be given with sums. mean(dr) and mean(r * dr) are then ``k * sum_dr /
        count`` and ``k * sum_r_dr / count``, and d is count.
    out : NormGrads, optional
        For each gradient, an array to write instead of a new one, or None. An array may be exactly
        an input; otherwise it overlaps no input.
    workspace : array, optional
        Memory for the partial sums of dweight and dbias: a contiguous array on x's device. Its
        dtype is one of the four, for PyTorch also uint8, for NumPy and CuPy any dtype of numbers.
        It has at least `workspace_size` bytes, its address is a multiple of 16, and it keeps
        nothing between calls.
        A call with a workspace and a full `out` allocates nothing.
    accumulate : bool, optional
        Whether dweight and dbias are added to their arrays in `out`. These arrays must be given and
        be float32 or float64. dx and dgate are overwritten.

    Returns
    -------
    NormGrads
        Its docstring describes the fields. ``dresidual`` is ``dx`` if their dtypes agree and
        `out` does not have both, except with a gate of the branch. ``dweight`` and ``dbias`` have
        the dtype and shape of their parameter, ``dgate`` those of the gate: they are sums over the
        rows, or elements, that share it. A field is None if its operand is absent or its gradient
        is not wanted.

    Raises
    ------
    TypeError, ValueError, ImportError, RuntimeError
        As for `normalize`, and also if the mean is missing, `needs` has another name, `workspace`
        is too small, or `accumulate` has no arrays to add to.

    Notes
    -----
    Rounding: the computation is in rstd's dtype, and each result is rounded once, on the store. The
    rounding error of the mean is measured on x and removed. dweight and dbias are sums of parts in
    a fixed order and repeat bit for bit, on a CPU with any number of threads. With accumulate, the
    old value is added before the rounding. Overflow and strides are as for `normalize`.

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

    Add to gradients in float32, without allocating anything:

    >>> out = cunorm.NormGrads(dweight=np.full(2, 10, dtype=np.float32))
    >>> size = cunorm.workspace_size("normalize_backward", x, weight, needs=("weight",))
    >>> grads = cunorm.normalize_backward(
    ...     dy, x, weight, rstd=saved.rstd, c=1, needs=("weight",),
    ...     out=out, workspace=np.empty(size, dtype=np.uint8), accumulate=True,
    ... )
    >>> out.dweight.round(4), grads.dx is None
    (array([10.6, 10. ], dtype=float32), True)

    A gate of the branch, one number for all rows:

    >>> gate, stream = np.float32([[2]]), np.float32([[0, 1]])
    >>> options = {"gate": gate, "gate_activation": "identity", "gate_position": "branch"}
    >>> saved = cunorm.normalize_forward(x, residual=stream, **options)
    >>> grads = cunorm.normalize_backward(
    ...     dy, saved.residual, rstd=saved.rstd, branch=x, **options
    ... )
    >>> grads.dx.round(4), grads.dgate.round(4)
    (array([[ 0.181 , -0.1207]], dtype=float32), array([[0.0302]], dtype=float32))
    """
    validate.out_type("normalize_backward", out, NormGrads)
    options = (axis, groups, weight_offset, round_before_weight, gate_activation, gate_position)
    scalars = backward_scalars(
        "normalize_backward",
        options,
        center=center,
        c=typed_key(c),
        x_dtype=x_dtype,
        needs=needs,
        accumulate=accumulate,
    )
    inputs = backward_inputs(
        dy,
        x,
        weight=weight,
        bias=bias,
        gate=gate,
        mean=mean,
        rstd=rstd,
        d_residual=d_residual,
        branch=branch,
    )
    outputs = (*(out or ROW_BACKWARD.no_outputs), workspace)
    if sums is not None or correction is not None or count is not None:
        return given_backward(scalars, inputs, (sums, correction, count), outputs)
    return NormGrads(*dispatch(ROW_BACKWARD, scalars, (*inputs, *outputs)))
