# SPDX-License-Identifier: MIT
"""On a CPU, long rows are shared by all cores and rows are kept for their second pass: no result
shows it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cunorm
from cunorm import NormForward, NormGrads
from tests.support.bounds import check_backward, check_forward
from tests.support.described import forget, loaded_builds, with_empty_caches
from tests.support.internals import _plan, compiler, thread_count
from tests.support.operands import DTYPES, assert_same_bits, assert_same_fields, draw

pytestmark = [
    pytest.mark.skipif(compiler() is None, reason="no C++ compiler"),
    pytest.mark.compiled("O1"),
]

MANY = 16  # rows: so many are not shared
# Columns of the first part of a forward's rows, and of any other. Of the last part, all are there,
# or one; or all its runs are of whole packs, so that the cut pack is a part for itself.
FIRST, PART = 497 * 64, 512 * 64
WIDTHS = (FIRST + 2 * PART, FIRST + 2 * PART + 1, FIRST + PART + 500 * 64 + 1)
BACKWARD_WIDTHS = (2 * PART + 1, 2 * PART + 500 * 64 + 1)
CASES: dict[str, tuple[str, dict[str, Any], bool]] = {
    "rms, a gate before, a stream": ("float16", {"center": False, "gate_position": "pre"}, True),
    "centred, a gate after, a stream": ("float32", {"center": True, "gate_position": "post"}, True),
    "centred, float64": ("float64", {"center": True}, False),
}
every_case = pytest.mark.parametrize("name", CASES)


@pytest.fixture(autouse=True)
def nothing_loaded(monkeypatch):
    with_empty_caches(monkeypatch)


def operands(name, rows, width):
    """Return rows, whose first columns are far from the rest, and what else is told."""
    dtype, norm, has_stream = CASES[name]
    of_rows = ["x", *(["gate"] if "gate_position" in norm else ())]
    of_rows += ["residual"] if has_stream else []
    given = {n: np.resize(draw(n, (3, width), dtype), (rows, width)) for n in of_rows}
    given["x"][:, :64] += DTYPES[dtype].type(1000)
    given |= norm | {n: draw(n, (width,), dtype) for n in ("weight", "bias")}
    return given.pop("x"), given


def is_shared():
    return bool(loaded_builds("SHARED_ROWS"))


@every_case
def test_a_long_row_alone_gives_the_bits_that_it_gives_among_many(name):
    for width in WIDTHS:
        x, given = operands(name, MANY, width)
        among_many = cunorm.normalize_forward(x, **given)
        assert is_shared() == (width != WIDTHS[0])  # those of the widths before
        for rows in (1, 3):
            x, given = operands(name, rows, width)
            alone = cunorm.normalize_forward(x, **given)
            expected = NormForward(*(None if a is None else a[:rows] for a in among_many))
            assert_same_fields(alone, expected)
    assert is_shared()


@every_case
def test_shared_rows_are_right_and_may_be_written_over_their_inputs(name):
    x, given = operands(name, 2, WIDTHS[1])
    expected = cunorm.normalize_forward(x, **given)
    assert is_shared()
    told = {"residual": None} | given
    parameters = [told.pop(n) for n in ("weight", "bias", "residual")]
    check_forward(expected, x, *parameters, eps=1e-6, **told)
    over = {k: v.copy() if isinstance(v, np.ndarray) else v for k, v in given.items()}
    where, source = NormForward(y=x.copy()), None
    if "residual" in given:
        where, source = NormForward(y=over.get("gate"), residual=over["residual"]), x
    source = where.y if source is None else source
    result = cunorm.normalize_forward(source, **over, out=where)
    assert result.y is where.y
    assert_same_fields(result, expected)


def differentiate(name, rows, width, **more):
    """Return a backward's results, and its arguments."""
    x, given = operands(name, rows, width)
    saved = cunorm.normalize_forward(x, **given)
    if given.pop("residual", None) is not None:
        x, given["d_residual"] = saved.residual, draw("d_residual", x.shape, CASES[name][0])
    given |= {"dy": draw("dy", x.shape, CASES[name][0]), "x": x}
    saved = {"rstd": saved.rstd, "mean": saved.mean}
    return cunorm.normalize_backward(**given, **saved, **more), given, saved


@every_case
def test_a_shared_rows_gradients_have_the_bits_of_rows_that_one_core_has(name, monkeypatch):
    sizes = [(rows, width) for width in BACKWARD_WIDTHS for rows in (1, 3)]
    shared = [differentiate(name, *size)[0] for size in sizes]
    assert is_shared()
    monkeypatch.setattr(_plan, "CPU_SHARED_ROWS", 0)
    forget()
    for size, expected in zip(sizes, shared, strict=True):
        assert_same_fields(differentiate(name, *size)[0], expected)
    assert not is_shared()


