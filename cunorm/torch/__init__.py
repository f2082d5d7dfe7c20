# SPDX-License-Identifier: MIT
"""cunorm for PyTorch: the norms as differentiable functions and as modules.

The functions take the arguments of their namesakes in `cunorm` but for `out` and `workspace`, on
tensors of the CPU and of CUDA. They are recorded by autograd, traced by torch.compile, and
transformed by torch.func; a second derivative is computed by torch's own operations.
"""

from cunorm.results import AddNorm
from cunorm.torch._centered_modules import GroupNorm, LayerNorm
from cunorm.torch._group_norm import group_norm, instance_norm
from cunorm.torch._modules import AddRMSNorm, GatedRMSNorm, RMSNorm
from cunorm.torch._replace.replace import replace_norms, restore_norms
from cunorm.torch._replace.report import LeftNorm, ReplacedNorm, Replacement
from cunorm.torch._row_norm import (
    add_layer_norm,
    add_normalize,
    add_rms_norm,
    l2_norm,
    layer_norm,
    normalize,
    rms_norm,
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
