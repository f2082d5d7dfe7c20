# SPDX-License-Identifier: MIT
"""Timings. On a machine with a GPU, start with `bench/check_gpu.sh`."""
