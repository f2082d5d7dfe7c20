# SPDX-License-Identifier: MIT
"""Group norms of samples, and of lines, that lie further apart than 32 bits reach."""

import mmap
import sys

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

from cunorm import GroupNormForward, GroupNormGrads
from tests.memory.test_large import MAP_NORESERVE
from tests.support.group_norm_cases import check, run
from tests.support.operands import at, draw

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or sys.maxsize < 2**32, reason="needs Linux and 64-bit addresses"
)
FAR = 2**31 + 8  # elements
# Of ten channels: shape, channel_axis, the strides of a dense sample or line, the axis that is far.
VIEWS = {
    "samples": ((2, 7, 10), -1, (0, 10, 1), 0),
    "samples, channels first": ((2, 10, 7), 1, (0, 7, 1), 0),
    "positions": ((1, 2, 10), -1, (20, 0, 1), 1),
    "channels": ((1, 2, 7), 1, (14, 0, 1), 1),
}


@pytest.fixture
def far():
    """Give arrays along one of whose axes the next element is FAR after, or before, another.

    They lie side by side in one mapping of addresses, in which memory is only what is touched.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    size = 1 << 16  # bytes of an array, without the gap
    try:
        memory = mmap.mmap(-1, 4 * FAR + 16 * size, flags=flags)
    except (OSError, ValueError, OverflowError) as error:
        pytest.skip(f"no mapping of 8 GiB of addresses: {error}")
    base, taken = np.frombuffer(memory, np.uint8), 0

    def place(view, backwards, values=None):
        nonlocal taken
        shape, _, strides, axis = VIEWS[view]
        steps = [4 * (FAR if other == axis else step) for other, step in enumerate(strides)]
        array = as_strided(base[taken * size :][: 4 * FAR + size].view(np.float32), shape, steps)
        taken += 1
        array = np.flip(array, axis) if backwards else array
        if values is not None:
            array[...] = values
        return array

    return place


@pytest.mark.parametrize("backwards", [False, True], ids=["forwards", "backwards"])
@pytest.mark.parametrize("view", VIEWS)
def test_arrays_further_apart_than_32_bits_reach_are_right(far, view, backwards):
    shape, channel_axis, *_ = VIEWS[view]
    groups = shape[channel_axis] // 2
    near = [draw(name, shape, "float32") for name in ("x", "dy")]
    y, dx = (far(view, backwards) for _ in range(2))
    out = {
        "forward": {"out": GroupNormForward(y=y)},
        "backward": {"out": GroupNormGrads(dx=dx)},
    }
    given = [far(view, backwards, values) for values in near]
    results = run(*given, groups, channel_axis, **out)
    assert results.y is y
    assert results.dx is dx
    check(results, *near, groups, channel_axis)
    in_place = {"backward": {"out": GroupNormGrads(dx=given[1])}}
    with at("in place"):
        check(run(*given, groups, channel_axis, **in_place), *near, groups, channel_axis)
