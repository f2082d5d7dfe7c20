# SPDX-License-Identifier: MIT
"""cunorm for PyTorch: the norms as differentiable functions and as modules.

A function takes the arguments of its namesake in `cunorm`, except `out`, `workspace` and given
statistics. Operands are tensors on the CPU, on CUDA or on meta; other objects are a TypeError. A
function has the formula, the roundings and the errors of its namesake. The y of a row norm is
contiguous; the y of a group norm, or of a row norm whose axis is a tuple, has x's memory layout.

Row norms, except those with quantised results, take two groups of processes, each a
``torch.distributed.ProcessGroup`` that has this process. The processes of process_group have parts
of the same rows: x, weight, bias, gate and residual are a process's own columns. They exchange 12
bytes a row forward and 8 backward (4 and 4 without a mean; twice as many in float64), and all have
the same statistics. Over parameter_group, the backward adds the gradients of weight and bias; its
processes have other rows. If x is a DTensor, its placements take the place of both. The modules
with these norms keep the groups.

Autograd records the functions, torch.compile traces them, and torch.func transforms them. For the
backward, a function keeps x (or the new stream, if there is a residual), gate, weight, bias, rstd
and, if it subtracts a mean, mean; for the gradient of a branch's gate, it keeps x, too. Reverse and
forward mode can be mixed and repeated: kernels compute first derivatives and, for row norms without
a gate, second ones; torch's operations compute the others, and those of torch.func in a compiled
function. Rows that processes share have only first derivatives in reverse mode, and quantised
results have none. Modules round as functions do. A wrong argument of a module is an error when the
module is made (a wrong device is torch's error); a wrong x is an error when the module is called.
"""

from cunorm.results import AddNorm, QuantizedNorm
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
from cunorm.torch._quantized import (
    layer_norm_quantized,
    normalize_quantized,
    rms_norm_quantized,
)
from cunorm.torch._replace import LeftNorm, ReplacedNorm, Replacement, replace_norms, restore_norms

__all__ = [
    "AddNorm",
    "AddRMSNorm",
    "GatedRMSNorm",
    "GroupNorm",
    "LayerNorm",
    "LeftNorm",
    "QuantizedNorm",
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
    "layer_norm_quantized",
    "normalize",
    "normalize_quantized",
    "replace_norms",
    "restore_norms",
    "rms_norm",
    "rms_norm_quantized",
]
