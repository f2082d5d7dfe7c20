# SPDX-License-Identifier: MIT
"""cunorm: fast normalization kernels, forward and backward, for every array framework."""

from cunorm import reference
from cunorm._cpu import set_num_threads
from cunorm.results import AddNorm, NormForward, NormGrads
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
    "NormForward",
    "NormGrads",
    "add_layer_norm",
    "add_normalize",
    "add_rms_norm",
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
]
