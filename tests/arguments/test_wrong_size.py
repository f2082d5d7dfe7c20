# SPDX-License-Identifier: MIT
"""What `workspace_size` is not the size of: its errors are those of the function, in its name."""

from __future__ import annotations

import numpy as np

import cunorm
from tests.arguments.wrong_input import DTYPES, NAMES, NO_ARRAY, NO_INTS
from tests.support.operands import at
from tests.support.refused import Case, check_error

OPS = (
    "'normalize_backward', 'rms_norm_backward', 'layer_norm_backward', 'l2_norm_backward', "
    "'group_norm', 'instance_norm', 'group_norm_forward' or 'group_norm_backward'"
)
X, WEIGHT = np.ones((5, 8), np.float32), np.ones(8, np.float32)
RMS, L2, GROUP, INSTANCE = "rms_norm_backward", "l2_norm_backward", "group_norm", "instance_norm"
NONE, DEFAULT = "is given, expected None: {} has none", "expected the default: {} has none"
NOT_TAKEN = [
    *((RMS, {name: given}, NONE) for name, given in (("bias", WEIGHT), ("num_groups", 2))),
    *((L2, {name: given}, NONE) for name, given in (("bias", WEIGHT), ("weight", WEIGHT))),
    (L2, {"x_dtype": "float16"}, NONE),
    (L2, {"needs": ("bias",)}, f"is ('bias',), {DEFAULT}"),
    (L2, {"channel_axis": 1}, f"is 1, {DEFAULT}"),
    (INSTANCE, {"num_groups": 8}, NONE),
    (INSTANCE, {"x_dtype": "float16"}, NONE),
    (INSTANCE, {"axis": 0}, f"is 0, {DEFAULT}"),
    (INSTANCE, {"groups": 2}, f"is 2, {DEFAULT}"),
    (INSTANCE, {"needs": ("x",)}, f"is ('x',), {DEFAULT}"),
]
TYPE, VALUE = TypeError, ValueError
WRONG = [
    *((op, VALUE, f"op is {op!r}, expected {OPS}", {}) for op in ("rms_norm", "backward", "")),
    *((op, TYPE, f"op is {op!r}, expected {OPS}", {}) for op in (None, cunorm.rms_norm, [RMS])),
    *(
        (op, VALUE, f"{name} {text.format(op)}", told)
        for op, told, text in NOT_TAKEN
        for name in told
    ),
    *((RMS, TYPE, f"groups is {given!r}, expected an int", {"groups": given}) for given in NO_INTS),
    (RMS, VALUE, "groups is 3, expected a divisor of 8, the width of a row", {"groups": 3}),
    (
        RMS,
        VALUE,
        "groups is 2 and axis is 0, expected axis -1 with groups",
        {"groups": 2, "axis": 0},
    ),
    (RMS, TYPE, "axis is True, expected an int", {"axis": True}),
    (
        RMS,
        VALUE,
        "weight has shape (9,), expected (8,) to match x.shape[-1]",
        {"weight": np.ones(9, np.float32)},
    ),
    (RMS, VALUE, f"needs is ('y',), expected {NAMES}, 'gate'", {"needs": ("y",)}),
    (RMS, TYPE, f"x_dtype is 'int8', expected {DTYPES}", {"x_dtype": "int8"}),
    (RMS, TYPE, f"x is None, expected {NO_ARRAY}", {"x": None}),
    (GROUP, TYPE, "num_groups is None, expected an int", {}),
    (GROUP, TYPE, "num_groups is 2.0, expected an int", {"num_groups": 2.0}),
    (
        GROUP,
        VALUE,
        "num_groups is 5, expected a divisor of 8, the number of channels",
        {"num_groups": 5},
    ),
    ("group_norm_backward", TYPE, "num_groups is None, expected an int", {}),
    (
        "group_norm_backward",
        VALUE,
        f"needs is ('gate',), expected {NAMES}",
        {"num_groups": 2, "needs": ("gate",)},
    ),
    (INSTANCE, VALUE, "channel_axis is 2, expected -1 or 1", {"channel_axis": 2}),
    (INSTANCE, TYPE, "channel_axis is 'C', expected an int", {"channel_axis": "C"}),
    (
        INSTANCE,
        VALUE,
        "weight has shape (3,), expected (8,), one for each channel",
        {"weight": np.ones(3, np.float32)},
    ),
]


def test_what_has_no_workspace_size_is_named():
    for op, error, text, told in WRONG:
        case = Case("workspace_size", error, text, told)
        with at(case):
            check_error(case, lambda op=op, told=told: cunorm.workspace_size(op, **{"x": X} | told))
