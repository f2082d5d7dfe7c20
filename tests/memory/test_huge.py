# SPDX-License-Identifier: MIT
"""Calls with more than 2**31 elements, and very long rows and large groups."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import cunorm
from tests.support.cases import call_of
from tests.support.gpu_arrays import OnNumpy
from tests.support.operands import assert_same_bits, draw
from tests.support.placed import Samples


def free_memory():
    """Return the bytes of available memory on Linux, 0 elsewhere."""
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    except OSError:
        return 0
    return int(lines["MemAvailable"].split()[0]) << 10


pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.compiled("O3"),
    pytest.mark.xdist_group("huge"),  # one at a time, with --dist=loadgroup
    pytest.mark.skipif(free_memory() < 12 << 30, reason="needs 12 GiB of free memory"),
]
TIMES, BLOCK = 2049, (1024, 1024)  # more than 2**31 elements in TIMES blocks


def many(array):
    """Repeat a block without copying it."""
    return np.broadcast_to(array, (TIMES, *array.shape))


def assert_each_is(block, array):
    assert array.size > 2**31
    for one in array:
        assert_same_bits(one, block)


OF_GROUPS = {"num_groups": 32, "activation": "silu"}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("rms_norm", {}),
        ("layer_norm", {}),
        ("group_norm", OF_GROUPS),
        ("group_norm", OF_GROUPS | {"channel_axis": 1}),
    ],
)
def test_more_than_2_to_the_31_elements_give_the_results_of_a_block(name, options):
    x, dy = (draw(key, BLOCK, "bfloat16") for key in ("x", "dy"))
    forward, backward = (getattr(cunorm, f"{name}_{way}") for way in ("forward", "backward"))
    f = forward(x[None], **options)
    assert_each_is(f.y[0], forward(many(x), **options).y)
    saved = {key: array for key in ("rstd", "mean") if (array := getattr(f, key)) is not None}
    options = options | {"needs": ("x",)}
    dx = backward(dy[None], x[None], **saved, **options).dx
    saved = {key: np.repeat(array, TIMES, axis=0) for key, array in saved.items()}
    assert_each_is(dx[0], backward(many(dy), many(x), **saved, **options).dx)


def test_a_sample_of_more_than_2_to_the_31_elements_matches_its_lines():
    """All positions are equal, so that a group's statistics are those of one position."""
    line, weight = draw("line", 1024, "bfloat16"), draw("weight", 1024, "float32")
    x = np.broadcast_to(line, (1, TIMES * 1024, 1024))
    f = cunorm.group_norm_forward(x, 32, weight)
    expected = cunorm.reference.group_norm(line[None, None].astype(np.float64), 32, weight)
    np.testing.assert_allclose(f.y[0, 0].astype(np.float64), expected[0, 0], rtol=2**-8, atol=1e-5)
    for lines in f.y.reshape(TIMES, 1024, 1024):
        assert_same_bits(lines, np.broadcast_to(f.y[0, 0], lines.shape))


@pytest.mark.parametrize("way", ["forward", "backward"])
@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("far", [False, True])
def test_rows_of_2_to_the_24_elements_are_within_their_bounds(way, center, far):
    case = {"shape": (1, 1, 2, 2**24), "center": center, "far": far}
    call_of(f"row_norm_{way}", case, OnNumpy()).check()


@pytest.mark.parametrize("way", ["forward", "backward"])
@pytest.mark.parametrize("is_last", [True, False], ids=["channels last", "channels first"])
def test_groups_of_2_to_the_24_elements_are_within_their_bounds(way, is_last):
    samples = Samples(1, (2**11, 2**10), 16, 2, is_last)
    call_of(f"group_norm_{way}", {"samples": samples}, OnNumpy()).check()
