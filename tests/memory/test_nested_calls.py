# SPDX-License-Identifier: MIT
"""Memory that is written to: a call within a call, statistics, and a parameter still to be read."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest

import cunorm
from cunorm import AddNorm, NormForward
from tests.support.calls import anew, nothing_known, planning_forbidden
from tests.support.internals import _scratch, numpy_view
from tests.support.operands import assert_same_bits, draw


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


@pytest.mark.parametrize(
    "place", [np.s_[::2], np.s_[::-1], np.s_[3::-1]], ids=["strided", "reversed", "reversed part"]
)
def test_statistics_are_only_written_to_contiguous_arrays(place):
    memory = np.full(8, 7, np.float32)
    there = memory[place]
    x = draw("x", (len(there), 8), "float32")
    with pytest.raises(ValueError, match=r"rms_norm_forward: out\.rstd has strides"):
        cunorm.rms_norm_forward(x, out=NormForward(rstd=there))
    assert (memory == 7).all()


def test_the_stream_may_not_be_written_over_a_parameter_that_is_still_to_be_read():
    x, residual, weight = (draw(name, 8, "float32") for name in ("x", "residual", "weight"))
    with pytest.raises(ValueError, match=r"add_rms_norm: out\.residual overlaps weight"):
        cunorm.add_rms_norm(x, residual, weight, out=AddNorm(residual=weight))
