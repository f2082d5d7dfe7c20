# SPDX-License-Identifier: MIT
"""Row norms, which normalise each row of x; a row is all axes from `axis` to the last."""

from cunorm._row_norm.jvp import l2_norm_jvp, layer_norm_jvp, normalize_jvp, rms_norm_jvp
from cunorm._row_norm.l2_norm import l2_norm, l2_norm_backward, l2_norm_forward
from cunorm._row_norm.layer_norm import (
    add_layer_norm,
    layer_norm,
    layer_norm_backward,
    layer_norm_forward,
)
from cunorm._row_norm.normalize import (
    add_normalize,
    normalize,
    normalize_backward,
    normalize_forward,
)
from cunorm._row_norm.quantized import (
    layer_norm_quantized,
    normalize_quantized,
    rms_norm_quantized,
)
from cunorm._row_norm.rms_norm import add_rms_norm, rms_norm, rms_norm_backward, rms_norm_forward
from cunorm._row_norm.split import combine_moments, normalize_backward_sums, row_moments

__all__ = [
    "add_layer_norm",
    "add_normalize",
    "add_rms_norm",
    "combine_moments",
    "l2_norm",
    "l2_norm_backward",
    "l2_norm_forward",
    "l2_norm_jvp",
    "layer_norm",
    "layer_norm_backward",
    "layer_norm_forward",
    "layer_norm_jvp",
    "layer_norm_quantized",
    "normalize",
    "normalize_backward",
    "normalize_backward_sums",
    "normalize_forward",
    "normalize_jvp",
    "normalize_quantized",
    "rms_norm",
    "rms_norm_backward",
    "rms_norm_forward",
    "rms_norm_jvp",
    "rms_norm_quantized",
    "row_moments",
]
