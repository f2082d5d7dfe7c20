# SPDX-License-Identifier: MIT
"""A character-level Transformer in bare JAX, with exchangeable norms."""
