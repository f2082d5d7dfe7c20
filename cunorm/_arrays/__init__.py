# SPDX-License-Identifier: MIT
"""Adapters to array libraries: each reads the arrays of one, and makes new ones."""
