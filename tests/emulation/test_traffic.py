# SPDX-License-Identifier: MIT
"""The row norms move hardly more bytes than they must."""

from __future__ import annotations

import pytest

from .emulator import unavailable
from .traffic import CALLS, OPERANDS, WITH_CLUSTERS, calls, calls_in_clusters, traffic

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable())

# How many arrays of x's size a call must move: the design's table, in units of e * N.
ARRAYS = {
    "forward": 2,
    "forward + residual": 4,
    "forward + gate": 3,
    "forward + residual + gate": 5,
    "backward": 3,
    "backward + d_residual": 4,
    "backward + gate": 5,
    "backward + d_residual + gate": 6,
}


def test_the_limits_are_those_of_the_design():
    assert {name: len(set(operands)) for name, operands in OPERANDS.items()} == ARRAYS
    for name, operands in OPERANDS.items():
        for dtype in ("bfloat16", "float32"):
            assert CALLS[f"{name} {dtype}"] == dict.fromkeys(operands, dtype)


@pytest.mark.parametrize(("norm", "call", "width"), list(calls()))
def test_rows_are_moved_once(norm, call, width):
    moved = traffic(norm, call, width)
    assert 0.999 <= moved.rows / moved.rows_limit <= 1.02
    if width <= 4096:
        assert moved.family != "streamed"


IN_CI = {
    "forward + residual mixed",
    "forward + residual + gate bfloat16",
    "backward + d_residual mixed",
    "backward + d_residual + gate float32",
}
in_clusters = [
    pytest.param(*case, marks=() if case[1] in IN_CI else pytest.mark.exhaustive)
    for case in calls_in_clusters()
]


@pytest.mark.parametrize(("norm", "call", "width"), in_clusters)
def test_rows_that_clusters_share_are_moved_once(norm, call, width):
    moved = traffic(norm, call, width, WITH_CLUSTERS)
    assert moved.family == "cluster"
    assert 0.999 <= moved.rows / moved.rows_limit <= 1.02
