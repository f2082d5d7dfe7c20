# SPDX-License-Identifier: MIT
"""Sums of a streamed row and of a large tile do not accumulate rounding errors."""

import numpy as np
import pytest

import cunorm
from tests.emulation.machine import gpu, machine, needs_softgpu
from tests.support.bounds import check_backward, check_forward
from tests.support.gpu_arrays import get_all
from tests.support.group_bounds import check_group_backward, check_group_forward

pytestmark = needs_softgpu
WIDTH = 1 << 20  # more than a hundred chunks


@pytest.fixture
def device():
    with machine("async_copies", multiprocessors=1, capability=80):
        yield gpu()


@pytest.mark.parametrize("value", [1 / 3, 1.1])
def test_rounding_errors_of_equal_elements_do_not_add_up(device, value):
    x, dy = np.full((2, 1, WIDTH), [[[value]], [[1.3]]], np.float32)
    f = get_all(device, cunorm.rms_norm_forward(device.put(x), eps=0))
    check_forward(f, x, None, None, eps=0)
    arrays = {"dy": device.put(dy), "x": device.put(x), "rstd": device.put(f.rstd)}
    check_backward(get_all(device, cunorm.rms_norm_backward(**arrays)), dy, x, None, None, eps=0)


def test_rounding_errors_of_equal_elements_of_groups_do_not_add_up(device):
    """Each thread adds up about a hundred positions of one channel."""
    x = np.random.default_rng(0).integers(0, 2, (1, 65025, 1)).astype(np.float32)
    dy, weight, bias = np.full_like(x, 0.1), *np.full((2, 1), 1.99, np.float32)
    given = [1, device.put(weight), device.put(bias)]
    f = get_all(device, cunorm.group_norm_forward(device.put(x), *given))
    check_group_forward(f, x, 1, weight, bias, eps=1e-5)
    statistics = {"mean": device.put(f.mean), "rstd": device.put(f.rstd)}
    grads = cunorm.group_norm_backward(device.put(dy), device.put(x), *given, **statistics)
    check_group_backward(get_all(device, grads), dy, x, 1, weight, bias, eps=1e-5)
