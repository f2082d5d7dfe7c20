# SPDX-License-Identifier: MIT
"""A small pre-norm Transformer over characters that uses only torch.nn."""
