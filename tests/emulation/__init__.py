# SPDX-License-Identifier: MIT
"""Runs CUDA kernels with their GPU launch plans on a CPU."""
