# SPDX-License-Identifier: MIT
"""A small pre-norm Transformer over characters, on bare arrays; cunorm computes all norms."""
