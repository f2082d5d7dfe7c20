# SPDX-License-Identifier: MIT
"""Timings, and checks of GPU plans; on a machine with a GPU, start with `bench/check_gpu.sh`."""
