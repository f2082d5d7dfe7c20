# SPDX-License-Identifier: MIT
"""Row norms of JAX arrays, differentiable; `rms_norm` says what all have in common."""

from __future__ import annotations

from typing import Any

from cunorm._core.memo import typed_key
from cunorm._row_norm.ops import ROW_BACKWARD, ROW_FORWARD
from cunorm._row_norm.spec import backward_spec
from cunorm.jax._vjp import Norm
from cunorm.results import AddNorm

_row_norm = Norm(ROW_FORWARD, ROW_BACKWARD, backward_spec)


def rms_norm(
    x: Any,
    weight: Any = None,
    *,
    eps: float = 1e-6,
    axis: int = -1,
    groups: int = 1,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    gate: Any = None,
    gate_activation: str = "silu",
    gate_position: str = "post",
    dtype: Any = None,
) -> Any:
    """Divide each row of x by its root mean square.

    As `cunorm.rms_norm`, but differentiable, and under jit, grad, vmap, scan, checkpoint and
    shard_map, which is also said of the other functions here. Saved for gradients: x, gate, weight
    and 1 / sqrt(...) of each row::

        y = x / sqrt(mean(x * x) + eps) * (weight + weight_offset)

    Parameters
    ----------
    x, weight, gate : array
        Of JAX, traced or not, or of NumPy. All arguments are as for `cunorm.rms_norm`; those that
        are no arrays are static. There is no `out`.

    Returns
    -------
    Array
        y, of x's shape.

    Raises
    ------
    TypeError, ValueError
        As `cunorm.rms_norm` does, when the call is traced; and for a float64 result where
        ``jax_enable_x64`` is off.
    NotImplementedError
        If a second derivative is asked for.
    ImportError
        If this JAX's foreign function interface is of a version that is not known.

    Notes
    -----
    Each gradient is rounded once, to its operand's dtype; y where `cunorm.rms_norm` rounds it. An
    error while the kernels compile or run is XLA's, a RuntimeError, with their message.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, numpy as np
    >>> import cunorm.jax
    >>> x, weight = jnp.array([[1.0, 7.0]]), jnp.array([1.0, 10.0])
    >>> np.asarray(cunorm.jax.rms_norm(x, weight)).round(4)
    array([[ 0.2, 14. ]], dtype=float32)
    >>> np.asarray(jax.grad(lambda weight: cunorm.jax.rms_norm(x, weight).sum())(weight)).round(4)
    array([0.2, 1.4], dtype=float32)
    """
    norm = (False, axis, groups, round_before_weight, gate_activation, gate_position)
    params = ("rms_norm", *norm, None, weight_offset, weight is not None, eps, dtype)
    return _row_norm(params, (x, None, gate, weight, None))[0]


def layer_norm(
    x: Any,
    weight: Any = None,
    bias: Any = None,
    *,
    eps: float = 1e-5,
    axis: int = -1,
    groups: int = 1,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    gate: Any = None,
    gate_activation: str = "silu",
    gate_position: str = "post",
    dtype: Any = None,
) -> Any:
    """Shift and scale each row of x to mean 0 and variance 1.

    As `cunorm.layer_norm`, but differentiable; x, mean and 1 / sqrt(...) of each row, gate and the
    parameters are saved for gradients::

        q = x - mean(x)
        y = q / sqrt(mean(q * q) + eps) * (weight + weight_offset) + bias

    Parameters
    ----------
    x, weight, bias, gate : array
        As for `rms_norm`; all arguments are as for `cunorm.layer_norm`.

    Returns
    -------
    Array
        y, of x's shape.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, ImportError
        As `rms_norm` does.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, numpy as np
    >>> import cunorm.jax
    >>> x, weight = jnp.array([[3.0, 7.0]]), jnp.array([1.0, 10.0])
    >>> np.asarray(jax.jit(cunorm.jax.layer_norm)(x, weight)).round(3)
    array([[-1., 10.]], dtype=float32)
    """
    norm = (True, axis, groups, round_before_weight, gate_activation, gate_position)
    params = ("layer_norm", *norm, None, weight_offset, weight is not None, eps, dtype)
    return _row_norm(params, (x, None, gate, weight, bias))[0]


