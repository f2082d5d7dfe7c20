# SPDX-License-Identifier: MIT
"""cunorm for PyTorch: the norms as differentiable functions and as modules.

A function takes the arguments of its namesake in `cunorm` except `out` and `workspace`, and tensors
on the CPU, on CUDA or on meta. It computes the same formula, rounds in the same places and raises
the same errors; an operand that is no tensor is a TypeError. y is contiguous; that of a group norm
has x's memory layout. Functions without an example are called as `rms_norm` and `add_rms_norm` are.

Autograd records the functions, torch.compile traces them, and torch.func transforms them. For the
backward they keep x (if there is a residual, the new stream instead), gate, weight, bias, rstd and,
if they centre rows, mean. torch's own operations compute a second derivative. The modules round as
the functions do. A wrong argument is an error when a module is made (for device, torch's error), a
wrong x when it is called.
"""

from cunorm.results import AddNorm
from cunorm.torch._functions import (
    add_layer_norm,
    add_normalize,
    add_rms_norm,
    group_norm,
    instance_norm,
    l2_norm,
    layer_norm,
    normalize,
    rms_norm,
)
from cunorm.torch._modules import AddRMSNorm, GatedRMSNorm, GroupNorm, LayerNorm, RMSNorm
from cunorm.torch._replace import LeftNorm, ReplacedNorm, Replacement, replace_norms, restore_norms

__all__ = [
    "AddNorm",
    "AddRMSNorm",
    "GatedRMSNorm",
    "GroupNorm",
    "LayerNorm",
    "LeftNorm",
    "RMSNorm",
    "ReplacedNorm",
    "Replacement",
    "add_layer_norm",
    "add_normalize",
    "add_rms_norm",
    "group_norm",
    "instance_norm",
    "l2_norm",
    "layer_norm",
    "normalize",
    "replace_norms",
    "restore_norms",
    "rms_norm",
]
