# SPDX-License-Identifier: MIT
"""The two backends: CUDA GPUs, and the CPU."""
