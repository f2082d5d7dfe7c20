# SPDX-License-Identifier: MIT
"""cunorm for PyTorch: the norms as differentiable functions and as modules.

A function takes the arguments of its namesake in `cunorm` but for `out` and `workspace`, and
tensors on the CPU, on CUDA or on meta; the channels of group norms are axis 1 by default. It
computes the same formula, rounds alike and raises the same errors; an operand that is no tensor is
a TypeError. y is contiguous, of x's shape and device; that of a group norm has x's memory layout.

The functions are recorded by autograd, traced by torch.compile, and transformed by torch.func. For
the backward they keep what their docstrings name, and nothing else; a second derivative is computed
by torch's own operations. The modules round as the functions do. A wrong argument is an error when
a module is made, for device one of torch's; a wrong x is one of its forward.
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
from cunorm.torch._replace.replace import (
    LeftNorm,
    ReplacedNorm,
    Replacement,
    replace_norms,
    restore_norms,
)

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
