# SPDX-License-Identifier: MIT
"""Let cunorm run the norms of a PyTorch model that is there already, and undo it."""
