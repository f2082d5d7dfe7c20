# SPDX-License-Identifier: MIT
"""A small pre-norm Transformer over characters, on bare arrays, every norm of it from cunorm."""
