# SPDX-License-Identifier: MIT
"""The two choices of norms for the model: written by hand in JAX, or cunorm's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import cunorm.jax

EPS = 1e-6


class Norms(NamedTuple):
    """The two norms that the model calls.

    `add_rms_norm` adds a branch to the residual stream, or takes the branch as the stream if the
    stream is None. It returns y and the new stream.
    """

    add_rms_norm: Callable[..., tuple[Any, Any]]
    rms_norm: Callable[..., Any]


def _rms_norm(x: Any, weight: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + EPS) * weight


def _add_rms_norm(x: Any, stream: Any, weight: Any) -> tuple[Any, Any]:
    stream = x if stream is None else x + stream
    return _rms_norm(stream, weight), stream


HAND_WRITTEN = Norms(_add_rms_norm, _rms_norm)
CUNORM = Norms(cunorm.jax.add_rms_norm, cunorm.jax.rms_norm)
