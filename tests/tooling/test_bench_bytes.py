# SPDX-License-Identifier: MIT
"""`python -m bench bytes`: calls move as many bytes as the table says, and hardly any in excess."""

from __future__ import annotations

from itertools import product
from math import prod
from pathlib import Path

import pytest

from bench.plans import traffic
from bench.plans.plan import (
    COPIED_AHEAD,
    ONE_LAUNCH,
    ONE_ROW,
    SEVERAL_ROWS,
    STREAMED,
    TWO_LAUNCHES,
)
from bench.plans.planned import DIRECTIONS
from bench.plans.traffic import Row, main, measure
from bench.plans.traffic_calls import Call, calls
from bench.report.records import read_csv
from bench.timing.cases import OPERATORS
from tests.emulation.machine import needs_softgpu

TABLE = Path(__file__).parents[2] / "bench" / "results" / "bytes.csv"
BY_LABEL = {operator.label: operator for operator in OPERATORS}

# How many arrays as large as x a forward and a backward must move.
ARRAYS = {
    "rms_norm": (2, 3),
    "add_rms_norm": (4, 4),
    "rms_norm+post_gate": (3, 5),
    "rms_norm+pre_gate": (3, 5),
    "group_norm+silu NHWC": (2, 3),
}
# Calls of all kinds of regimes; both directions and all kinds of operands occur.
SAMPLE = (
    ("add_rms_norm", "forward", "bfloat16", STREAMED),
    ("rms_norm+pre_gate", "backward", "float32", ONE_ROW),
    ("rms_norm+groups", "forward", "float32", SEVERAL_ROWS),
    ("layer_norm", "forward", "bfloat16", "cluster of 4"),
    ("rms_norm+post_gate", "backward", "bfloat16", ONE_ROW + COPIED_AHEAD),
    ("add_layer_norm", "backward", "float32", "cluster of 8" + COPIED_AHEAD),
    ("group_norm+silu NHWC", "forward", "bfloat16", ONE_LAUNCH),
    ("group_norm+silu NCHW", "backward", "float32", TWO_LAUNCHES),
)


def key(row: Row) -> tuple[str, ...]:
    return (row.operator, row.memory, row.direction, row.dtype, row.regime, row.shape)


def call_of(label: str, direction: str, dtype: str, regime: str) -> Call:
    found = calls(BY_LABEL[label], direction, dtype)
    return next(call for call in found if call.regime == regime)


@needs_softgpu
@pytest.mark.parametrize("columns", SAMPLE, ids=lambda columns: "-".join(columns))
def test_a_call_moves_the_bytes_of_the_committed_table(columns):
    row = measure(call_of(*columns))
    assert row == {key(row): row for row in read_csv(TABLE, Row)}[key(row)]


@needs_softgpu
@pytest.mark.exhaustive
@pytest.mark.parametrize("label", BY_LABEL)
def test_every_call_moves_the_bytes_of_the_committed_table(label):
    table = {key(row): row for row in read_csv(TABLE, Row)}
    for direction, dtype in product(DIRECTIONS, ("float32", "bfloat16")):
        for call in calls(BY_LABEL[label], direction, dtype):
            row = measure(call)
            assert row == table[key(row)]


def test_the_committed_table_has_every_operator_and_regime_and_no_fault():
    rows = read_csv(TABLE, Row)
    assert not [row for row in rows if row.fault()]
    chosen = product(OPERATORS, DIRECTIONS, ("float32", "bfloat16"))
    expected = {
        (
            *(c.operator.name, c.operator.memory, c.direction, c.dtype, c.regime),
            "x".join(map(str, c.shape)),
        )
        for one in chosen
        for c in calls(*one)
    }
    assert {key(row) for row in rows} == expected
    assert len(rows) == len(expected)


def test_the_minimum_counts_the_arrays_that_must_move():
    rows = [row for row in read_csv(TABLE, Row) if row.dtype == "bfloat16"]
    for label, counts in ARRAYS.items():
        own = [row for row in rows if f"{row.operator} {row.memory}".strip() == label]
        assert {row.direction for row in own} == set(DIRECTIONS)
        for row in own:
            elements = prod(map(int, row.shape.split("x")))
            assert row.minimum == 2 * elements * counts[DIRECTIONS.index(row.direction)]


def test_only_streamed_rows_and_samples_of_two_launches_are_read_twice():
    read_twice = {(row.regime, row.read_again > 0) for row in read_csv(TABLE, Row)}
    assert {regime for regime, is_read in read_twice if is_read} == {STREAMED, TWO_LAUNCHES}
    assert not {(STREAMED, False), (TWO_LAUNCHES, False)} & read_twice


def test_the_exit_status_says_whether_too_much_is_moved(tmp_path, monkeypatch, capsys):
    good = read_csv(TABLE, Row)[0]
    assert good.fault() == ""
    for ratio, status in (("1.0200", 0), ("1.0201", 1), ("0.9980", 1)):
        row = Row(**{**vars(good), "ratio": ratio})
        monkeypatch.setattr(traffic, "_measure_all", lambda calls, jobs, row=row: iter([row]))
        assert main(["--op", "rms_norm", "--out", str(tmp_path / "bytes.csv")]) == status
        assert read_csv(tmp_path / "bytes.csv", Row) == [row]
    assert "moves 0.9980 of what it must" in capsys.readouterr().out
