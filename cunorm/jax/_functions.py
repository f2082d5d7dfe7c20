# SPDX-License-Identifier: MIT
"""The public functions; the docstring of `cunorm.jax` says what they have in common."""

from __future__ import annotations  # keeps the names of type aliases in help()

from jax import Array

from cunorm._core.memo import typed_key
from cunorm._core.types import Activation, Axis, DTypeLike, GatePosition
from cunorm._group_norm.kernels import forward_inputs as group_inputs
from cunorm._group_norm.plan import GROUP_BACKWARD, GROUP_FORWARD
from cunorm._group_norm.spec import EACH_CHANNEL
from cunorm._group_norm.spec import forward_scalars as group_scalars
from cunorm._row_norm.kernels import forward_inputs
from cunorm._row_norm.spec import forward_scalars, l2_scalars
from cunorm.jax._norm import ArrayLike, GroupNorm
from cunorm.jax._split import AxisName, row_norm
from cunorm.results import AddNorm

_GROUP = GroupNorm(GROUP_FORWARD, GROUP_BACKWARD)


def rms_norm(
    x: ArrayLike,
    weight: ArrayLike | None = None,
    *,
    bias: ArrayLike | None = None,
    eps: float = 1e-6,
    axis: Axis = -1,
    groups: int = 1,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    gate: ArrayLike | None = None,
    gate_activation: Activation = "silu",
    gate_position: GatePosition = "post",
    dtype: DTypeLike | None = None,
    axis_name: AxisName | None = None,
    where: ArrayLike | None = None,
) -> Array:
    """Divide each row of x by its root mean square, as `cunorm.rms_norm` does.

    `cunorm.jax` explains axis_name and where.

    >>> import cunorm.jax, jax, jax.numpy as jnp, numpy as np
    >>> x, weight = jnp.array([[1.0, 7.0]]), jnp.array([1.0, 10.0])
    >>> np.asarray(cunorm.jax.rms_norm(x, weight)).round(4)
    array([[ 0.2, 14. ]], dtype=float32)
    >>> np.asarray(jax.grad(lambda weight: cunorm.jax.rms_norm(x, weight).sum())(weight)).round(4)
    array([0.2, 1.4], dtype=float32)
    """
    options = (axis, groups, weight_offset, round_before_weight, gate_activation, gate_position)
    scalars = forward_scalars("rms_norm", options, eps, dtype)
    inputs = forward_inputs(x, weight=weight, bias=bias, gate=gate)
    return row_norm(axis_name, where)(scalars, inputs)[0]


def layer_norm(
    x: ArrayLike,
    weight: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    eps: float = 1e-5,
    axis: Axis = -1,
    groups: int = 1,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    gate: ArrayLike | None = None,
    gate_activation: Activation = "silu",
    gate_position: GatePosition = "post",
    dtype: DTypeLike | None = None,
    axis_name: AxisName | None = None,
    where: ArrayLike | None = None,
) -> Array:
    """Shift and scale each row of x to mean 0 and variance 1, as `cunorm.layer_norm` does.

    `cunorm.jax` explains axis_name and where.

    >>> import cunorm.jax, jax, jax.numpy as jnp, numpy as np
    >>> x, weight = jnp.array([[3.0, 7.0]]), jnp.array([1.0, 10.0])
    >>> np.asarray(jax.jit(cunorm.jax.layer_norm)(x, weight)).round(3)
    array([[-1., 10.]], dtype=float32)
    """
    options = (axis, groups, weight_offset, round_before_weight, gate_activation, gate_position)
    scalars = forward_scalars("layer_norm", options, eps, dtype, center=True)
    inputs = forward_inputs(x, weight=weight, bias=bias, gate=gate)
    return row_norm(axis_name, where)(scalars, inputs)[0]


