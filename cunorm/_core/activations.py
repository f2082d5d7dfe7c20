# SPDX-License-Identifier: MIT
"""The activations of gates and of group norms: the names of callers, and those of the sources."""

from __future__ import annotations

ACTIVATIONS = {
    "identity": "identity",
    "sigmoid": "sigmoid",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_tanh",
}
