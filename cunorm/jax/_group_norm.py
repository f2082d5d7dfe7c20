# SPDX-License-Identifier: MIT
"""Group norm and instance norm of JAX arrays, differentiable."""

from __future__ import annotations

from typing import Any

from cunorm._group_norm.ops import GROUP_BACKWARD, GROUP_FORWARD
from cunorm._group_norm.spec import EACH_CHANNEL, backward_spec
from cunorm.jax._vjp import Norm

_group_norm = Norm(
    GROUP_FORWARD, GROUP_BACKWARD, lambda spec, x_dtype, needs: backward_spec(spec, needs)
)


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
) -> Any:
    """Shift and scale each group of channels of each sample to mean 0 and variance 1.

    As `cunorm.group_norm`, but differentiable; x, two numbers for each group of each sample and the
    parameters are saved for gradients, and what the activation, g, was given is computed again::

        y = g((x - mean) / sqrt(mean((x - mean) ** 2) + eps) * weight + bias)

    Parameters
    ----------
    x, weight, bias : array
        Of JAX, traced or not, or of NumPy. All arguments are as for `cunorm.group_norm`; those that
        are no arrays are static. There is no `out` and no `workspace`.

    Returns
    -------
    Array
        y, of x's shape.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, ImportError
        As `cunorm.group_norm` does when the call is traced, and as `rms_norm` does.

    Notes
    -----
    y is rounded where `cunorm.group_norm` rounds it, each gradient once, to its operand's dtype.

    Examples
    --------
    >>> import jax.numpy as jnp, numpy as np
    >>> import cunorm.jax
    >>> x = jnp.arange(8.0).reshape(1, 2, 4)  # a sample of two positions, of four channels
    >>> np.asarray(cunorm.jax.group_norm(x, 2, activation="relu")).round(2)
    array([[[0.  , 0.  , 0.  , 0.  ],
            [0.73, 1.21, 0.73, 1.21]]], dtype=float32)
    """
    params = ("group_norm", num_groups, activation, channel_axis, eps, dtype)
    return _group_norm(params, (x, weight, bias))[0]


def instance_norm(
    x: Any,
    weight: Any = None,
    bias: Any = None,
    *,
    eps: float = 1e-5,
    activation: str | None = None,
    channel_axis: int = -1,
    dtype: Any = None,
) -> Any:
    """Apply `group_norm` with each channel a group of its own.

    As `cunorm.instance_norm`, but differentiable, with what `group_norm` says::

        y = g((x - mean) / sqrt(mean((x - mean) ** 2) + eps) * weight + bias)

    Parameters
    ----------
    x, weight, bias : array
        As for `group_norm`; all arguments are as for `cunorm.instance_norm`.

    Returns
    -------
    Array
        y, as from `group_norm`.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, ImportError
        As `group_norm` does.

    Examples
    --------
    >>> import jax.numpy as jnp, numpy as np
    >>> import cunorm.jax
    >>> np.asarray(cunorm.jax.instance_norm(jnp.array([[[1.0, 10.0], [3.0, 70.0]]]))).round(4)
    array([[[-1., -1.],
            [ 1.,  1.]]], dtype=float32)
    """
    params = ("instance_norm", EACH_CHANNEL, activation, channel_axis, eps, dtype)
    return _group_norm(params, (x, weight, bias))[0]
