# SPDX-License-Identifier: MIT
"""Calls on a GPU that are made again: to the bit what one that is planned gives."""

from __future__ import annotations

from functools import partial

import pytest

import cunorm
from cunorm import NormForward, NormGrads
from tests.support.calls import anew, nothing_known, planning_forbidden
from tests.support.gpu_arrays import OnCupy, OnTorch, get_all, put_all
from tests.support.operands import assert_same_bits, draw

pytestmark = pytest.mark.gpu

SHAPE = (512, 4096)


@pytest.fixture(params=[OnCupy, OnTorch], ids=["cupy", "torch"])
def gpu(request, monkeypatch):
    gpu = request.param()
    cunorm.rms_norm(gpu.put(draw("x", (1, 8), "float32")))  # a type that was met
    nothing_known(monkeypatch)
    return gpu


def drawn(gpu, what):
    given = {name: draw(f"{what} {name}", SHAPE, "bfloat16") for name in ("x", "dy")}
    return put_all(gpu, given | {"weight": draw(f"{what} weight", SHAPE[1:], "float32")})


def both(on, out=None, grads=None):
    """Make a forward, and its backward."""
    forward = cunorm.rms_norm_forward(on["x"], on["weight"], out=out)
    told = {"rstd": forward.rstd, "out": grads}
    return forward, cunorm.rms_norm_backward(on["dy"], on["x"], on["weight"], **told)


def assert_same(gpu, results, expected):
    for one, other in zip(results, expected, strict=True):
        found, right = get_all(gpu, one)._asdict(), get_all(gpu, other)._asdict()
        for name, array in right.items():
            if array is not None:
                assert_same_bits(found[name], array, name)


def test_other_numbers_in_other_arrays_give_what_a_planned_call_does(gpu):
    kept = [both(drawn(gpu, "first"))]
    for turn in range(3):
        on = drawn(gpu, f"turn {turn}")
        expected = anew(partial(both, on))
        with planning_forbidden():
            kept.append(both(on))
        assert_same(gpu, kept[-1], expected)


def test_results_in_given_memory_are_written_again(gpu):
    on = drawn(gpu, "first")
    forward, grads = both(on)
    out = NormForward(y=forward.y, rstd=forward.rstd)
    given = NormGrads(dx=grads.dx, dweight=grads.dweight)
    both(on, out, given)
    expected = anew(partial(both, drawn(gpu, "other")))
    for name, array in drawn(gpu, "other").items():
        on[name][...] = array
    with planning_forbidden():
        results = both(on, out, given)
    assert results[0].y is out.y
    assert results[1].dx is given.dx
    assert_same(gpu, results, expected)
