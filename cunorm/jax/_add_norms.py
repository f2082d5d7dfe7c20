# SPDX-License-Identifier: MIT
"""Differentiable row norms of a residual stream; `add_normalize` says what they have in common."""

from __future__ import annotations

from typing import Any

from cunorm.jax._rows import row_norm
from cunorm.results import AddNorm
from cunorm.row_norm._forward import Arrays, Norm
from cunorm.row_norm._forward_plan import Options
from cunorm.row_norm._variant import Variant


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
    variant = Variant(False, axis, groups, round_before_weight, gate_activation, gate_position)
    norm = Norm("add_rms_norm", variant, eps, weight_offset=weight_offset)
    arrays = Arrays(x, residual, gate=gate, weight=weight)
    return _add_norm(norm, arrays, dtype, residual_dtype)


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
    variant = Variant(True, axis, groups, round_before_weight, gate_activation, gate_position)
    norm = Norm("add_layer_norm", variant, eps, weight_offset=weight_offset)
    arrays = Arrays(x, residual, gate=gate, weight=weight, bias=bias)
    return _add_norm(norm, arrays, dtype, residual_dtype)


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
    variant = Variant(center, axis, groups, round_before_weight, gate_activation, gate_position)
    norm = Norm("add_normalize", variant, eps, c, weight_offset=weight_offset)
    arrays = Arrays(x, residual, gate=gate, weight=weight, bias=bias)
    return _add_norm(norm, arrays, dtype, residual_dtype)


def _add_norm(norm: Norm, arrays: Arrays, dtype: Any, residual_dtype: Any) -> AddNorm:
    result: AddNorm = row_norm(norm, arrays, Options(dtype, residual_dtype, streams=True))
    return result
