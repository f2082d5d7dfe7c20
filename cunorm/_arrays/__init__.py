# SPDX-License-Identifier: MIT
"""Adapters to array libraries: each reads and makes the arrays of one library."""
