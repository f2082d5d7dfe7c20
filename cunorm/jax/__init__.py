# SPDX-License-Identifier: MIT
"""The norms as functions of JAX: differentiable, under jit, vmap, scan, checkpoint and shard_map.

They run the kernels of the plain functions through ``jax.ffi``: XLA allocates, and orders.
"""

from cunorm.jax._add_norms import add_layer_norm, add_normalize, add_rms_norm
from cunorm.jax._group_norms import group_norm, instance_norm
from cunorm.jax._row_norms import l2_norm, layer_norm, normalize, rms_norm
from cunorm.jax._target import refused, register

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

if refused() is None:  # else the first call says why
    register()  # now, for executables that another process compiled
