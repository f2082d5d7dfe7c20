# SPDX-License-Identifier: MIT
"""The orders in which the emulator runs blocks, warps and lanes are what their names say."""

import numpy as np
import pytest

from .emulator import unavailable
from .probes import run_body

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable())

# The order in which blocks, warps and lanes run, as a count at the time each thread passes a place.
COUNT = "static int count = 0;"


def test_forward_and_reverse_order_are_opposites():
    body = "a.out[i] = count++;"
    forward = run_body(body, 3, 96, declarations=COUNT + "// forward")
    reverse = run_body(body, 3, 96, declarations=COUNT + "// reverse", order="reverse")
    np.testing.assert_array_equal(forward, np.arange(3 * 96))
    np.testing.assert_array_equal(reverse, forward[::-1])


def test_random_order_mixes_blocks_warps_and_lanes_anew_in_every_round():
    body = "for (int k = 0; k < a.n; ++k) { __syncwarp(); } a.out[i] = count++;"
    orders = [
        run_body(
            body, 16, 128, n=n, declarations=f"{COUNT} // {n} {seed}", order="random", seed=seed
        )
        for n, seed in [(0, 1), (0, 2), (1, 1)]
    ]
    for order in orders:
        np.testing.assert_array_equal(np.sort(order), np.arange(16 * 128))
        by_block = order.reshape(16, 4, 32)
        assert np.any(np.diff(by_block[:, 0, 0]) < 0), "blocks in order"
        assert np.any(np.diff(by_block[:, :, 0]) < 0), "warps in order"
        assert np.any(np.diff(by_block) < 0), "lanes in order"
        assert len({tuple(lanes.argsort()) for lanes in by_block.reshape(-1, 32)}) > 32
    assert not np.array_equal(orders[0], orders[1]), "the seed has no effect"
    assert not np.array_equal(orders[0], orders[2]), "the order is drawn once"


def test_random_order_lets_warps_overtake_each_other_between_barriers():
    body = "const int before = count++; __syncwarp(); a.out[i] = count++ - before;"
    alone = run_body(body, 1, 256, declarations=f"{COUNT} // forward")
    mixed = run_body(body, 1, 256, declarations=f"{COUNT} // random", order="random")
    assert alone.max() < 64
    assert mixed.max() >= 64


def test_the_same_seed_gives_the_same_order():
    body = "a.out[i] = count++;"
    first, second = (
        run_body(body, 5, 64, declarations=f"{COUNT} // {n}", order="random", seed=7).copy()
        for n in range(2)
    )
    np.testing.assert_array_equal(first, second)
