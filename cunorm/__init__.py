# SPDX-License-Identifier: MIT
"""cunorm: fast normalization kernels, forward and backward, for every array framework.

`normalize` says what the row norms have in common: rows, dtypes, rounding, strides and errors;
`group_norm` says it of the group norms.

Subnormal numbers of float32 (so of bfloat16 too) count as zero in arithmetic on CUDA, as CuPy
compiles all kernels with flush-to-zero. On a CPU they are kept, and the floating-point mode of the
caller is never changed.
"""

from cunorm import reference
from cunorm._cache import CacheInfo, Cleared, cache_info, clear_cache
from cunorm._cpu import set_num_threads
from cunorm._warmup import Warmup, warmup
from cunorm._workspace_size import workspace_size
from cunorm.group_norm import (
    group_norm,
    group_norm_backward,
    group_norm_forward,
    instance_norm,
)
from cunorm.results import AddNorm, GroupNormForward, GroupNormGrads, NormForward, NormGrads
from cunorm.row_norm import (
    add_layer_norm,
    add_normalize,
    add_rms_norm,
    l2_norm,
    l2_norm_backward,
    l2_norm_forward,
    layer_norm,
    layer_norm_backward,
    layer_norm_forward,
    normalize,
    normalize_backward,
    normalize_forward,
    rms_norm,
    rms_norm_backward,
    rms_norm_forward,
)

__version__ = "0.1.0"

__all__ = [
    "AddNorm",
    "CacheInfo",
    "Cleared",
    "GroupNormForward",
    "GroupNormGrads",
    "NormForward",
    "NormGrads",
    "Warmup",
    "add_layer_norm",
    "add_normalize",
    "add_rms_norm",
    "cache_info",
    "clear_cache",
    "group_norm",
    "group_norm_backward",
    "group_norm_forward",
    "instance_norm",
    "l2_norm",
    "l2_norm_backward",
    "l2_norm_forward",
    "layer_norm",
    "layer_norm_backward",
    "layer_norm_forward",
    "normalize",
    "normalize_backward",
    "normalize_forward",
    "reference",
    "rms_norm",
    "rms_norm_backward",
    "rms_norm_forward",
    "set_num_threads",
    "warmup",
    "workspace_size",
]
