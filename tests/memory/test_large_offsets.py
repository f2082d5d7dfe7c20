# SPDX-License-Identifier: MIT
"""Offsets past 2**31 elements: rows, samples and lines that are far apart, and large arrays."""

from __future__ import annotations

import mmap
import sys

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import cunorm
from cunorm import GroupNormForward, GroupNormGrads, NormForward, NormGrads
from tests.support.bounds import assert_within, check_backward, check_forward, param_grad_bound
from tests.support.norm_checks import check, run
from tests.support.operands import draw

WIDTH = 1003
FAR = 2**31 + 8  # elements
MAP_NORESERVE = 0x4000  # on Linux; the mmap module has the name since Python 3.11
pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or sys.maxsize < 2**32, reason="needs Linux and 64-bit addresses"
)


@pytest.fixture
def far():
    """Return a function that allocates arrays with a stride of FAR, or -FAR, along one axis.

    The arrays share one mapping of addresses, in which only touched pages have memory.
    """
    flags, size = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE, 1 << 16
    try:
        memory = mmap.mmap(-1, 4 * FAR + 16 * size, flags=flags)
    except (OSError, ValueError, OverflowError) as error:
        pytest.skip(f"no mapping of 8 GiB of addresses: {error}")
    base, count = np.frombuffer(memory, np.uint8), 0

    def put(shape, strides, axis, dtype, values=None, *, backwards=False):
        nonlocal count
        start = base[count * size :][: 4 * FAR + size].view(dtype)
        steps = [FAR if other == axis else step for other, step in enumerate(strides)]
        array = as_strided(start, shape, [start.itemsize * step for step in steps])
        count += 1
        array = np.flip(array, axis) if backwards else array
        if values is not None:
            array[...] = values
        return array

    return put


@pytest.mark.parametrize("backwards", [False, True], ids=["forwards", "backwards"])
def test_rows_further_apart_than_32_bits_reach_are_right(far, backwards):
    names, kwargs = ("x", "residual", "dy", "d_residual"), {"backwards": backwards}
    dtype = "bfloat16" if backwards else "float32"
    near = {name: draw(name, (2, WIDTH), dtype) for name in names}

    def rows(*values, **more):
        return far((2, WIDTH), (0, 1), 0, near["x"].dtype, *values, **more)

    given = {name: rows(values, **kwargs) for name, values in near.items()}
    weight = draw("weight", WIDTH, dtype)
    out = NormForward(y=rows(), residual=rows(**kwargs))
    forward = cunorm.layer_norm_forward(
        given["x"], weight, weight, residual=given["residual"], out=out
    )
    assert forward.y is out.y
    check_forward(forward, near["x"], weight, weight, near["residual"], center=True, eps=1e-5)
    stream, saved = forward.residual, {"rstd": forward.rstd, "mean": forward.mean}
    for dx in (rows(), given["dy"]):  # in place, too
        kwargs = saved | {"d_residual": given["d_residual"], "out": NormGrads(dx=dx)}
        grads = cunorm.layer_norm_backward(given["dy"], stream, weight, weight, **kwargs)
        operands = (near["dy"], stream.copy(), weight, weight, near["d_residual"])
        check_backward(grads, *operands, center=True, eps=1e-5)


# Shape, channel_axis, strides, and the axis that has the stride FAR instead.
VIEWS = {
    "samples": ((2, 7, 10), -1, (0, 10, 1), 0),
    "samples, channels first": ((2, 10, 7), 1, (0, 7, 1), 0),
    "positions": ((1, 2, 10), -1, (20, 0, 1), 1),
    "channels": ((1, 2, 7), 1, (14, 0, 1), 1),
}


@pytest.mark.parametrize(
    ("view", "backwards"),
    [*((view, False) for view in VIEWS), ("samples", True), ("channels", True)],
)
def test_images_further_apart_than_32_bits_reach_are_right(far, view, backwards):
    shape, channel_axis, strides, axis = VIEWS[view]

    def put(*values):
        return far(shape, strides, axis, np.float32, *values, backwards=backwards)

    groups = shape[channel_axis] // 2
    near = [draw(name, shape, "float32") for name in ("x", "dy")]
    given, y = [put(values) for values in near], put()
    for dx in (put(), given[1]):  # in place, too
        forward, backward = {"out": GroupNormForward(y=y)}, {"out": GroupNormGrads(dx=dx)}
        results = run(*given, groups, channel_axis, forward=forward, backward=backward)
        assert results.y is y
        assert results.dx is dx
        check(results, *near, groups, channel_axis)


@pytest.mark.compiled("O1")
def test_more_than_2_to_the_31_elements_give_the_right_parameter_gradient():
    """A block of rows is read 2049 times, so the gradient is 2049 times that of the block."""
    times, shape = 2049, (1024, 1024)
    x, dy = (draw(name, shape, "float32") for name in ("x", "dy"))
    rstd = np.tile(cunorm.rms_norm_forward(x).rstd, (times, 1))
    many = [np.broadcast_to(array, (times, *shape)) for array in (dy, x)]
    assert many[0].size > 2**31
    weight = np.ones(shape[1], np.float32)
    grads = cunorm.rms_norm_backward(*many, weight, rstd=rstd, needs=("weight",))
    summands = dy.astype(np.float64) * cunorm.reference.rms_norm(x)
    exact, magnitude = times * summands.sum(axis=0), times * np.abs(summands).sum(axis=0)
    bound = param_grad_bound(exact, magnitude, "float32")
    assert_within(grads.dweight, exact, bound, "dweight")