def l2_norm(
    x: ArrayLike,
    *,
    eps: float = 1e-12,
    axis: Axis = -1,
    groups: int = 1,
    dtype: DTypeLike | None = None,
    axis_name: AxisName | None = None,
) -> Array:
    """Scale each row of x to length 1, as `cunorm.l2_norm` does.

    `cunorm.jax` explains axis_name.

    >>> import cunorm.jax, jax.numpy as jnp, numpy as np
    >>> np.asarray(cunorm.jax.l2_norm(jnp.array([[3.0, 4.0]]))).round(4)
    array([[0.6, 0.8]], dtype=float32)
    """
    scalars = l2_scalars("l2_norm", axis, groups, eps=eps, dtype=dtype)
    return row_norm(axis_name)(scalars, forward_inputs(x))[0]


def normalize(
    x: ArrayLike,
    weight: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    c: float | None = None,
    center: bool = False,
    eps: float = 1e-6,
    axis: Axis = -1,
    groups: int = 1,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    gate: ArrayLike | None = None,
    gate_activation: Activation = "silu",
    gate_position: GatePosition = "post",
    dtype: DTypeLike | None = None,
    axis_name: AxisName | None = None,
    where: ArrayLike | None = None,
) -> Array:
    """Scale each row of x to the length c, as `cunorm.normalize` does.

    `cunorm.jax` explains axis_name and where.

    >>> import cunorm.jax, jax.numpy as jnp, numpy as np
    >>> x = jnp.array([[3.0, 4.0], [-30.0, 40.0]])
    >>> np.asarray(cunorm.jax.normalize(x, c=1)).round(4)
    array([[ 0.6,  0.8],
           [-0.6,  0.8]], dtype=float32)
    """
    options = (axis, groups, weight_offset, round_before_weight, gate_activation, gate_position)
    scalars = forward_scalars("normalize", options, eps, dtype, center=center, c=typed_key(c))
    inputs = forward_inputs(x, weight=weight, bias=bias, gate=gate)
    return row_norm(axis_name, where)(scalars, inputs)[0]


def add_rms_norm(
    x: ArrayLike,
    residual: ArrayLike | None,
    weight: ArrayLike | None = None,
    *,
    bias: ArrayLike | None = None,
    eps: float = 1e-6,
    axis: Axis = -1,
    groups: int = 1,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    gate: ArrayLike | None = None,
    gate_activation: Activation = "silu",
    gate_position: GatePosition = "post",
    dtype: DTypeLike | None = None,
    residual_dtype: DTypeLike | None = None,
    axis_name: AxisName | None = None,
) -> AddNorm[Array]:
    """Add x to the residual stream, and apply `rms_norm`, as `cunorm.add_rms_norm` does.

    `cunorm.jax` explains axis_name.

    The shares that y and the stream contribute to the gradient are added before rounding. Then x's
    gradient is rounded to x's dtype, and residual's gradient to the new stream's dtype (and then to
    residual's, if `residual_dtype` is another).

    >>> import cunorm.jax, jax.numpy as jnp, numpy as np
    >>> y, stream = cunorm.jax.add_rms_norm(jnp.array([[1.0, 3.0]]), jnp.array([[0.0, 4.0]]))
    >>> np.asarray(y).round(4), stream
    (array([[0.2, 1.4]], dtype=float32), Array([[1., 7.]], dtype=float32))
    """
    options = (axis, groups, weight_offset, round_before_weight, gate_activation, gate_position)
    inputs = forward_inputs(x, weight=weight, bias=bias, gate=gate, residual=residual)
    scalars = forward_scalars("add_rms_norm", options, eps, dtype, residual_dtype, streams=True)
    return AddNorm(*row_norm(axis_name)(scalars, inputs))


