# SPDX-License-Identifier: MIT
"""A small pre-norm Transformer over characters, of torch.nn alone."""
