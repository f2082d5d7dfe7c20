# SPDX-License-Identifier: MIT
"""Offsets past 2**31 elements: rows far apart, and more elements in all than 32 bits count."""

import mmap
import sys

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import cunorm
from cunorm import AddNorm, NormForward, NormGrads
from tests.support.bounds import assert_within, check_backward, check_forward, param_grad_bound
from tests.support.operands import draw

WIDTH = 1003
MAP_NORESERVE = 0x4000  # Linux's; the mmap module has the name since Python 3.11
pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or sys.maxsize < 2**32, reason="needs Linux and 64-bit addresses"
)


@pytest.fixture
def far():
    """Give arrays whose second row is 2**31 + 8 elements after, or before, the first.

    They lie side by side in one mapping of addresses, in which memory is only what is touched.
    """
    step = 2**31 + 8
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    try:
        memory = mmap.mmap(-1, 8 * (step + 16 * WIDTH), flags=flags)
    except (OSError, ValueError, OverflowError) as error:
        pytest.skip(f"no mapping of 16 GiB of addresses: {error}")
    base, taken = np.frombuffer(memory, np.uint8), 0

    def rows(dtype, values=None, *, backwards=False):
        nonlocal taken
        start = base[taken * WIDTH * 8 :][: 8 * WIDTH].view(dtype)[:WIDTH]
        taken += 1
        itemsize = start.itemsize
        array = as_strided(start, (2, WIDTH), (step * itemsize, itemsize))
        array = array[::-1] if backwards else array
        if values is not None:
            array[...] = values
        return array

    return rows


@pytest.mark.parametrize("backwards", [False, True], ids=["forwards", "backwards"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rows_further_apart_than_32_bits_reach_are_right(far, dtype, backwards):
    names = ("x", "residual", "dy", "d_residual")
    near = {name: draw(name, (2, WIDTH), dtype) for name in names}
    kind = near["x"].dtype
    given = {name: far(kind, values, backwards=backwards) for name, values in near.items()}
    weight = draw("weight", WIDTH, dtype)

    out = NormForward(y=far(kind), residual=far(kind, backwards=backwards))
    forward = cunorm.layer_norm_forward(
        given["x"], weight, weight, residual=given["residual"], out=out
    )
    assert forward.y is out.y
    check_forward(forward, near["x"], weight, weight, near["residual"], center=True, eps=1e-5)

    stream = forward.residual
    grads = cunorm.layer_norm_backward(
        given["dy"],
        stream,
        weight,
        weight,
        rstd=forward.rstd,
        mean=forward.mean,
        d_residual=given["d_residual"],
        out=NormGrads(dx=far(kind)),
    )
    operands = (near["dy"], stream.copy(), weight, weight, near["d_residual"])
    check_backward(grads, *operands, center=True, eps=1e-5)


def test_in_place_results_of_rows_far_apart_are_right(far):
    x, residual = (draw(name, (2, WIDTH), "float32") for name in ("x", "residual"))
    branch, stream = far(np.float32, x), far(np.float32, residual)
    result = cunorm.add_rms_norm(branch, stream, out=AddNorm(branch, stream))
    assert result.y is branch
    check_forward(NormForward(*result), x, None, None, residual, eps=1e-6)


def test_more_than_2_to_the_31_elements_give_the_right_parameter_gradient():
    """The same thousand rows are read some 2000 times; the gradient is so many times theirs."""
    times, rows, width = 2049, 1024, 1024
    shape = (times, rows, width)
    assert times * rows * width > 2**31
    x, dy = (draw(name, (rows, width), "float32") for name in ("x", "dy"))
    rstd = cunorm.rms_norm_forward(x).rstd
    grads = cunorm.rms_norm_backward(
        np.broadcast_to(dy, shape),
        np.broadcast_to(x, shape),
        np.ones(width, np.float32),
        rstd=np.tile(rstd, (times, 1)),
        needs=("weight",),
    )
    summands = dy.astype(np.float64) * cunorm.reference.rms_norm(x)
    exact, magnitude = times * summands.sum(axis=0), times * np.abs(summands).sum(axis=0)
    bound = param_grad_bound(exact, magnitude, "float32")
    assert_within(grads.dweight, exact, bound, "dweight")