def l2_norm(
    x: Any, *, eps: float = 1e-12, axis: int = -1, groups: int = 1, dtype: Any = None
) -> Any:
    """Scale each row of x to length 1.

    As `cunorm.l2_norm`, but differentiable; saved are x and a number for each row::

        y = x / sqrt(sum(x * x) + eps)

    Parameters
    ----------
    x : array
        As for `rms_norm`; all arguments are as for `cunorm.l2_norm`.

    Returns
    -------
    Array
        y, of x's shape.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, ImportError
        As `rms_norm` does.

    Examples
    --------
    >>> import jax.numpy as jnp, numpy as np
    >>> import cunorm.jax
    >>> np.asarray(cunorm.jax.l2_norm(jnp.array([[3.0, 4.0]]))).round(4)
    array([[0.6, 0.8]], dtype=float32)
    """
    norm = (False, axis, groups, False, "silu", "post", typed_key(1.0), 0.0, False, eps)
    params = ("l2_norm", *norm, dtype, None, False, False, True)
    return _row_norm(params, (x, None, None, None, None))[0]


def normalize(
    x: Any,
    weight: Any = None,
    bias: Any = None,
    *,
    c: float | None = None,
    center: bool = False,
    eps: float = 1e-6,
    axis: int = -1,
    groups: int = 1,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    gate: Any = None,
    gate_activation: str = "silu",
    gate_position: str = "post",
    dtype: Any = None,
) -> Any:
    """Normalise each row of x to the length c, by default the square root of its width.

    As `cunorm.normalize`, which says what a gate does, but differentiable; x, one or two numbers
    for each row, gate and the parameters are saved for gradients::

        q = x - mean(x)     if center, else x
        y = c / sqrt(d) * q / sqrt(mean(q * q) + eps) * (weight + weight_offset) + bias

    Parameters
    ----------
    x, weight, bias, gate : array
        As for `rms_norm`; all arguments are as for `cunorm.normalize`.

    Returns
    -------
    Array
        y, of x's shape.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, ImportError
        As `rms_norm` does.

    Examples
    --------
    >>> import jax.numpy as jnp, numpy as np
    >>> import cunorm.jax
    >>> x = jnp.array([[3.0, 4.0], [-30.0, 40.0]])
    >>> np.asarray(cunorm.jax.normalize(x, c=1)).round(4)
    array([[ 0.6,  0.8],
           [-0.6,  0.8]], dtype=float32)
    """
    norm = (center, axis, groups, round_before_weight, gate_activation, gate_position)
    params = ("normalize", *norm, typed_key(c), weight_offset, weight is not None, eps, dtype)
    return _row_norm(params, (x, None, gate, weight, bias))[0]


def add_rms_norm(
    x: Any,
    residual: Any,
    weight: Any = None,
    *,
    eps: float = 1e-6,
    axis: int = -1,
    groups: int = 1,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    gate: Any = None,
    gate_activation: str = "silu",
    gate_position: str = "post",
    dtype: Any = None,
    residual_dtype: Any = None,
) -> AddNorm:
    """Add x to the residual stream, and apply `rms_norm` to the new stream.

    As `cunorm.add_rms_norm`, but differentiable. The new stream is saved in place of x. The
    gradients that reach it and y are added up before they are rounded, to x's dtype for x and to
    the stream's for residual::

        s = x + residual                        rounded to residual's dtype: the new stream
        y = rms_norm(s, weight)

    Parameters
    ----------
    x, residual, weight, gate : array
        As for `rms_norm`; all arguments are as for `cunorm.add_rms_norm`. Without residual x
        is the new stream, unless another dtype is asked for.

    Returns
    -------
    AddNorm
        ``y`` and ``residual``, the new stream, both of x's shape and differentiable.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, ImportError
        As `rms_norm` does.

    Examples
    --------
    >>> import jax.numpy as jnp, numpy as np
    >>> import cunorm.jax
    >>> y, stream = cunorm.jax.add_rms_norm(jnp.array([[1.0, 3.0]]), jnp.array([[0.0, 4.0]]))
    >>> np.asarray(y).round(4), stream
    (array([[0.2, 1.4]], dtype=float32), Array([[1., 7.]], dtype=float32))
    """
    norm = (False, axis, groups, round_before_weight, gate_activation, gate_position)
    scale = (None, weight_offset, weight is not None, eps)
    params = ("add_rms_norm", *norm, *scale, dtype, residual_dtype, False, True)
    return AddNorm(*_row_norm(params, (x, residual, gate, weight, None)))


