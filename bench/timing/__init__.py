# SPDX-License-Identifier: MIT
"""Calls of cunorm and of other libraries, checked and timed on a CPU or a GPU."""
