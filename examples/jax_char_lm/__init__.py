# SPDX-License-Identifier: MIT
"""A character-level Transformer in bare JAX, with norms to be exchanged."""
