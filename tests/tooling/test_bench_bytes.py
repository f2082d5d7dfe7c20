# SPDX-License-Identifier: MIT
"""`python -m bench bytes`: calls move as many bytes as the table says, and hardly any in excess."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import prod
from pathlib import Path

import pytest

from bench.plans import traffic
from bench.plans.plan import COPIED_AHEAD, ONE_ROW, SEVERAL_ROWS, STREAMED, TWO_LAUNCHES
from bench.plans.traffic import COUNTED, Call, Row, calls, main, measure
from bench.report.records import read_csv
from bench.timing.cases import DIRECTIONS
from tests.emulation.machine import needs_softgpu

ROWS = read_csv(Path(__file__).parents[2] / "bench" / "results" / "bytes.csv", Row)
BY_LABEL = {operator.label: operator for operator in COUNTED}
DTYPES = ("float32", "bfloat16")

# How many arrays as large as x a forward and a backward must move.
ARRAYS = {
    "rms_norm": (2, 3),
    "add_rms_norm": (4, 4),
    "rms_norm+post_gate": (3, 5),
    "rms_norm+pre_gate": (3, 5),
    "group_norm+silu NHWC": (2, 3),
}
# The bytes of an element that a norm with a quantised result must move, in float32 and bfloat16.
QUANTIZED = {"rms_norm+fp8": (5, 3), "rms_norm+fp8_blocks": (5, 3), "add_rms_norm+fp8": (13, 7)}
# Calls of all kinds of regimes; both directions and all kinds of operands occur.
SAMPLE = (
    ("add_rms_norm", "forward", "bfloat16", STREAMED),
    ("add_rms_norm+fp8", "forward", "bfloat16", ONE_ROW),
    ("rms_norm+fp8", "forward", "bfloat16", STREAMED),
    ("rms_norm+pre_gate", "backward", "float32", ONE_ROW),
    ("rms_norm+groups", "forward", "float32", SEVERAL_ROWS),
    ("layer_norm", "forward", "bfloat16", "cluster of 4"),
    ("rms_norm+post_gate", "backward", "bfloat16", ONE_ROW + COPIED_AHEAD),
    ("add_layer_norm", "backward", "float32", "cluster of 8" + COPIED_AHEAD),
    ("group_norm+silu NHWC", "forward", "bfloat16", "one launch"),
    ("group_norm+silu NCHW", "backward", "float32", TWO_LAUNCHES),
)


def key(one: Row | Call) -> tuple[str, ...]:
    """Return what identifies a call in the table."""
    if isinstance(one, Row):
        return one.operator, one.memory, one.direction, one.dtype, one.regime, one.shape
    names = one.operator.name, one.operator.memory, one.direction, one.dtype, one.regime
    return *names, "x".join(map(str, one.shape))


@needs_softgpu
@pytest.mark.parametrize(("label", "direction", "dtype", "regime"), SAMPLE, ids=str)
def test_a_call_moves_the_bytes_of_the_committed_table(label, direction, dtype, regime):
    found = calls(BY_LABEL[label], direction, dtype)
    assert measure(next(call for call in found if call.regime == regime)) in ROWS


@needs_softgpu
@pytest.mark.exhaustive
@pytest.mark.parametrize("label", BY_LABEL)
def test_every_call_moves_the_bytes_of_the_committed_table(label):
    for direction, dtype in product(BY_LABEL[label].directions, DTYPES):
        for call in calls(BY_LABEL[label], direction, dtype):
            assert measure(call) in ROWS


def test_the_committed_table_has_every_operator_and_regime_and_no_fault():
    assert not [row for row in ROWS if row.fault()]
    chosen = [one for one in product(COUNTED, DIRECTIONS, DTYPES) if one[1] in one[0].directions]
    expected = [key(call) for one in chosen for call in calls(*one)]
    assert sorted(map(key, ROWS)) == sorted(expected)


def test_the_minimum_counts_the_arrays_that_must_move_and_some_plans_read_arrays_twice():
    for row in ROWS:
        assert (row.read_again > 0) == (row.regime in (STREAMED, TWO_LAUNCHES))
        elements = prod(map(int, row.shape.split("x")))
        if row.operator in QUANTIZED:
            of_element = QUANTIZED[row.operator][DTYPES.index(row.dtype)]
            assert row.minimum == of_element * elements
        if counts := ARRAYS.get(f"{row.operator} {row.memory}".strip()):
            itemsize = 4 if row.dtype == "float32" else 2
            assert row.minimum == itemsize * elements * counts[DIRECTIONS.index(row.direction)]


@pytest.mark.parametrize(("ratio", "status"), [("1.0200", 0), ("1.0201", 1), ("0.9980", 1)])
def test_the_exit_status_says_whether_too_much_is_moved(
    ratio, status, tmp_path, monkeypatch, capsys
):
    row = replace(ROWS[0], ratio=ratio)
    monkeypatch.setattr(traffic, "_measure_all", lambda calls, jobs: iter([row]))
    assert main(["--op", "rms_norm", "--out", str(tmp_path / "bytes.csv")]) == status
    assert read_csv(tmp_path / "bytes.csv", Row) == [row]
    assert (f"moves {ratio}" in capsys.readouterr().out) == status
