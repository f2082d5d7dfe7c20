# SPDX-License-Identifier: MIT
"""Group norms, run as on a GPU, of data that normal draws are not like."""

from __future__ import annotations

import numpy as np
import pytest
from group_bounds import check_group_backward, check_group_forward

from .emulator import unavailable
from .group_kernels import emulate_group_backward, emulate_group_forward

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable())

EPS = 1e-5


@pytest.mark.parametrize("channel_axis", [-1, 1])
@pytest.mark.parametrize("channels", [2, 3, 8, 32])
def test_sums_of_equal_terms_are_within_the_bounds(channels, channel_axis):
    """As the gradient of a sum has: every rounding of such a sum has the same sign."""
    shape = (1, 2048, channels) if channel_axis == -1 else (1, channels, 2048)
    signs = np.random.default_rng(0).choice([-1.0, 1.0], shape)
    x, dy = (signs * 1.1).astype(np.float32), np.full(shape, 1.1, np.float32)
    weight = np.ones(channels, np.float32)
    told = {"channel_axis": channel_axis}
    f = emulate_group_forward(x, channels, weight, weight, eps=EPS, **told).result
    check_group_forward(f, x, channels, weight, weight, eps=EPS, **told)
    statistics = {"mean": f.mean, "rstd": f.rstd}
    given = (dy, x, channels, weight, weight)
    grads = emulate_group_backward(*given, **statistics, **told).result
    check_group_backward(grads, *given, eps=EPS, **told)
