# SPDX-License-Identifier: MIT
"""Timings. `bench/check_gpu.sh` is the way in on a machine with a GPU."""
