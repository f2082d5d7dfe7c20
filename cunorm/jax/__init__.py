# SPDX-License-Identifier: MIT
"""The norms as functions of JAX: differentiable, under jit, vmap, scan, checkpoint and shard_map.

They run the kernels through ``jax.ffi``: XLA allocates the arrays and orders the calls. Each does
what its namesake in `cunorm` does, and rounds y in the same places. All have in common:

- They take the arguments of their namesakes except `out` and `workspace`. Arrays are JAX's, traced
  or not, NumPy's, or objects with ``__jax_array__``; all other arguments are static. Results are
  JAX arrays. Functions without an example are called as `rms_norm` and `add_rms_norm` are.
- For gradients they save x (with a residual, the new stream instead), gate, weight, bias, rstd
  and, if they centre rows, mean. rstd and mean have a number for each row, or for each group of a
  row or sample. A gradient is rounded once, to its operand's dtype.
- Wrong input is the error of the plain function, when JAX traces the call. Where
  ``jax_enable_x64`` is off, a float64 `dtype` is a TypeError, and JAX makes float32 arrays of
  float64 NumPy arrays. A second derivative is a NotImplementedError, forward mode JAX's TypeError
  (`jax.linearize` raises it in a call of its result), a foreign function interface of an unknown
  version an ImportError. An error while kernels compile or run is XLA's RuntimeError with its text.
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
