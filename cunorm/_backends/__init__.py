# SPDX-License-Identifier: MIT
"""The two machines: CUDA GPUs, and the CPU."""
