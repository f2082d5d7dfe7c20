# SPDX-License-Identifier: MIT
"""The group norms move hardly more bytes of large arrays than they must."""

from __future__ import annotations

import pytest

from .emulator import unavailable
from .group_traffic import PASSES, SHAPES, Call, calls, traffic

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable())

# How many arrays of x's size a call moves by one launch and by three: the design's table, in units
# of e * N.
ARRAYS = {("forward", 1): 2, ("backward", 1): 3, ("forward", 3): 3, ("backward", 3): 5}


def test_the_limits_are_those_of_the_design():
    for (direction, launches), arrays in ARRAYS.items():
        shape = SHAPES[0] if launches == 3 else SHAPES[3]
        of_one = shape[1] * shape[0][0] * shape[0][1] * 2
        found = traffic(Call(direction, "bfloat16", True, *shape))
        assert (found.launches, found.table) == (launches, arrays * of_one)
    assert {name: len(arrays) for name, arrays in PASSES.items()} == {"forward": 2, "backward": 3}


@pytest.mark.parametrize("call", list(calls()), ids=lambda call: "-".join(map(str, call)))
def test_large_arrays_are_moved_once_or_read_twice(call):
    moved = traffic(call)
    assert 0.999 <= moved.large / moved.table <= 1.02
    expected = {(8, 8): 1, (64, 64): 3, (97, 31): 3}
    assert moved.launches == expected.get(call.spatial, moved.launches)
