# SPDX-License-Identifier: MIT
"""The norms as functions of JAX: differentiable, under jit, vmap, scan, checkpoint and shard_map.

They run the kernels of the plain functions through ``jax.ffi``: XLA allocates, and orders. Each
does what the function of the same name in `cunorm` does, and rounds y where that does. All have in
common:

- Arguments are those of the plain function, but for `out` and `workspace`. Arrays are of JAX,
  traced or not, of NumPy, or objects with ``__jax_array__``; all other arguments are static.
  Results are arrays of JAX.
- For gradients nothing is saved but what a docstring names. mean and rstd are one number for each
  row, or for each group of it or of a sample. A gradient is rounded once, to its operand's dtype.
- Wrong input is the error of the plain function, when the call is traced. Where
  ``jax_enable_x64`` is off a float64 `dtype` is a TypeError, and JAX makes float32 of float64
  arrays of NumPy. A second derivative is a NotImplementedError, forward mode JAX's own TypeError
  (what `jax.linearize` returns raises it when it is called), a foreign function interface of an
  unknown version an ImportError. An error while the kernels compile or run is XLA's, a
  RuntimeError, with their message.
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

__all__ = [
    "add_layer_norm",
    "add_normalize",
    "add_rms_norm",
    "group_norm",
    "instance_norm",
    "l2_norm",
    "layer_norm",
    "normalize",
    "rms_norm",
]

if refusal() is None:  # else the first call raises it
    register()  # now, for executables that another process compiled
