# SPDX-License-Identifier: MIT
"""The norms as differentiable JAX functions, also under jit, vmap, scan, checkpoint, shard_map.

The functions run the kernels through ``jax.ffi``: XLA allocates the arrays and orders the calls.
Each function computes and rounds y as its namesake in `cunorm` does. All functions have in common:

- They take the arguments of their namesakes except `out`, `workspace` and given statistics. Arrays
  are JAX's, traced or not, NumPy's, or objects with ``__jax_array__``; all other arguments are
  static. Results are JAX arrays.
- The row norms, except those with quantised results, take `axis_name`: the name of an axis of
  ``jax.shard_map`` over which the rows of x are split, or a tuple of names. x, weight, bias, gate
  and residual are then the parts of one device, and the devices exchange 12 bytes a row forward and
  8 backward (4 and 4 without a mean; twice as many in float64). Results are those of whole rows,
  with the same statistics on all devices. It needs groups=1. A name of no such axis is a
  ValueError, also outside of ``shard_map``; so are rows that are known to be equal on all devices.
- `rms_norm`, `layer_norm` and `normalize` take `where`, a bool array that broadcasts to x. A row's
  means are those of its elements where it is True, as with `where` in jax.numpy and `mask` in Flax,
  and d in `normalize` is their number; these statistics normalise all elements. XLA computes these
  norms and their derivatives, without a kernel. In a row without a True, y is NaN, as in Flax:
  ``where | ~where.any(-1, keepdims=True)`` takes such rows whole. It combines with no gate,
  groups other than 1, or axis_name, each of which is a ValueError beside it; a dtype other than
  bool is a TypeError. No other function of cunorm has `where`.
- For gradients they save x (or the new stream, if there is a residual), gate, weight, bias, rstd
  and, if they subtract a mean, mean. rstd and mean have a number for each row, or for each group of
  a row or sample. For the gradient of a gate of the branch, x is saved beside the new stream. A
  gradient is rounded once, to the dtype of its operand.
- Derivatives exist in forward and in reverse mode, and of any order. A tangent of y comes from one
  kernel, as the gradients do, and is rounded once, to y's dtype. Kernels also make the second
  derivatives of rows that are whole; those of rows that are split and of group norms, and the third
  derivatives, are operations of XLA. The derivative of `round_before_weight`'s rounding is 1.
- Norms with quantised results have no derivatives: where JAX differentiates, pass them
  ``jax.lax.stop_gradient`` of each array, else they raise a NotImplementedError. A given scale may
  be traced, too, and is returned as it was given.
- Wrong input raises the namesake's error when JAX traces the call. If ``jax_enable_x64`` is
  off, a float64 `dtype` is a TypeError, and float64 NumPy arrays become float32. A foreign function
  interface of an unknown version is an ImportError. An error while kernels compile or run is XLA's
  RuntimeError with the error's text.
"""

from cunorm.jax._ffi import refusal, register
from cunorm.jax._functions import (
    add_layer_norm,
    add_normalize,
    add_rms_norm,
    group_norm,
    instance_norm,
    l2_norm,
    layer_norm,
    normalize,
    rms_norm,
)
from cunorm.jax._quantized import layer_norm_quantized, normalize_quantized, rms_norm_quantized

__all__ = [
    "add_layer_norm",
    "add_normalize",
    "add_rms_norm",
    "group_norm",
    "instance_norm",
    "l2_norm",
    "layer_norm",
    "layer_norm_quantized",
    "normalize",
    "normalize_quantized",
    "rms_norm",
    "rms_norm_quantized",
]

if refusal() is None:  # otherwise the first call raises the error
    register()  # executables from another process need this before any call
