# SPDX-License-Identifier: MIT
"""A strategy for one wrong argument of a valid call."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

_LIKE_X = ("x", "dy", "residual", "gate", "d_residual")
_NUMBERS = ("eps", "c", "weight_offset")
_NAMES = ("gate_activation", "gate_position", "activation")
_INTS = ("axis", "groups", "num_groups", "channel_axis")
_FLAGS = ("center", "round_before_weight", "accumulate")
_DTYPES = ("int32", "uint8", "bool", "complex64", ml_dtypes.float8_e4m3fn)
_NO_ARRAYS = ([1.0], 2.0, "x", b"x", object())


@st.composite
def wrong_arguments(draw: Any, arguments: dict[str, Any]) -> tuple[str, Any]:
    """Draw the name of an argument of a call, and a value that it cannot have."""
    arrays = [name for name, value in arguments.items() if isinstance(value, np.ndarray)]
    names = [*arrays, *arguments.keys() & {*_NUMBERS, *_NAMES, *_INTS, *_FLAGS, "needs"}]
    name = draw(st.sampled_from(sorted(names)))
    if name in arrays:
        return name, draw(_no_operands(name, arguments[name]))
    if name in _NUMBERS:
        return name, draw(st.sampled_from(["1", np.nan, np.inf, 1j, True, [1.0]]))
    if name in _NAMES:
        return name, draw(st.sampled_from(["", "Silu", "silu ", 1, b"silu", ("silu",), True]))
    if name in _INTS:
        return name, draw(st.sampled_from([7919, -7919, 0.0, "1", None, True, (1,)]))
    if name in _FLAGS:
        return name, draw(st.sampled_from([None, 2, "yes", [], np.True_]))
    return name, draw(st.sampled_from([("y",), "x", None, 1, ("x", "dx"), ([],)]))


def _no_operands(name: str, array: Any) -> st.SearchStrategy[Any]:
    if name == "workspace":
        return st.sampled_from([*_NO_ARRAYS, array[::2], _read_only(array)])
    shapes = [(*array.shape, 2), (2, *array.shape, 3)]
    if array.size > 1 and name != "x":
        shapes += [array.shape[:-1], (*array.shape[:-1], array.shape[-1] + 1)]
    wrong = [np.zeros(array.shape, dtype) for dtype in _DTYPES]
    others = [np.broadcast_to(array.dtype.type(1), shape) for shape in shapes]
    if name == "x":  # x may have any shape: the error would name another array
        others = []
    return st.sampled_from([*_NO_ARRAYS, *wrong, *others, np.ma.masked_array(array)])


def _read_only(array: Any) -> Any:
    view = array.view()
    view.flags.writeable = False
    return view
