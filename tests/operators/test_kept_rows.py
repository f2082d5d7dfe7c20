# SPDX-License-Identifier: MIT
"""What a CPU's thread keeps of rows for their second pass shows in no result."""

import pytest

import cunorm
from cunorm import _cpu, _plan
from tests.support.described import loaded_builds, with_empty_caches
from tests.support.operands import assert_same_fields, draw

pytestmark = pytest.mark.skipif(_cpu.compiler() is None, reason="needs a C++ compiler")
WIDEST = {"forward": 1 << 15, "backward": 1 << 14}  # of float32 sums
ROWS = {40: 9, 1000: 5}  # otherwise 3: not as many as are taken at once


def results(width, position):
    """Return what both directions give for rows of a width, and for the last of them alone."""
    shape = (ROWS.get(width, 3), width)
    x, gate, dy = (draw(name, shape, "bfloat16") for name in ("x", "gate", "dy"))
    weight = draw("weight", width, "bfloat16")
    for rows in (slice(None), slice(-1, None)):
        gated = {"gate": gate[rows], "gate_position": position}
        forward = cunorm.rms_norm_forward(x[rows], weight, **gated)
        yield forward
        for needs in (("x", "weight", "gate"), ("gate",)):
            rstd = forward.rstd
            yield cunorm.rms_norm_backward(
                dy[rows], x[rows], weight, rstd=rstd, needs=needs, **gated
            )


def keeping(direction):
    """Return whether builds of a direction that were loaded keep something, or not, or both."""
    builds = loaded_builds("PRE_GATE")
    macros = [dict(b.macros) for b in builds if b.kernel == f"row_norm_{direction}"]
    return {"KEPT_PACKS" in names for names in macros}


@pytest.mark.parametrize("position", ["pre", "post"])
def test_results_do_not_show_what_is_kept(position, monkeypatch):
    widths = [40, 1000, *(WIDEST[d] + more for d in WIDEST for more in (-7, 0, 1))]
    for plan in ("cpu_forward", "cpu_backward"):
        monkeypatch.setattr(_plan, plan, getattr(_plan, plan).__wrapped__)  # no plan is remembered
    with_empty_caches(monkeypatch)
    kept = [list(results(width, position)) for width in widths]
    assert keeping("backward") == {True, False}
    assert keeping("forward") == ({True, False} if position == "pre" else {False})
    monkeypatch.setattr(_plan, "_KEPT_BYTES", 0)
    with_empty_caches(monkeypatch)
    for width, of_width in zip(widths, kept, strict=True):
        for fields, computed in zip(of_width, results(width, position), strict=True):
            assert_same_fields(fields, computed)
    assert keeping("backward") == keeping("forward") == {False}


def test_rows_of_float64_sums_are_not_kept(monkeypatch):
    with_empty_caches(monkeypatch)
    x, gate = draw("x", (2, 64), "float64"), draw("gate", (2, 64), "bfloat16")
    cunorm.rms_norm(x, gate=gate, gate_position="pre")
    assert keeping("forward") == {False}
