# SPDX-License-Identifier: MIT
"""A small pre-norm Transformer over characters, on bare arrays, with all norms by cunorm."""
