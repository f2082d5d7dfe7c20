# SPDX-License-Identifier: MIT
"""Sums of a streamed row and of a large tile do not accumulate rounding errors."""

import numpy as np
import pytest

from tests.emulation.machine import gpu, machine, needs_softgpu
from tests.support.norm_checks import check_norm

pytestmark = needs_softgpu
WIDTH = 1 << 20  # more than a hundred chunks


@pytest.fixture
def device():
    with machine("async_copies", multiprocessors=1, capability=80):
        yield gpu()


@pytest.mark.parametrize("value", [1 / 3, 1.1])
def test_rounding_errors_of_equal_elements_do_not_add_up(device, value):
    x, dy = np.full((2, 1, WIDTH), [[[value]], [[1.3]]], np.float32)
    check_norm(device, x, dy, (None, None), eps=0.0)


def test_rounding_errors_of_equal_elements_of_groups_do_not_add_up(device):
    """Each thread adds up about a hundred positions of one channel."""
    x = np.random.default_rng(0).integers(0, 2, (1, 65025, 1)).astype(np.float32)
    dy, parameters = np.full_like(x, 0.1), np.full((2, 1), 1.99, np.float32)
    check_norm(device, x, dy, parameters, num_groups=1)
