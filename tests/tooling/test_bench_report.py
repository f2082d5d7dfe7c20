# SPDX-License-Identifier: MIT
"""The table on the screen: ratios, geometric means and worst points, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench import report
from tests.tooling.test_bench_rows import ROW


def timed(operator, shape, **microseconds):
    """Return one point's rows; a copy moves as many bytes in 6 µs."""
    times = {"copy": 6.0} | {name.replace("_", "-"): time for name, time in microseconds.items()}
    return [
        replace(ROW, operator=operator, shape=shape, provider=name, p50_us=us, of_copy=6.0 / us)
        for name, us in times.items()
    ]


ROWS = [
    *timed("layer_norm", "1x1", cunorm=12.0, torch=24.0),
    *timed("rms_norm", "2x1", cunorm=12.0, torch=96.0),
    *timed("rms_norm", "4x1", cunorm=3.0, torch=6.0, jax=1.5),
    *timed("rms_norm+post_gate", "8x1", cunorm=12.0, torch=36.0, cunorm_ungated=8.0),
    *timed("rms_norm+post_gate", "9x1", cunorm=24.0, cunorm_ungated=4.0),
]


def line_of(operator, shape):
    lines = [line.split() for line in report.table(ROWS).splitlines()]
    (found,) = [line for line in lines if line[:1] == [operator] and line[3:4] == [shape]]
    return found


def test_a_points_line_has_ratios_to_cunorm():
    point = line_of("rms_norm", "4x1")
    assert point[4] == "3.0"
    assert point[6:] == ["2.00", "2.00", "0.50"]  # of copy, torch, jax
    gated = line_of("rms_norm+post_gate", "8x1")
    assert gated[6:] == ["0.50", "3.00", "1.50"]  # the last over the ungated


@pytest.mark.parametrize(
    ("names", "means"),
    [
        (
            "rms_norm",
            "of copy 1.00 (0.50 at 2x1); × torch 4.00 (2.00 at 4x1); × jax 0.50 (0.50 at 4x1)",
        ),
        ("layer_norm", "of copy 0.50 (0.50 at 1x1); × torch 2.00 (2.00 at 1x1)"),
        (
            "rms_norm+post_gate",
            "of copy 0.35 (0.25 at 9x1); × torch 3.00 (3.00 at 8x1); / ungated 3.00 (6.00 at 9x1)",
        ),
        (
            "all ungated",
            "of copy 0.79 (0.50 at 1x1); × torch 3.17 (2.00 at 1x1); × jax 0.50 (0.50 at 4x1)",
        ),
    ],
)
def test_geometric_means_are_those_of_the_points_named(names, means):
    table = " ".join(report.table(ROWS).split("geometric means")[1].split())
    assert f"{names} forward float32 {means}" in table


def test_a_table_without_cunorm_says_so():
    others = [row for row in ROWS if not row.provider.startswith("cunorm")]
    assert report.table(others) == report.table([]) == "no point of cunorm's was timed"
