# SPDX-License-Identifier: MIT
"""The activations of gates and of group norms: their names in the sources by the public ones."""

from __future__ import annotations

_NAMES = ("identity", "sigmoid", "silu", "swish", "tanh", "relu", "gelu", "gelu_tanh")
ACTIVATIONS = {name: name for name in _NAMES} | {"swish": "silu"}
