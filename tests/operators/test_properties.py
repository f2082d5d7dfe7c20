# SPDX-License-Identifier: MIT
"""Properties of the norms that hold for any shapes, strides and dtypes."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import cunorm
from tests.support.bounds import check_backward, check_forward
from tests.support.group_bounds import check_group_backward, check_group_forward
from tests.support.operands import draw, optional

some = settings(derandomize=True, deadline=None, max_examples=40, database=None)
steps = st.sampled_from([-2, -1, 1, 2, 3])
dtypes = st.sampled_from(["bfloat16", "float32"])


@st.composite
def views(draws, shape):
    """Draw a view of a shape: part of a larger array, with any steps and order of axes."""
    strides = [draws(steps) for _ in shape]
    starts = [draws(st.integers(0, 2)) for _ in shape]
    order = draws(st.permutations(range(len(shape))))

    def view(array):
        axes = zip(starts, shape, strides, strict=True)
        sizes = [start + size * abs(step) for start, size, step in axes]
        memory = np.zeros([sizes[axis] for axis in order], array.dtype)
        whole = memory.transpose(np.argsort(order))
        parts = [slice(start, None, abs(step)) for start, step in zip(starts, strides, strict=True)]
        turns = tuple(slice(None, None, 1 if step > 0 else -1) for step in strides)
        part = whole[tuple(parts)][tuple(slice(size) for size in shape)][turns]
        part[...] = array
        return part

    return view


shapes = st.lists(st.integers(1, 5), min_size=0, max_size=3)


@some
@given(st.data(), shapes, st.integers(1, 70), dtypes, st.booleans())
def test_a_row_norm_of_any_view_is_within_its_bounds(data, leading, width, dtype, center):
    axis = data.draw(st.integers(-len(leading) - 1, -1))
    shape = (*leading, width)
    x, dy = draw("x", shape, dtype), draw("dy", shape, dtype)
    weight, bias = (optional(name, shape[axis:], dtype) for name in ("weight", "bias"))
    given = (weight, bias if center else None)
    x, dy = (data.draw(views(shape))(array) for array in (x, dy))
    options = {"center": center, "eps": 1e-3, "axis": axis}
    f = cunorm.normalize_forward(x, *given, **options)
    del options["eps"]
    grads = cunorm.normalize_backward(dy, x, *given, rstd=f.rstd, mean=f.mean, **options)
    check_forward(f, x, *given, eps=1e-3, **options)
    check_backward(grads, dy, x, *given, eps=1e-3, **options)


@some
@given(st.data(), shapes, st.sampled_from([1, 2, 5]), st.integers(1, 7), dtypes)
def test_a_group_norm_of_any_view_is_within_its_bounds(data, sizes, groups, depth, dtype):
    axis, channels = data.draw(st.sampled_from([-1, 1])), groups * depth
    samples, *positions = sizes or [1]
    shape = (samples, channels, *positions) if axis == 1 else (samples, *positions, channels)
    x, dy = draw("x", shape, dtype), draw("dy", shape, dtype)
    given = [optional(name, channels, dtype) for name in ("weight", "bias")]
    x, dy = (data.draw(views(shape))(array) for array in (x, dy))
    options = {"channel_axis": axis, "activation": "silu"}
    f = cunorm.group_norm_forward(x, groups, *given, eps=1e-3, **options)
    saved = {"mean": f.mean, "rstd": f.rstd}
    grads = cunorm.group_norm_backward(dy, x, groups, *given, **saved, **options)
    check_group_forward(f, x, groups, *given, eps=1e-3, **options)
    check_group_backward(grads, dy, x, groups, *given, eps=1e-3, **options)
