# SPDX-License-Identifier: MIT
"""Group norms, which shift and scale each group of channels of a sample by its mean and rstd."""

from cunorm._group_norm.group_norm import (
    group_norm,
    group_norm_backward,
    group_norm_forward,
    instance_norm,
)
from cunorm._group_norm.jvp import group_norm_jvp

__all__ = [
    "group_norm",
    "group_norm_backward",
    "group_norm_forward",
    "group_norm_jvp",
    "instance_norm",
]
