# SPDX-License-Identifier: MIT
"""Differentiable row norms of JAX arrays; `normalize` says what all have in common."""

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

    Without a gate, which multiplies x or y by its activation as in `normalize`::

        y = x / sqrt(mean(x * x) + eps) * (weight + weight_offset)

    Source: B. Zhang and R. Sennrich, "Root Mean Square Layer Normalization", arXiv:1910.07467.

    Parameters
    ----------
    x, weight, gate : array
        As of `cunorm.rms_norm`, of JAX or NumPy; weight and gate are optional.
    eps, axis, groups, weight_offset, round_before_weight, gate_activation, gate_position : optional
        As of `cunorm.rms_norm`, and static: no tracers.
    dtype : dtype, optional
        y's; as there.

    Returns
    -------
    Array
        y, of x's shape. Saved for its gradients: x, the gate and the parameters, which are there
        anyway, and 1 / sqrt(...) of each row.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, ImportError
        As `normalize` does.

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
    scale = (None, weight_offset, weight is not None, eps)
    return _row_norm(("rms_norm", *norm, *scale, dtype), (x, None, gate, weight, None))[0]


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

    Without a gate, which multiplies x or y by its activation as in `normalize`::

        q = x - mean(x)
        y = q / sqrt(mean(q * q) + eps) * (weight + weight_offset) + bias

    Source: J. L. Ba, J. R. Kiros and G. E. Hinton, "Layer Normalization", arXiv:1607.06450.

    Parameters
    ----------
    x, weight, bias, gate : array
        As of `cunorm.layer_norm`, of JAX or NumPy; all but x are optional.
    eps, axis, groups, weight_offset, round_before_weight, gate_activation, gate_position : optional
        As of `cunorm.layer_norm`, and static: no tracers.
    dtype : dtype, optional
        y's; as there.

    Returns
    -------
    Array
        y, of x's shape. Saved for its gradients: x, the gate and the parameters, which are there
        anyway, and the mean and 1 / sqrt(...) of each row.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, ImportError
        As `normalize` does.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, numpy as np
    >>> import cunorm.jax
    >>> x, weight = jnp.array([[3.0, 7.0]]), jnp.array([1.0, 10.0])
    >>> np.asarray(jax.jit(cunorm.jax.layer_norm)(x, weight)).round(3)
    array([[-1., 10.]], dtype=float32)
    """
    norm = (True, axis, groups, round_before_weight, gate_activation, gate_position)
    scale = (None, weight_offset, weight is not None, eps)
    return _row_norm(("layer_norm", *norm, *scale, dtype), (x, None, gate, weight, bias))[0]


def l2_norm(
    x: Any, *, eps: float = 1e-12, axis: int = -1, groups: int = 1, dtype: Any = None
) -> Any:
    """Scale each row of x to length 1.

    ::

        y = x / sqrt(sum(x * x) + eps)

    Source: `normalize` with c = 1, but for eps, which is added to the sum.

    Parameters
    ----------
    x : array
        As of `cunorm.l2_norm`, of JAX or NumPy.
    eps, axis, groups, dtype : optional
        As of `cunorm.l2_norm`, and static: no tracers.

    Returns
    -------
    Array
        y, of x's shape. Saved for its gradient: x and a number for each row.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, ImportError
        As `normalize` does.

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

    With the operands, and the defaults, of `cunorm.normalize`::

        p = x * g(gate)     if there is a pre-gate, else x
        q = p - mean(p)     if center, else p
        r = q / sqrt(mean(q * q) + eps)
        n = c / sqrt(d) * r * (weight + weight_offset) + bias
        y = n * g(gate)     if there is a post-gate, else n

    Source: "Normalize with Residual or Gate" (xopes), with eps added to the mean square.

    Parameters
    ----------
    x, weight, bias, gate : array
        As of `cunorm.normalize`: float16, bfloat16, float32 or float64 each, of JAX or NumPy. All
        but x are optional.
    c, center, eps, axis, groups, weight_offset, round_before_weight : optional
        As of `cunorm.normalize`, and static: no tracers.
    gate_activation, gate_position : str, optional
        As of `cunorm.normalize`.
    dtype : dtype, optional
        y's; by default x's, with round_before_weight what x and weight promote to.

    Returns
    -------
    Array
        y, of x's shape. It may be used under jit, grad, vmap, scan, checkpoint and shard_map. Saved
        for its gradients: x, the gate and the parameters, which are there anyway, and one or two
        numbers for each row.

    Raises
    ------
    TypeError, ValueError
        As `cunorm.normalize` does, when the call is traced; and for a float64 result where
        ``jax_enable_x64`` is off.
    NotImplementedError
        If a second derivative is asked for.
    ImportError
        If this JAX's foreign function interface is of a version that is not known.

    Notes
    -----
    Each gradient is rounded once, to its operand's dtype; y where `cunorm.normalize` rounds it. An
    error while the kernels compile or run is XLA's, a RuntimeError, with their message.

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
    scale = (typed_key(c), weight_offset, weight is not None, eps)
    return _row_norm(("normalize", *norm, *scale, dtype), (x, None, gate, weight, bias))[0]


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

    ::

        s = x + residual                        rounded to residual's dtype: the new stream
        y = rms_norm(s, weight)                 gated, if there is a gate, as there

    Sources: those of `rms_norm` and `add_normalize`.

    Parameters
    ----------
    x, residual, weight, gate : array
        As of `cunorm.add_rms_norm`, of JAX or NumPy; residual is None where the stream begins.
    eps, axis, groups, weight_offset, round_before_weight, gate_activation, gate_position : optional
        As of `rms_norm`.
    dtype, residual_dtype : dtype, optional
        As of `cunorm.add_rms_norm`.

    Returns
    -------
    AddNorm
        ``y`` and ``residual``, the new stream, as from `add_normalize`.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, ImportError
        As `normalize` does.

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

    ::

        s = x + residual                        rounded to residual's dtype: the new stream
        y = layer_norm(s, weight, bias)         gated, if there is a gate, as there

    Sources: those of `layer_norm` and `add_normalize`.

    Parameters
    ----------
    x, residual, weight, bias, gate : array
        As of `cunorm.add_layer_norm`, of JAX or NumPy; residual is None where the stream begins.
    eps, axis, groups, weight_offset, round_before_weight, gate_activation, gate_position : optional
        As of `layer_norm`.
    dtype, residual_dtype : dtype, optional
        As of `cunorm.add_layer_norm`.

    Returns
    -------
    AddNorm
        ``y`` and ``residual``, the new stream, as from `add_normalize`.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, ImportError
        As `normalize` does.

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

    ::

        s = x + residual                        rounded to residual's dtype: the new stream
        y = normalize(s, weight, bias)          gated, if there is a gate, as there

    Source: "Normalize with Residual or Gate" (xopes), with eps added to the mean square.

    Parameters
    ----------
    x, residual, weight, bias, gate : array
        As of `cunorm.add_normalize`, of JAX or NumPy; residual is None where the stream begins.
    c, center, eps, axis, groups, weight_offset, round_before_weight : optional
        As of `normalize`.
    gate_activation, gate_position : str, optional
        As of `normalize`.
    dtype, residual_dtype : dtype, optional
        As of `cunorm.add_normalize`.

    Returns
    -------
    AddNorm
        ``y`` and ``residual``, the new stream, both of x's shape; gradients go through both.
        Without residual the new stream is x, unless another dtype is asked for. Saved for the
        gradients: the new stream, the gate, the parameters, and one or two numbers for each row.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, ImportError
        As `normalize` does.

    Notes
    -----
    The gradients that reach y and the new stream are added up in the type of the computation and
    rounded once, to x's dtype for x and to the stream's for residual.

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