def add_layer_norm(
    x: Any,
    residual: Any,
    weight: Any = None,
    bias: Any = None,
    *,
    eps: float = 1e-5,
    axis: int = -1,
    groups: int = 1,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    gate: Any = None,
    gate_activation: str = "silu",
    gate_position: str = "post",
    dtype: Any = None,
    residual_dtype: Any = None,
) -> AddNorm:
    """Add x to the residual stream, and apply `layer_norm` to the new stream.

    As `cunorm.add_layer_norm`, but differentiable, with what `add_rms_norm` says::

        s = x + residual                        rounded to residual's dtype: the new stream
        y = layer_norm(s, weight, bias)

    Parameters
    ----------
    x, residual, weight, bias, gate : array
        As for `add_rms_norm`; all arguments are as for `cunorm.add_layer_norm`.

    Returns
    -------
    AddNorm
        ``y`` and ``residual``, the new stream, both of x's shape and differentiable.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, ImportError
        As `rms_norm` does.

    Examples
    --------
    >>> import jax.numpy as jnp, numpy as np
    >>> import cunorm.jax
    >>> y, stream = cunorm.jax.add_layer_norm(jnp.array([[1.0, 2.0]]), jnp.array([[4.0, 7.0]]))
    >>> np.asarray(y).round(4), stream
    (array([[-1.,  1.]], dtype=float32), Array([[5., 9.]], dtype=float32))
    """
    norm = (True, axis, groups, round_before_weight, gate_activation, gate_position)
    scale = (None, weight_offset, weight is not None, eps)
    params = ("add_layer_norm", *norm, *scale, dtype, residual_dtype, False, True)
    return AddNorm(*_row_norm(params, (x, residual, gate, weight, bias)))


def add_normalize(
    x: Any,
    residual: Any,
    weight: Any = None,
    bias: Any = None,
    *,
    c: float | None = None,
    center: bool = False,
    eps: float = 1e-6,
    axis: int = -1,
    groups: int = 1,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    gate: Any = None,
    gate_activation: str = "silu",
    gate_position: str = "post",
    dtype: Any = None,
    residual_dtype: Any = None,
) -> AddNorm:
    """Add x to the residual stream, and `normalize` the new stream.

    As `cunorm.add_normalize`, but differentiable, with what `add_rms_norm` says::

        s = x + residual                        rounded to residual's dtype: the new stream
        y = normalize(s, weight, bias)

    Parameters
    ----------
    x, residual, weight, bias, gate : array
        As for `add_rms_norm`; all arguments are as for `cunorm.add_normalize`.

    Returns
    -------
    AddNorm
        ``y`` and ``residual``, the new stream, both of x's shape and differentiable.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, ImportError
        As `rms_norm` does.

    Examples
    --------
    >>> import jax.numpy as jnp, numpy as np
    >>> import cunorm.jax
    >>> x, stream = jnp.array([[1, 2]], jnp.bfloat16), jnp.array([[2.0, 2.0]])
    >>> y, stream = cunorm.jax.add_normalize(x, stream, c=1)
    >>> y.dtype, stream
    (dtype(bfloat16), Array([[3., 4.]], dtype=float32))
    """
    norm = (center, axis, groups, round_before_weight, gate_activation, gate_position)
    scale = (typed_key(c), weight_offset, weight is not None, eps)
    params = ("add_normalize", *norm, *scale, dtype, residual_dtype, False, True)
    return AddNorm(*_row_norm(params, (x, residual, gate, weight, bias)))
