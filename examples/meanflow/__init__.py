# SPDX-License-Identifier: MIT
"""The data of the examples of mean flows, and their report."""
