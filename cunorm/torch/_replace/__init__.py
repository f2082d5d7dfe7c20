# SPDX-License-Identifier: MIT
"""Let cunorm run the norms of a PyTorch model that is there already, and undo it."""

from cunorm.torch._replace.replace import replace_norms, restore_norms
from cunorm.torch._replace.report import LeftNorm, ReplacedNorm, Replacement

__all__ = ["LeftNorm", "ReplacedNorm", "Replacement", "replace_norms", "restore_norms"]