@every_case
def test_the_gradients_of_shared_rows_are_right_and_may_be_written_over_their_inputs(name):
    expected, given, saved = differentiate(name, 2, WIDTHS[1])
    assert is_shared()
    told = {"d_residual": None} | given
    arrays = [told.pop(n) for n in ("dy", "x", "weight", "bias", "d_residual")]
    check_backward(expected, *arrays, eps=1e-6, **told)
    over = {k: v.copy() if isinstance(v, np.ndarray) else v for k, v in given.items()}
    out = NormGrads(dx=over["dy"], dgate=over.get("gate"), dweight=over["weight"])
    result = cunorm.normalize_backward(**over, **saved, out=out)
    assert result.dx is over["dy"]
    assert_same_fields(result, expected)


def test_a_gradient_of_shared_rows_alone_is_that_among_others():
    name = "centred, a gate after, a stream"
    expected, *_ = differentiate(name, 2, WIDTHS[1])
    for need in ("weight", "gate"):
        result, *_ = differentiate(name, 2, WIDTHS[1], needs=(need,))
        assert_same_bits(getattr(result, f"d{need}"), getattr(expected, f"d{need}"), need)


def test_shared_rows_in_groups_give_the_bits_of_rows_of_their_own():
    width = WIDTHS[1]
    x, weight = draw("x", (2, 3 * width), "float32"), draw("weight", (3 * width,), "float32")
    result = cunorm.layer_norm_forward(x, weight, groups=3)
    assert is_shared()
    for group in range(3):
        own = np.ascontiguousarray(x.reshape(2, 3, width)[:, group])
        alone = cunorm.layer_norm_forward(own, weight[group * width :][:width])
        assert_same_bits(result.y.reshape(2, 3, width)[:, group], alone.y, "y")
        assert_same_bits(result.rstd[:, group], alone.rstd, "rstd")


def test_shared_rows_ignore_the_number_of_threads():
    x, before = draw("x", (2, WIDTHS[1]), "float32"), thread_count()
    expected = cunorm.layer_norm_forward(x)
    try:
        for threads in (1, 2, 5):
            cunorm.set_num_threads(threads)
            assert_same_fields(cunorm.layer_norm_forward(x), expected)
    finally:
        cunorm.set_num_threads(before)


# --- rows that are kept ---------------------------------------------------------------------------

WIDEST = {"forward": 1 << 15, "backward": 1 << 14}  # of float32 sums
KEPT_WIDTHS = (1000, *(width + 1 for width in WIDEST.values()))


def results(position):
    """Yield what both directions give for rows of each width."""
    for width in KEPT_WIDTHS:
        shape = (5, width)  # rows: not as many as are taken at once
        x, gate, dy = (draw(name, shape, "bfloat16") for name in ("x", "gate", "dy"))
        weight, gated = draw("weight", width, "bfloat16"), {"gate": gate, "gate_position": position}
        forward = cunorm.rms_norm_forward(x, weight, **gated)
        yield forward
        yield cunorm.rms_norm_backward(dy, x, weight, rstd=forward.rstd, **gated)


def keeping(direction):
    """Return whether builds of a direction that were loaded keep something, or not, or both."""
    builds = loaded_builds("PRE_GATE")
    macros = [dict(b.macros) for b in builds if b.kernel == f"row_norm_{direction}"]
    return {"KEPT_PACKS" in names for names in macros}


@pytest.mark.parametrize("position", ["pre", "post"])
def test_results_do_not_show_what_is_kept(position, monkeypatch):
    for plan in ("cpu_forward", "cpu_backward"):
        monkeypatch.setattr(_plan, plan, getattr(_plan, plan).__wrapped__)  # no plan is remembered
    kept = list(results(position))
    assert keeping("backward") == {True, False}
    assert keeping("forward") == ({True, False} if position == "pre" else {False})
    monkeypatch.setattr(_plan, "_KEPT_BYTES", 0)
    with_empty_caches(monkeypatch)
    for fields, computed in zip(kept, results(position), strict=True):
        assert_same_fields(fields, computed)
    assert keeping("backward") == keeping("forward") == {False}


def test_rows_of_float64_sums_are_not_kept():
    x, gate = draw("x", (2, 64), "float64"), draw("gate", (2, 64), "bfloat16")
    cunorm.rms_norm(x, gate=gate, gate_position="pre")
    assert keeping("forward") == {False}
