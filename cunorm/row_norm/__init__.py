# SPDX-License-Identifier: MIT
"""Row norms: each row of x, all its axes from `axis` to the last, is scaled by one statistic."""

from cunorm.row_norm._add import add_layer_norm, add_normalize, add_rms_norm
from cunorm.row_norm._apply import l2_norm, layer_norm, normalize, rms_norm
from cunorm.row_norm._training_backward import (
    l2_norm_backward,
    layer_norm_backward,
    normalize_backward,
    rms_norm_backward,
)
from cunorm.row_norm._training_forward import (
    l2_norm_forward,
    layer_norm_forward,
    normalize_forward,
    rms_norm_forward,
)

__all__ = [
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
    "rms_norm",
    "rms_norm_backward",
    "rms_norm_forward",
]
