# SPDX-License-Identifier: MIT
"""Errors of `workspace_size` name the argument, the given and the expected value."""

from __future__ import annotations

import numpy as np

import cunorm
from tests.arguments.wrong_input import DIVISOR, DTYPES, NAMES, NO_ARRAY
from tests.support.operands import at
from tests.support.refused import Case, check_error

OPS = (
    "'normalize_backward', 'rms_norm_backward', 'layer_norm_backward', 'l2_norm_backward', "
    "'group_norm', 'instance_norm', 'group_norm_forward' or 'group_norm_backward'"
)
X, WEIGHT = np.ones((5, 8), np.float32), np.ones(8, np.float32)
RMS, L2, GROUP, INSTANCE = "rms_norm_backward", "l2_norm_backward", "group_norm", "instance_norm"
GRADIENTS = "group_norm_backward"
NONE, DEFAULT = (
    "is given, expected None: {0} has none",
    "is {1!r}, expected the default: {0} has none",
)
NOT_TAKEN = [
    (RMS, "bias", WEIGHT, NONE),
    (RMS, "num_groups", 2, NONE),
    (L2, "x_dtype", "float16", NONE),
    (L2, "needs", ("bias",), DEFAULT),
    (L2, "channel_axis", 1, DEFAULT),
    (INSTANCE, "num_groups", 8, NONE),
    (INSTANCE, "groups", 2, DEFAULT),
]
WRONG = [
    *((op, f"op is {op!r}, expected {OPS}", {}) for op in ("rms_norm", "", None, [RMS])),
    *((op, f"{k} {text.format(op, v)}", {k: v}) for op, k, v, text in NOT_TAKEN),
    (RMS, "groups is '2', expected an int", {"groups": "2"}),
    (RMS, f"groups is 3, expected {DIVISOR} width of a row", {"groups": 3}),
    (RMS, "groups is 2 and axis is 0, expected axis -1 with groups", {"groups": 2, "axis": 0}),
    (RMS, "axis is True, expected an int", {"axis": True}),
    (RMS, "weight has shape (5, 8), expected (8,) to match x.shape[-1]", {"weight": X}),
    (RMS, f"needs is ('y',), expected {NAMES}, 'gate'", {"needs": ("y",)}),
    (RMS, f"x_dtype is 'int8', expected {DTYPES}", {"x_dtype": "int8"}),
    (RMS, f"x is None, expected {NO_ARRAY}", {"x": None}),
    *((op, "num_groups is None, expected an int", {}) for op in (GROUP, GRADIENTS)),
    (
        GROUP,
        f"num_groups is 5, expected {DIVISOR} number of channels, x.shape[-1]",
        {"num_groups": 5},
    ),
    (GRADIENTS, f"needs is ('gate',), expected {NAMES}", {"num_groups": 2, "needs": ("gate",)}),
    (INSTANCE, "channel_axis is 2, expected -1 or 1", {"channel_axis": 2}),
    (
        INSTANCE,
        "weight has shape (5, 8), expected (8,), one for each channel, x.shape[-1]",
        {"weight": X},
    ),
]


def test_wrong_input_of_workspace_size_is_named():
    for op, text, change in WRONG:
        is_type = "an int" in text or "x_dtype is 'int8'" in text or "None, expected" in text
        error = TypeError if is_type or not isinstance(op, str) else ValueError
        with at(text):
            case = Case("workspace_size", error, text, change)
            check_error(
                case, lambda op=op, change=change: cunorm.workspace_size(op, **{"x": X} | change)
            )
