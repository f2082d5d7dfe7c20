# SPDX-License-Identifier: MIT
"""What a GPU rounds, and how often: its kernels have a square root and sums of their own."""

from __future__ import annotations

import pytest

import cunorm
from tests.support.gpu_arrays import OnCupy, get_all
from tests.support.group_bounds import check_group_backward, check_group_forward
from tests.support.group_norm_cases import equal_terms
from tests.support.scales import (
    check_backward_rounds_what_the_forward_rounded,
    check_scales_are_rounded_once,
    check_scales_beyond_float32,
)

pytestmark = pytest.mark.gpu


def on_gpu(function):
    """Return a function of NumPy arrays that runs this one on a GPU."""

    def run(*arrays, **told):
        gpu = OnCupy()
        told = {n: gpu.put(v) if hasattr(v, "dtype") else v for n, v in told.items()}
        return get_all(gpu, function(*map(gpu.put, arrays), **told))

    return run


def forward(x, c):
    return on_gpu(cunorm.normalize_forward)(x, c=c, eps=0.0)


def test_rstd_and_what_multiplies_a_row_are_rounded_once():
    check_scales_are_rounded_once(forward, rows=300)


def test_a_length_beyond_float32_is_infinite_or_zero():
    check_scales_beyond_float32(forward)


def test_the_backward_rounds_before_weight_what_the_forward_rounded():
    norm = (on_gpu(cunorm.normalize_forward), on_gpu(cunorm.normalize_backward))
    check_backward_rounds_what_the_forward_rounded(*norm, rows=300)


@pytest.mark.parametrize("channel_axis", [-1, 1])
def test_sums_of_equal_terms_of_groups_are_within_the_bounds(channel_axis):
    told = {"num_groups": 8, "channel_axis": channel_axis}
    x, dy, weight = equal_terms(2048, 8, channel_axis)
    given = {"x": x, "weight": weight, "bias": weight}
    f = on_gpu(cunorm.group_norm_forward)(**given, **told)
    check_group_forward(f, **given, **told, eps=1e-5)
    given["dy"] = dy
    grads = on_gpu(cunorm.group_norm_backward)(**given, mean=f.mean, rstd=f.rstd, **told)
    check_group_backward(grads, **given, **told, eps=1e-5)
