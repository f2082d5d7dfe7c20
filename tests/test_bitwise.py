# SPDX-License-Identifier: MIT
"""A row's results depend on that row alone, to the bit; parameter gradients on shapes alone."""

from typing import NamedTuple

import numpy as np
import pytest
from operands import DTYPES, assert_same_bits, at, draw, optional

import cunorm
from cunorm import NormForward, NormGrads
from cunorm._layout import _collapsed

ROWS = 37
WIDTHS = (1, 7, 33, 64, 129, 1000, 5003, 20480)
ROW_OPERANDS = ("x", "residual", "dy", "d_residual")
ROW_RESULTS = ("y", "residual", "mean", "rstd", "dx")
dtypes = pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])


class Results(NamedTuple):
    y: np.ndarray
    residual: np.ndarray
    mean: np.ndarray
    rstd: np.ndarray
    dx: np.ndarray
    dweight: np.ndarray
    dbias: np.ndarray


def draw_rows(width, dtype, rows=ROWS):
    return {name: draw(name, (rows, width), dtype) for name in ROW_OPERANDS}


def run(rows, out=None):
    """Layer norm with everything, forward and backward; `out` makes arrays for y and dx."""
    width, dtype = rows["x"].shape[-1], str(rows["x"].dtype)
    weight, bias = (optional(name, width, dtype) for name in ("weight", "bias"))
    forward = cunorm.layer_norm_forward(
        rows["x"], weight, bias, residual=rows["residual"], out=NormForward(y=out and out())
    )
    grads = cunorm.layer_norm_backward(
        rows["dy"],
        forward.residual,
        weight,
        bias,
        rstd=forward.rstd,
        mean=forward.mean,
        d_residual=rows["d_residual"],
        out=NormGrads(dx=out and out()),
    )
    return Results(*forward, grads.dx, grads.dweight, grads.dbias)


def assert_same(actual, expected, fields=Results._fields):
    for name in fields:
        assert_same_bits(getattr(actual, name), getattr(expected, name), name)


# --- rows -----------------------------------------------------------------------------------------


@dtypes
def test_results_ignore_the_order_number_and_position_of_rows(dtype):
    for width in WIDTHS:
        rows = draw_rows(width, dtype)
        expected = run(rows)
        order = np.random.default_rng(width).permutation(ROWS)
        for chosen in (order, order[:1], order[:2], np.arange(ROWS)[5:22], np.tile(order, 9)):
            part = run({name: array[chosen] for name, array in rows.items()})
            for name in ROW_RESULTS:
                with at(f"width {width}", f"{len(chosen)} rows"):
                    assert_same_bits(getattr(part, name), getattr(expected, name)[chosen], name)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_results_do_not_show_that_large_ones_are_stored_past_the_caches(dtype):
    """More than 16 MiB of results, whose build stores them otherwise than that of a few rows."""
    width, few = 1027, slice(300, 340)
    rows = draw_rows(width, dtype, rows=9000 if dtype == "bfloat16" else 4500)
    assert rows["x"].nbytes > 17 << 20
    expected = run(rows)
    part = run({name: array[few] for name, array in rows.items()})
    for name in ROW_RESULTS:
        assert_same_bits(getattr(part, name), getattr(expected, name)[few], name)


# --- memory ---------------------------------------------------------------------------------------


def shifted(array, offset):
    """Return a copy that begins some elements after an address of the greatest alignment."""
    memory = np.zeros(array.size + 128, array.dtype)
    start = -memory.ctypes.data % 64 // array.itemsize + offset
    view = memory[start : start + array.size].reshape(array.shape)
    view[...] = array
    return view


@dtypes
def test_results_ignore_alignment(dtype):
    for width in WIDTHS:
        rows = draw_rows(width, dtype)
        expected = run(rows)
        for offset in (0, 1, 2, 3, 5, 8, 16, 31):
            moved = {name: shifted(array, offset) for name, array in rows.items()}
            out = np.zeros((ROWS, width), DTYPES[dtype])
            with at(f"width {width}", f"offset {offset}"):
                assert_same(run(moved, lambda out=out, by=offset: shifted(out, by + 1)), expected)


VIEWS = {
    "padded": lambda array: np.pad(array, ((0, 0), (3, 2)))[:, 3:-2],
    "every other row": lambda array: np.repeat(array, 2, axis=0)[::2],
    "reversed": lambda array: array[::-1].copy()[::-1],
    "columns first": lambda array: np.asfortranarray(array),
    "unaligned": lambda array: (
        np.frombuffer(b" " + array.tobytes(), np.uint8)[1:].view(array.dtype).reshape(array.shape)
    ),
}


@dtypes
@pytest.mark.parametrize("view", VIEWS)
def test_results_ignore_strides(view, dtype):
    for width in WIDTHS:
        rows = draw_rows(width, dtype)
        viewed = {name: VIEWS[view](array) for name, array in rows.items()}
        with at(f"width {width}"):
            assert_same(run(viewed), run(rows))


@dtypes
def test_results_ignore_that_rows_are_expanded(dtype):
    for width in WIDTHS:
        rows = draw_rows(width, dtype)
        rows |= {name: np.broadcast_to(rows[name][3], (ROWS, width)) for name in ("x", "dy")}
        with at(f"width {width}"):
            assert_same(run(rows), run({name: array.copy() for name, array in rows.items()}))


LEVELS = {
    2: lambda array: array[:, :, :, :4],
    3: lambda array: array.transpose(2, 0, 1, 3, 4),
    4: lambda array: array.transpose(3, 1, 0, 2, 4),
}


@pytest.mark.parametrize("levels", LEVELS)
def test_results_ignore_how_many_strides_walk_the_rows(levels):
    """A slice of a fused qkv has two strides, transposed three; of four, there is a copy."""
    full = {name: draw(name, (2, 3, 2, 5, 2, 33), "float32") for name in ROW_OPERANDS}
    rows = {name: LEVELS[levels](array[..., 1, :]) for name, array in full.items()}
    strides = tuple(stride // 4 for stride in rows["x"].strides[:-1])
    assert len(_collapsed(rows["x"].shape[:-1], strides)) == levels
    assert_same(run(rows), run({name: array.copy() for name, array in rows.items()}))


# --- threads and repetition -----------------------------------------------------------------------


@pytest.fixture
def default_threads():
    yield
    cunorm.set_num_threads(None)


@dtypes
@pytest.mark.parametrize(("rows", "width"), [(3000, 257), (20, 5003), (1000, 64), (4, 70000)])
def test_results_do_not_depend_on_the_number_of_threads(dtype, rows, width, default_threads):
    operands = draw_rows(width, dtype, rows)
    cunorm.set_num_threads(1)
    expected = run(operands)
    for threads in (2, 3, 7):
        cunorm.set_num_threads(threads)
        with at(f"{threads} threads"):
            assert_same(run(operands), expected)


def test_results_are_the_same_every_time():
    operands = draw_rows(257, "float32", 3000)
    expected = run(operands)
    for _ in range(10):
        assert_same(run(operands), expected)
