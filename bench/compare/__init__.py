# SPDX-License-Identifier: MIT
"""Two checkouts of cunorm, timed in turns."""
