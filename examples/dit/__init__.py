# SPDX-License-Identifier: MIT
"""A small diffusion transformer in PyTorch, its data and its picture."""
