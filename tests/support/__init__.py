# SPDX-License-Identifier: MIT
"""What tests share."""
