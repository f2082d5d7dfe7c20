# SPDX-License-Identifier: MIT
"""A wrong argument in an otherwise valid call raises an error that names it; nothing is written."""

from __future__ import annotations

import re
import warnings

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from tests.fuzz.drawn import KERNELS, builds_of, cases
from tests.fuzz.test_examples import common
from tests.support.cases import call_of
from tests.support.guarded import OnGuarded

# Values that the arguments cannot have.
NUMBERS, NAMES = (
    ["1", np.nan, np.inf, 1j, True, [1.0]],
    ["", "Silu", "silu ", 1, b"silu", ("silu",), True],
)
INTS, FLAGS = [7919, -7919, 0.0, "1", None, True, (1,)], [None, 2, "yes", [], np.True_]
WRONG = {
    **dict.fromkeys(("eps", "c", "weight_offset"), NUMBERS),
    **dict.fromkeys(("gate_activation", "gate_position", "activation"), NAMES),
    **dict.fromkeys(("axis", "groups", "num_groups", "channel_axis"), INTS),
    **dict.fromkeys(("center", "round_before_weight", "accumulate"), FLAGS),
    "needs": [("y",), "x", None, 1, ("x", "dx"), ([],)],
}
PARAMETERS = ("weight", "bias", "gate")
DTYPES = ("int32", "uint8", "bool", "complex64", ml_dtypes.float8_e4m3fn)
NO_ARRAYS = [[1.0], 2.0, "x", b"x", object()]


def wrong_arrays(name, array):
    """Return what cannot be given for an array."""
    if name == "workspace":
        read_only = array.view()
        read_only.flags.writeable = False
        return [*NO_ARRAYS, array[::2], read_only]
    wrong = [*NO_ARRAYS, *(np.zeros(array.shape, dtype) for dtype in DTYPES)]
    if name != "x":  # x may have any shape: the error would name another array
        odd = 7919  # no axis of x has this size: parameters may have axes of x's sizes before a row
        shapes = [(*array.shape, odd), (odd, *array.shape, 3)]
        if array.size > 1:
            shapes += [(*array.shape[:-1], array.shape[-1] + odd)]
        if array.size > 1 and name not in PARAMETERS:
            shapes += [array.shape[:-1]]
        wrong += [np.broadcast_to(array.dtype.type(1), shape) for shape in shapes]
    return [*wrong, np.ma.masked_array(array)]


@pytest.mark.parametrize(
    ("number", "examples"), [(0, 50), pytest.param(1, 5000, marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_wrong_argument_is_named_and_nothing_is_written(kernel, number, examples):
    drawn = cases(kernel, builds_of(kernel, 0)).filter(lambda case: case.get("kind") != "torch")

    @seed(number)
    @settings(common, max_examples=examples)
    @given(st.data(), drawn)
    def check_examples(data, case):
        call = call_of(kernel, case | {"kind": "numpy"}, OnGuarded())
        arguments = call.arguments()
        arrays = {name for name, value in arguments.items() if isinstance(value, np.ndarray)}
        name = data.draw(st.sampled_from(sorted(arrays | (arguments.keys() & WRONG))))
        values = wrong_arrays(name, arguments[name]) if name in arrays else WRONG[name]
        wrong = {name: data.draw(st.sampled_from(values))}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            with pytest.raises((TypeError, ValueError), match=rf"^\w+: {re.escape(name)}\b"):
                call.function(**(arguments | wrong))
        call.check_memory()

    check_examples()
