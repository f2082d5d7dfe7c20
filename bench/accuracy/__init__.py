# SPDX-License-Identifier: MIT
"""Errors of results, in ulp, against float64."""
