# SPDX-License-Identifier: MIT
"""What the examples of mean flows share."""
