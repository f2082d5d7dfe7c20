# SPDX-License-Identifier: MIT
"""On a CPU, a few long rows are shared by all cores; what comes out does not show it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cunorm
from cunorm import NormForward, NormGrads, _plan
from cunorm._cpu import compiler
from tests.support.bounds import check_backward, check_forward
from tests.support.described import forget, loaded_builds, with_empty_caches
from tests.support.operands import DTYPES, assert_same_bits, draw

pytestmark = [
    pytest.mark.skipif(compiler() is None, reason="no C++ compiler"),
    pytest.mark.usefixtures("nothing_loaded"),
]

MANY = 16  # rows: so many are not shared
# Columns of the first part of a forward's rows, and of any other. Of the last part, all are there,
# or one; or all its runs are of whole packs, so that the cut pack is a part for itself.
FIRST, PART = 497 * 64, 512 * 64
WIDTHS = (FIRST + 2 * PART, FIRST + 2 * PART + 1, FIRST + PART + 500 * 64 + 1)
BACKWARD_WIDTHS = (2 * PART + 1, 2 * PART + 500 * 64 + 1)
CASES: dict[str, tuple[str, dict[str, Any], bool]] = {
    "rms": ("float32", {"center": False}, False),
    "rms, a gate before, a stream": ("float16", {"center": False, "gate_position": "pre"}, True),
    "centred": ("bfloat16", {"center": True}, False),
    "centred, a gate after, a stream": ("float32", {"center": True, "gate_position": "post"}, True),
    "centred, float64": ("float64", {"center": True}, False),
}
every_case = pytest.mark.parametrize("name", CASES)


@pytest.fixture
def nothing_loaded(monkeypatch):
    with_empty_caches(monkeypatch)


def operands(name, width, beginning=0.0):
    """Return rows, of which the first columns may be far from the rest, and what else is told."""
    dtype, norm, has_stream = CASES[name]
    x = draw("x", (MANY, width), dtype)
    x[:, :64] += DTYPES[dtype].type(beginning)
    given = dict(norm)
    if "gate_position" in norm:
        given["gate"] = draw("gate", x.shape, dtype)
    if has_stream:
        given["residual"] = draw("residual", x.shape, dtype)
    return x, draw("weight", (width,), dtype), draw("bias", (width,), dtype), given


def first(rows, given):
    """Return what is given of so many rows."""
    return {k: v[:rows] if isinstance(v, np.ndarray) else v for k, v in given.items()}


def shared_builds():
    return loaded_builds("SHARED_ROWS")


@every_case
@pytest.mark.parametrize("beginning", [0.0, 1000.0], ids=["", "beginnings unlike the rest"])
def test_a_long_row_alone_gives_the_bits_that_it_gives_among_many(name, beginning):
    for width in WIDTHS:
        x, weight, bias, given = operands(name, width, beginning)
        among_many = cunorm.normalize_forward(x, weight, bias, **given)
        assert bool(shared_builds()) == (width != WIDTHS[0])  # those of the widths before
        for rows in (1, 3):
            alone = cunorm.normalize_forward(x[:rows], weight, bias, **first(rows, given))
            for field, one, other in zip(alone._fields, alone, among_many, strict=True):
                if other is not None:
                    assert_same_bits(one, other[:rows], field)
    assert len(shared_builds()) == 1


@every_case
def test_shared_rows_are_right_where_their_beginning_is_unlike_the_rest(name):
    x, weight, bias, given = operands(name, WIDTHS[1], beginning=1000.0)
    some = first(2, given)
    result = cunorm.normalize_forward(x[:2], weight, bias, **some)
    assert shared_builds()
    check_forward(result, x[:2], weight, bias, some.pop("residual", None), eps=1e-6, **some)


@every_case
def test_shared_rows_may_be_written_over_their_inputs(name):
    x, weight, bias, given = operands(name, WIDTHS[1], beginning=1000.0)
    x, given = x[:2], first(2, given)
    expected = cunorm.normalize_forward(x, weight, bias, **given)
    over = {k: v.copy() if isinstance(v, np.ndarray) else v for k, v in given.items()}
    where = NormForward(y=x.copy())
    source = where.y
    if "residual" in given:
        where = NormForward(y=over.get("gate"), residual=over["residual"])
        source = x
    result = cunorm.normalize_forward(source, weight, bias, out=where, **over)
    assert result.y is where.y
    for field, one, other in zip(result._fields, result, expected, strict=True):
        if other is not None:
            assert_same_bits(one, other, field)


def differentiate(name, rows, width, **more):
    """Return a backward's results, its arguments by position, and by keyword."""
    x, weight, bias, given = operands(name, width, beginning=1000.0)
    x, given = x[:rows].copy(), first(rows, given)
    residual = given.pop("residual", None)
    saved = cunorm.normalize_forward(x, weight, bias, residual=residual, **given)
    if residual is not None:
        x = saved.residual
        given["d_residual"] = draw("d_residual", x.shape, CASES[name][0])
    arrays = (draw("dy", x.shape, CASES[name][0]), x, weight, bias)
    statistics = {"rstd": saved.rstd, "mean": saved.mean}
    result = cunorm.normalize_backward(*arrays, **statistics, **given, **more)
    return result, arrays, given | statistics


