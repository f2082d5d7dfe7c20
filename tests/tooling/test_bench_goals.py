# SPDX-License-Identifier: MIT
"""The goals are compared with the timings, and one that is not met is named with its figure."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from bench import goals, tables
from tests.support.bench_rows import row, rows_of_the_grid, written

GOOD = rows_of_the_grid(torch=1300, copy=90, ungated=60)
MISSING = "points of the default grid that were not timed"


@pytest.fixture
def csv(tmp_path):
    return partial(written, tmp_path / "cpu.csv")


def unmet(rows) -> set[str]:
    return {goal.text for goal in goals.goals(rows) if not goal.met}


def test_goals_that_are_met_end_in_status_0(csv, capsys):
    assert unmet(GOOD) == set()
    assert tables.main([str(csv(GOOD)), "--goals"]) == 0
    lines = capsys.readouterr().out.split("| met |")[1].splitlines()[2:]
    assert len(lines) == 12 + 1 + 4 + 4 + 1 + 1
    assert "| rms_norm backward, bfloat16: × torch, mean | ≥ 12 | 13.000 | yes |" in lines


def test_a_goal_that_is_not_met_is_shown_with_its_figure_and_ends_in_status_1(csv, capsys):
    rows = rows_of_the_grid(torch=300, copy=70, ungated=40)
    assert tables.main([str(csv(rows)), "--goals"]) == 1
    lines = capsys.readouterr().out.splitlines()
    for line in (
        "| rms_norm forward, float32: × torch, mean | ≥ 3 | 3.000 | yes |",
        "| rms_norm forward, bfloat16: × torch, mean | ≥ 6 | 3.000 | no |",
        "| gated norms forward and backward, float32: × torch, mean | ≥ 4 | 3.000 | no |",
        "| group_norm+silu forward and backward, bfloat16: × torch, mean | ≥ 2.5 | 3.000 | yes |",
        "| ungated norms backward, float32: time / copy, mean | ≤ 1.25 | 1.429 | no |",
        "| ungated norms backward, bfloat16: time / copy, mean | ≤ 2 | 1.429 | yes |",
        "| gated norms forward, float32: time / ungated, mean | ≤ 2 | 2.500 | no |",
    ):
        assert line in lines


def change(time: float, **chosen: str):
    """Return GOOD with another time of torch at the rows chosen."""
    return [
        replace(r, p50_us=time)
        if r.provider == "torch" and all(getattr(r, name) == v for name, v in chosen.items())
        else r
        for r in GOOD
    ]


def test_every_mean_is_of_its_own_rows():
    of_rms = {"operator": "rms_norm", "direction": "backward", "dtype": "float32"}
    assert unmet(change(599, **of_rms)) == {"rms_norm backward, float32: × torch, mean"}
    assert unmet(change(600, **of_rms)) == set()
    for dtype in ("float32", "bfloat16"):
        for gated in ("rms_norm+post_gate", "rms_norm+pre_gate"):  # √(13 · 1.2) < 4
            assert unmet(change(120, operator=gated, dtype=dtype)) == {
                f"gated norms forward and backward, {dtype}: × torch, mean"
            }
        assert unmet(change(249, operator="group_norm+silu", dtype=dtype)) == {
            f"group_norm+silu forward and backward, {dtype}: × torch, mean"
        }


def test_one_slow_point_is_enough_and_is_named():
    slow = change(
        96, operator="layer_norm", direction="forward", dtype="float32", shape="4096x4096"
    )
    (goal,) = (goal for goal in goals.goals(slow) if not goal.met)
    assert (goal.figure, goal.point) == (0.96, "layer_norm forward float32 4096x4096")


def test_points_of_less_than_a_mebibyte_count_for_no_goal():
    assert (
        unmet([*GOOD, row("cunorm", 9, shape="512x512"), row("torch", 1, shape="512x512")]) != set()
    )
    assert (
        unmet([*GOOD, row("cunorm", 9, shape="511x512"), row("torch", 1, shape="511x512")]) == set()
    )


def test_a_point_that_cunorm_alone_lacks_is_a_goal_not_met():
    rows = [*GOOD, row("torch", 1, "layer_norm", shape="3x5")]
    (goal,) = (goal for goal in goals.goals(rows) if not goal.met)
    assert (goal.figure, goal.point) == (1, "layer_norm forward float32 3x5")
