# SPDX-License-Identifier: MIT
"""Row norms with a quantised result, without derivatives."""

from __future__ import annotations  # keeps the names of type aliases in help()

from collections.abc import Callable
from typing import Any

import jax
from jax import Array

from cunorm._core.memo import memoize, typed_key
from cunorm._core.types import Activation, DTypeLike, GatePosition, QuantizedDType, ScaleDType
from cunorm._row_norm.kernels import forward_inputs
from cunorm._row_norm.quantized_plan import ROW_QUANTIZED
from cunorm._row_norm.quantized_spec import RowQuantizedSpec, array_or_none, quantized_scalars
from cunorm._row_norm.spec import Scalars, forward_scalars
from cunorm.jax import _ffi
from cunorm.jax._norm import ArrayLike, Inputs, checked
from cunorm.results import QuantizedNorm


def rms_norm_quantized(
    x: ArrayLike,
    weight: ArrayLike | None = None,
    *,
    bias: ArrayLike | None = None,
    residual: ArrayLike | None = None,
    residual_dtype: DTypeLike | None = None,
    eps: float = 1e-6,
    axis: int = -1,
    groups: int = 1,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    gate: ArrayLike | None = None,
    gate_activation: Activation = "silu",
    gate_position: GatePosition = "post",
    dtype: QuantizedDType = "float8_e4m3fn",
    scale: ArrayLike | float | None = None,
    block: int | None = None,
    scale_dtype: ScaleDType = "float32",
    absmax_bound: float | None = None,
    return_y: bool = False,
) -> QuantizedNorm[Array]:
    """Divide rows by their root mean square and quantise them, as `cunorm.rms_norm_quantized` does.

    >>> import cunorm.jax, jax, jax.numpy as jnp, numpy as np
    >>> x = jnp.array([[1.0, 7.0], [10.0, -70.0]])
    >>> q, scale, *_ = cunorm.jax.rms_norm_quantized(x)
    >>> q.dtype, np.asarray(q, np.float32), np.asarray(scale).round(6)
    (dtype(float8_e4m3fn), array([[  64.,  448.],
           [  64., -448.]], dtype=float32), array([[0.003125],
           [0.003125]], dtype=float32))
    """
    options = (axis, groups, weight_offset, round_before_weight, gate_activation, gate_position)
    quantized = (dtype, scale, block, scale_dtype, absmax_bound, return_y)
    forward = forward_scalars("rms_norm_quantized", options, eps, None, residual_dtype)
    inputs = forward_inputs(x, weight=weight, bias=bias, gate=gate, residual=residual)
    return _quantized(quantized_scalars(forward, quantized), inputs, scale)


def layer_norm_quantized(
    x: ArrayLike,
    weight: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    residual: ArrayLike | None = None,
    residual_dtype: DTypeLike | None = None,
    eps: float = 1e-5,
    axis: int = -1,
    groups: int = 1,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    gate: ArrayLike | None = None,
    gate_activation: Activation = "silu",
    gate_position: GatePosition = "post",
    dtype: QuantizedDType = "float8_e4m3fn",
    scale: ArrayLike | float | None = None,
    block: int | None = None,
    scale_dtype: ScaleDType = "float32",
    absmax_bound: float | None = None,
    return_y: bool = False,
) -> QuantizedNorm[Array]:
    """Apply `layer_norm` and quantise the result, as `cunorm.layer_norm_quantized` does.

    >>> import cunorm.jax, jax.numpy as jnp, numpy as np
    >>> found = cunorm.jax.layer_norm_quantized(jnp.array([[1.0, 3.0]]), return_y=True)
    >>> np.asarray(found.q, np.float32), np.asarray(found.y).round(4)
    (array([[-448.,  448.]], dtype=float32), array([[-1.,  1.]], dtype=float32))
    """
    options = (axis, groups, weight_offset, round_before_weight, gate_activation, gate_position)
    quantized = (dtype, scale, block, scale_dtype, absmax_bound, return_y)
    forward = forward_scalars(
        "layer_norm_quantized", options, eps, None, residual_dtype, center=True
    )
    inputs = forward_inputs(x, weight=weight, bias=bias, gate=gate, residual=residual)
    return _quantized(quantized_scalars(forward, quantized), inputs, scale)


def normalize_quantized(
    x: ArrayLike,
    weight: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    residual: ArrayLike | None = None,
    residual_dtype: DTypeLike | None = None,
    c: float | None = None,
    center: bool = False,
    eps: float = 1e-6,
    axis: int = -1,
    groups: int = 1,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    gate: ArrayLike | None = None,
    gate_activation: Activation = "silu",
    gate_position: GatePosition = "post",
    dtype: QuantizedDType = "float8_e4m3fn",
    scale: ArrayLike | float | None = None,
    block: int | None = None,
    scale_dtype: ScaleDType = "float32",
    absmax_bound: float | None = None,
    return_y: bool = False,
) -> QuantizedNorm[Array]:
    """Apply `normalize` and quantise the result, as `cunorm.normalize_quantized` does.

    >>> import cunorm.jax, jax.numpy as jnp, numpy as np
    >>> x = jnp.array([[3.0, 4.0], [-30.0, 40.0]])
    >>> cunorm.jax.normalize_quantized(x, c=1, dtype="int8").q
    Array([[ 95, 127],
           [-95, 127]], dtype=int8)
    """
    options = (axis, groups, weight_offset, round_before_weight, gate_activation, gate_position)
    quantized = (dtype, scale, block, scale_dtype, absmax_bound, return_y)
    forward = forward_scalars(
        "normalize_quantized", options, eps, None, residual_dtype, center=center, c=typed_key(c)
    )
    inputs = forward_inputs(x, weight=weight, bias=bias, gate=gate, residual=residual)
    return _quantized(quantized_scalars(forward, quantized), inputs, scale)


def _quantized(scalars: Scalars, inputs: Inputs, scale: Any) -> QuantizedNorm[Any]:
    spec, arrays, _ = checked(ROW_QUANTIZED, scalars, (*inputs, array_or_none(scale)))
    found = _compiled(spec)(arrays)
    *_, given = arrays  # JAX's own array, if scale has a `__jax_array__`
    if scale is None:
        return found
    return found._replace(scale=scale if given is None else given)


@memoize()
def _compiled(spec: RowQuantizedSpec) -> Callable[[Inputs], QuantizedNorm[Any]]:
    """Return the norm as a function that JAX compiles for each set of shapes and dtypes."""

    def function(arrays: Inputs) -> QuantizedNorm[Any]:
        return QuantizedNorm(**_ffi.run(ROW_QUANTIZED, spec, _ffi.match_varying_axes(arrays)))

    return jax.jit(function, inline=True)
