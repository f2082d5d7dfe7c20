# SPDX-License-Identifier: MIT
"""The activations of gates and of group norms, by the names that callers give them."""

from __future__ import annotations

from typing import Any

from cunorm import _checks

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


def checked_activation(function: str, argument: str, activation: Any) -> str:
    """Return the name in the sources of an activation."""
    return ACTIVATIONS[_checks.choice(function, argument, activation, ACTIVATIONS)]
