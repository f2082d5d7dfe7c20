# SPDX-License-Identifier: MIT
"""Norms that are group norms: instance norm, and layer norms of groups and of all axes."""

import pytest

import cunorm
from cunorm import NormForward
from tests.support.bounds import check_forward
from tests.support.group_norm_cases import EPS, laid_out, strides
from tests.support.operands import assert_same_bits, draw, optional


@pytest.mark.parametrize("memory", ["last", "first"])
@pytest.mark.parametrize("channel_axis", [-1, 1])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_instance_norm_is_the_group_norm_of_a_channel_a_group(memory, channel_axis, dtype):
    x = laid_out(draw("x", (3, 10, 7, 5, 10), "float32"), channel_axis, memory)
    weight, bias = (optional(name, 10, "float32") for name in ("weight", "bias"))
    told = {"activation": "silu", "channel_axis": channel_axis, "dtype": dtype, "eps": 0.1}
    y = cunorm.instance_norm(x, weight, bias, **told)
    expected = cunorm.group_norm(x, 10, weight, bias, **told)
    assert_same_bits(y, expected)
    assert strides(y) == strides(expected) == strides(x)


@pytest.mark.parametrize("groups", [2, 5])
def test_without_positions_it_is_a_layer_norm_of_groups(groups):
    x = draw("x", (33, 40), "float32")
    weight, bias = (optional(name, 40, "float32") for name in ("weight", "bias"))
    f = cunorm.group_norm_forward(x, groups, weight, bias)
    told = {"center": True, "eps": EPS, "groups": groups}
    check_forward(NormForward(f.y, mean=f.mean, rstd=f.rstd), x, weight, bias, **told)


@pytest.mark.parametrize("channel_axis", [-1, 1])
def test_of_one_group_it_is_a_layer_norm_of_all_axes_but_the_first(channel_axis):
    x = draw("x", (5, 10, 6, 10), "float32", mean=100.0)
    f = cunorm.group_norm_forward(x, 1, channel_axis=channel_axis)
    rows = NormForward(f.y.reshape(5, -1), mean=f.mean[:, 0], rstd=f.rstd[:, 0])
    check_forward(rows, x.reshape(5, -1), None, None, center=True, eps=EPS)