@every_case
def test_a_shared_rows_gradients_have_the_bits_of_rows_that_one_core_has(name, monkeypatch):
    for width in BACKWARD_WIDTHS:
        for rows in (1, 3):
            shared, _, _ = differentiate(name, rows, width)
            assert shared_builds()
            with monkeypatch.context() as patch:
                patch.setattr(_plan, "CPU_SHARED_ROWS", 0)
                forget()
                alone, _, _ = differentiate(name, rows, width)
                assert not shared_builds()
            forget()
            for field, one, other in zip(shared._fields, shared, alone, strict=True):
                if other is not None:
                    assert_same_bits(one, other, field)


@every_case
def test_the_gradients_of_shared_rows_are_right(name):
    result, arrays, given = differentiate(name, 2, WIDTHS[1])
    assert shared_builds()
    options = {key: value for key, value in given.items() if key not in ("rstd", "mean")}
    check_backward(result, *arrays, eps=1e-6, **options)


@every_case
def test_the_gradients_of_shared_rows_may_be_written_over_their_inputs(name):
    expected, arrays, given = differentiate(name, 2, WIDTHS[1])
    dy, *others = (array.copy() for array in arrays)
    given = {k: v.copy() if isinstance(v, np.ndarray) else v for k, v in given.items()}
    out = NormGrads(dx=dy, dgate=given.get("gate"), dweight=others[1])
    result = cunorm.normalize_backward(dy, *others, out=out, **given)
    assert result.dx is dy
    for field in ("dx", "dweight", "dbias", "dgate"):
        if getattr(expected, field) is not None:
            assert_same_bits(getattr(result, field), getattr(expected, field), field)


@pytest.mark.parametrize("needs", [("weight",), ("bias",), ("x",), ("gate",)])
def test_a_gradient_of_shared_rows_alone_is_that_among_others(needs):
    name = "centred, a gate after, a stream"
    field = f"d{needs[0]}"
    expected, _, _ = differentiate(name, 2, WIDTHS[1])
    result, _, _ = differentiate(name, 2, WIDTHS[1], needs=needs)
    assert_same_bits(getattr(result, field), getattr(expected, field), field)


def test_shared_rows_in_groups_give_the_bits_of_rows_of_their_own():
    width = WIDTHS[1]
    x, weight = draw("x", (2, 3 * width), "float32"), draw("weight", (3 * width,), "float32")
    result = cunorm.layer_norm_forward(x, weight, groups=3)
    assert shared_builds()
    for group in range(3):
        own = np.ascontiguousarray(x.reshape(2, 3, width)[:, group])
        alone = cunorm.layer_norm_forward(own, weight[group * width :][:width])
        assert_same_bits(result.y.reshape(2, 3, width)[:, group], alone.y, "y")
        assert_same_bits(result.rstd[:, group], alone.rstd, "rstd")


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_shared_rows_ignore_the_number_of_threads(threads):
    x = draw("x", (2, WIDTHS[1]), "float32")
    expected = cunorm.layer_norm_forward(x)
    before = cunorm._cpu.thread_count()
    cunorm.set_num_threads(threads)
    try:
        result = cunorm.layer_norm_forward(x)
    finally:
        cunorm.set_num_threads(before)
    for field in ("y", "mean", "rstd"):
        assert_same_bits(getattr(result, field), getattr(expected, field), field)


def test_rows_are_shared_where_they_are_few_and_long():
    width = WIDTHS[1]
    for rows, columns, forward, backward in (
        (0, width, False, False),
        (1, 65536, False, False),
        (1, 65537, True, True),
        (4, width, True, True),
        (5, width, True, False),
        (15, width, True, False),
        (16, width, False, False),
    ):
        walk = _plan.Walk(rows, columns)
        assert bool(_plan.cpu_forward_parts(walk)) == forward
        assert bool(_plan.cpu_backward_parts(walk)) == backward
