# SPDX-License-Identifier: MIT
"""The row norms move hardly more bytes than they must."""

from __future__ import annotations

import pytest

from .emulator import unavailable
from .traffic import CALLS, NORMS, WIDTHS, traffic

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable())

# How many arrays of x's size a call must move: the design's table, in units of e * N.
ARRAYS = {
    "forward": 2,
    "forward + residual": 4,
    "backward": 3,
    "backward + d_residual": 4,
}


@pytest.mark.parametrize("operands", ARRAYS)
def test_the_limits_are_those_of_the_design(operands):
    for dtype in ("bfloat16", "float32"):
        dtypes = CALLS[f"{operands} {dtype}"]
        assert len(dtypes) == ARRAYS[operands]
        assert set(dtypes.values()) == {dtype}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("call", CALLS)
def test_rows_are_moved_once(call, norm, width):
    moved = traffic(norm, call, width)
    assert 0.999 <= moved.rows / moved.rows_limit <= 1.02
    if width <= 4096:
        assert moved.family != "streamed"
