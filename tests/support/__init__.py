# SPDX-License-Identifier: MIT
"""Helpers that tests share."""
