# SPDX-License-Identifier: MIT
"""Two checkouts of cunorm, and cunorm and torch, timed in turns."""
