# SPDX-License-Identifier: MIT
"""The operators in float64 NumPy, formula by formula: the oracle for the kernels.

The oracle shares no code with the kernels. It also computes results where there is no C++ compiler.
Each norm here takes the arguments of the public function of the same name, without `dtype`, `out`,
`workspace` and `accumulate`, and does not check them. Arrays are NumPy arrays of float16, bfloat16
(`ml_dtypes`), float32 or float64, of any strides and any number of rows or samples. No input is
modified, and no result is a view of an input.

Everything is computed and returned in float64, with two exceptions. First, the new residual stream
``s = x + residual`` is rounded to `residual_dtype`, by default residual's dtype, and the norm reads
the rounded values; the sum is computed in float64 if x or the new stream is float64, else in
float32. Second, `round_before_weight` rounds the normalised rows to x's dtype.
`cunorm.reference.tolerance` has the largest errors of float32 kernels.
"""

from cunorm.reference.generic import normalize_backward, normalize_forward
from cunorm.reference.group_norm import (
    group_norm,
    group_norm_backward,
    group_norm_forward,
    instance_norm,
)
from cunorm.reference.jvp import group_norm_jvp, normalize_jvp
from cunorm.reference.named import (
    add_layer_norm,
    add_normalize,
    add_rms_norm,
    l2_norm,
    l2_norm_backward,
    l2_norm_forward,
    l2_norm_jvp,
    layer_norm,
    layer_norm_backward,
    layer_norm_forward,
    layer_norm_jvp,
    normalize,
    rms_norm,
    rms_norm_backward,
    rms_norm_forward,
    rms_norm_jvp,
)
from cunorm.reference.quantized import dequantize, quantize
from cunorm.reference.rows import round_to
from cunorm.reference.split import combine_moments, normalize_backward_sums, row_moments

__all__ = [
    "add_layer_norm",
    "add_normalize",
    "add_rms_norm",
    "combine_moments",
    "dequantize",
    "group_norm",
    "group_norm_backward",
    "group_norm_forward",
    "group_norm_jvp",
    "instance_norm",
    "l2_norm",
    "l2_norm_backward",
    "l2_norm_forward",
    "l2_norm_jvp",
    "layer_norm",
    "layer_norm_backward",
    "layer_norm_forward",
    "layer_norm_jvp",
    "normalize",
    "normalize_backward",
    "normalize_backward_sums",
    "normalize_forward",
    "normalize_jvp",
    "quantize",
    "rms_norm",
    "rms_norm_backward",
    "rms_norm_forward",
    "rms_norm_jvp",
    "round_to",
    "row_moments",
]
