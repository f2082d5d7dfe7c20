# SPDX-License-Identifier: MIT
"""The norms as functions of JAX: differentiable, under jit, vmap, scan, checkpoint and shard_map.

They run the kernels of the plain functions through ``jax.ffi``: XLA allocates, and orders.
"""

from cunorm.jax._ffi import refusal, register
from cunorm.jax._group_norm import group_norm, instance_norm
from cunorm.jax._row_norm import (
    add_layer_norm,
    add_normalize,
    add_rms_norm,
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
