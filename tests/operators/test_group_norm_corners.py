# SPDX-License-Identifier: MIT
"""Group norms of data that normal draws are not like, and slices of one channel or position."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest

import cunorm
from cunorm import _scratch
from cunorm._arrays import numpy_view
from tests.support.calls import anew, nothing_known, planning_forbidden
from tests.support.group_bounds import check_group_backward, check_group_forward
from tests.support.group_norm_cases import copies, equal_terms
from tests.support.operands import assert_same_bits, draw

EPS = 1e-5


@pytest.mark.parametrize("channels", [2, 3, 8, 32])
@pytest.mark.parametrize("channel_axis", [-1, 1])
def test_sums_of_equal_terms_are_within_the_bounds(channels, channel_axis):
    """As the gradient of a sum has."""
    x, dy, weight = equal_terms(4096, channels, channel_axis)
    told = {"channel_axis": channel_axis}
    f = cunorm.group_norm_forward(x, channels, weight, weight, **told)
    check_group_forward(f, x, channels, weight, weight, eps=EPS, **told)
    statistics = {"mean": f.mean, "rstd": f.rstd}
    grads = cunorm.group_norm_backward(dy, x, channels, weight, weight, **statistics, **told)
    check_group_backward(grads, dy, x, channels, weight, weight, eps=EPS, **told)


@pytest.mark.parametrize("positions", [63, 64, 65])
def test_an_infinite_weight_poisons_no_sum_beyond_the_sample(positions):
    """What lies outside a pack is 0, and 0 times infinity would be NaN in the sums."""
    x, dy = (draw(name, (1, 4, positions), "float32") for name in ("x", "dy"))
    weight, bias = np.float32([np.inf, 1, 1, 1]), np.ones(4, np.float32)
    told = {"channel_axis": 1, "activation": "silu"}
    f = cunorm.group_norm_forward(x, 4, weight, bias, **told)
    given = (dy, x, 4, weight, bias)
    grads = cunorm.group_norm_backward(*given, mean=f.mean, rstd=f.rstd, **told)
    exact = cunorm.reference.group_norm_backward(*given, mean=f.mean, rstd=f.rstd, **told)
    np.testing.assert_array_equal(np.isnan(grads.dbias), np.isnan(exact.dbias))
    np.testing.assert_array_equal(np.isnan(grads.dweight), np.isnan(exact.dweight))


@pytest.mark.parametrize("side", [12, 24, 48])
@pytest.mark.parametrize("is_known", [False, True], ids=["planned", "again"])
def test_a_call_within_a_call_does_not_touch_its_memory(monkeypatch, is_known, side):
    """A signal's handler may call while a call of its own thread has lent memory."""
    nothing_known(monkeypatch)
    x, other = draw("x", (1, 24, 24, 64), "float32"), draw("dy", (1, side, 24, 64), "float32")
    expected, of_other = (anew(cunorm.group_norm, array, 4) for array in (x, other))
    call, lend, handled = partial(anew, cunorm.group_norm), _scratch.lend, []
    if is_known:
        call = cunorm.group_norm
        call(x, 4)
        call(other, 4)

    def with_a_signal(size):
        memory = lend(size)
        if not handled:
            handled.append(True)
            numpy_view(memory)[...] = 7
            assert_same_bits(call(other, 4), of_other)
            assert (numpy_view(memory) == 7).all()
        return memory

    monkeypatch.setattr(_scratch, "lend", with_a_signal)
    with planning_forbidden() if is_known else nullcontext():
        assert_same_bits(call(x, 4), expected)
    assert handled


def test_small_samples_hand_on_little():
    x = np.empty((1_000_000, 4), np.float32)
    assert cunorm.workspace_size("group_norm_forward", x, num_groups=2) < x.nbytes


# --- one channel, one position, a crop ------------------------------------------------------------

ALONE = {
    "one channel": (1, -1, lambda a: a[..., :1]),
    "one position": (2, 1, lambda a: a[:, :, :1, :1]),
    "two axes": (2, -1, lambda a: a[:, :, 0, 0]),
}


@pytest.mark.parametrize("view", ALONE)
def test_a_slice_of_one_channel_or_position_is_read_and_written_in_place(view, monkeypatch):
    num_groups, channel_axis, of = ALONE[view]
    x, copied = of(draw("x", (2, 4, 6, 5), "float32")), copies(monkeypatch)
    expected = cunorm.reference.group_norm(x, num_groups, channel_axis=channel_axis)
    assert cunorm.group_norm(x, num_groups, channel_axis=channel_axis, out=x) is x
    np.testing.assert_allclose(x, expected, rtol=0, atol=1e-5)
    assert not copied


def test_the_crop_of_a_channels_last_tensor_stays_channels_last():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    crop = torch.ones(2, 10, 6, 8).to(memory_format=torch.channels_last)[:, :, :, 1:7]
    y = cunorm.group_norm(crop, 5, channel_axis=1)
    assert y.stride() == torch.relu(crop).stride()