def add_layer_norm(
    x: ArrayLike,
    residual: ArrayLike | None,
    weight: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    eps: float = 1e-5,
    axis: Axis = -1,
    groups: int = 1,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    gate: ArrayLike | None = None,
    gate_activation: Activation = "silu",
    gate_position: GatePosition = "post",
    dtype: DTypeLike | None = None,
    residual_dtype: DTypeLike | None = None,
    axis_name: AxisName | None = None,
) -> AddNorm[Array]:
    """Add x to the residual stream, and apply `layer_norm`, as `cunorm.add_layer_norm` does.

    `cunorm.jax` explains axis_name.

    >>> import cunorm.jax, jax.numpy as jnp, numpy as np
    >>> y, stream = cunorm.jax.add_layer_norm(jnp.array([[1.0, 2.0]]), jnp.array([[4.0, 7.0]]))
    >>> np.asarray(y).round(4), stream
    (array([[-1.,  1.]], dtype=float32), Array([[5., 9.]], dtype=float32))
    """
    options = (axis, groups, weight_offset, round_before_weight, gate_activation, gate_position)
    inputs = forward_inputs(x, weight=weight, bias=bias, gate=gate, residual=residual)
    scalars = forward_scalars(
        "add_layer_norm", options, eps, dtype, residual_dtype, center=True, streams=True
    )
    return AddNorm(*row_norm(axis_name)(scalars, inputs))


def add_normalize(
    x: ArrayLike,
    residual: ArrayLike | None,
    weight: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    c: float | None = None,
    center: bool = False,
    eps: float = 1e-6,
    axis: Axis = -1,
    groups: int = 1,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    gate: ArrayLike | None = None,
    gate_activation: Activation = "silu",
    gate_position: GatePosition = "post",
    dtype: DTypeLike | None = None,
    residual_dtype: DTypeLike | None = None,
    axis_name: AxisName | None = None,
) -> AddNorm[Array]:
    """Add x to the residual stream, and apply `normalize`, as `cunorm.add_normalize` does.

    `cunorm.jax` explains axis_name.

    >>> import cunorm.jax, jax.numpy as jnp, numpy as np
    >>> x, stream = jnp.array([[1, 2]], jnp.bfloat16), jnp.array([[2.0, 2.0]])
    >>> y, stream = cunorm.jax.add_normalize(x, stream, c=1)
    >>> y.dtype, stream
    (dtype(bfloat16), Array([[3., 4.]], dtype=float32))
    """
    options = (axis, groups, weight_offset, round_before_weight, gate_activation, gate_position)
    inputs = forward_inputs(x, weight=weight, bias=bias, gate=gate, residual=residual)
    key = typed_key(c)
    scalars = forward_scalars(
        "add_normalize", options, eps, dtype, residual_dtype, center=center, c=key, streams=True
    )
    return AddNorm(*row_norm(axis_name)(scalars, inputs))


def group_norm(
    x: ArrayLike,
    num_groups: int,
    weight: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    eps: float = 1e-5,
    activation: Activation | None = None,
    channel_axis: int = -1,
    dtype: DTypeLike | None = None,
) -> Array:
    """Shift and scale each group of channels of each sample, as `cunorm.group_norm` does.

    The channels are the last axis by default; in `cunorm.torch` they are axis 1 by default.

    >>> import cunorm.jax, jax.numpy as jnp, numpy as np
    >>> x = jnp.arange(8.0).reshape(1, 2, 4)  # a sample of two positions, of four channels
    >>> np.asarray(cunorm.jax.group_norm(x, 2, activation="relu")).round(2)
    array([[[0.  , 0.  , 0.  , 0.  ],
            [0.73, 1.21, 0.73, 1.21]]], dtype=float32)
    """
    scalars = group_scalars("group_norm", num_groups, activation, channel_axis, eps, dtype)
    return _GROUP(scalars, group_inputs(x, weight=weight, bias=bias))[0]


def instance_norm(
    x: ArrayLike,
    weight: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    eps: float = 1e-5,
    activation: Activation | None = None,
    channel_axis: int = -1,
    dtype: DTypeLike | None = None,
) -> Array:
    """Apply `group_norm` with each channel as a group, as `cunorm.instance_norm` does.

    >>> import cunorm.jax, jax.numpy as jnp, numpy as np
    >>> np.asarray(cunorm.jax.instance_norm(jnp.array([[[1.0, 10.0], [3.0, 70.0]]]))).round(4)
    array([[[-1., -1.],
            [ 1.,  1.]]], dtype=float32)
    """
    scalars = group_scalars("instance_norm", EACH_CHANNEL, activation, channel_axis, eps, dtype)
    return _GROUP(scalars, group_inputs(x, weight=weight, bias=bias))[0]
