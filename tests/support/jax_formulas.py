# SPDX-License-Identifier: MIT
"""Norms in jax.numpy, which JAX itself can transform."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from tests.support.formulas import Formulas

FORMULAS = Formulas(
    {
        "identity": lambda z: z,
        "relu": lambda z: jnp.maximum(z, 0.0),
        "sigmoid": jax.nn.sigmoid,
        "silu": jax.nn.silu,
        "tanh": jnp.tanh,
        "gelu": partial(jax.nn.gelu, approximate=False),
        "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    }
)
rms_norm, layer_norm, group_norm = FORMULAS.rms_norm, FORMULAS.layer_norm, FORMULAS.group_norm
add_rms_norm, add_layer_norm = FORMULAS.add_rms_norm, FORMULAS.add_layer_norm
add_normalize = FORMULAS.add_normalize
