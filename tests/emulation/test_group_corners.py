# SPDX-License-Identifier: MIT
"""Group norms, run as on a GPU, of data that normal draws are not like."""

from __future__ import annotations

import pytest

from tests.support.group_bounds import check_group_backward, check_group_forward
from tests.support.group_norm_cases import equal_terms

from .emulator import unavailable
from .group_kernels import emulate_group_backward, emulate_group_forward

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable())

EPS = 1e-5


@pytest.mark.parametrize("channel_axis", [-1, 1])
@pytest.mark.parametrize("channels", [2, 3, 8, 32])
def test_sums_of_equal_terms_are_within_the_bounds(channels, channel_axis):
    """As the gradient of a sum has."""
    x, dy, weight = equal_terms(2048, channels, channel_axis)
    told = {"channel_axis": channel_axis}
    f = emulate_group_forward(x, channels, weight, weight, eps=EPS, **told).result
    check_group_forward(f, x, channels, weight, weight, eps=EPS, **told)
    statistics = {"mean": f.mean, "rstd": f.rstd}
    given = (dy, x, channels, weight, weight)
    grads = emulate_group_backward(*given, **statistics, **told).result
    check_group_backward(grads, *given, eps=EPS, **told)
