# SPDX-License-Identifier: MIT
"""The tables, goals and pictures of timings match their CSV."""

from __future__ import annotations

import math
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from bench.plans import rows as static_rows
from bench.report import goals, overview, screen, static_tables, tables
from bench.report.records import read_csv, write_csv
from bench.timing import grid
from bench.timing.rows import Row

ROOT = Path(__file__).parents[2]
FACTS = {
    **{"date": "2026-11-20", "commit": "abc1234", "device": 'A CPU, of "some" kind', "driver": ""},
    **{"versions": "cunorm 0.1.0; torch 2.13.0", "threads": 2, "of_copy": 1.0, "gb_per_s": 18.9},
    **{"host_us": None, "error": None},
}


def row(
    provider: str,
    p50_us: float,
    operator: str = "rms_norm",
    direction: str = "forward",
    dtype: str = "float32",
    shape: str = "4096x4096",
    memory: str = "",
    **others: object,
) -> Row:
    moved = 2 * math.prod(map(int, shape.split("x"))) * (4 if dtype == "float32" else 2)
    point = {"operator": operator, "memory": memory, "direction": direction, "dtype": dtype}
    time = {"shape": shape, "provider": provider, "bytes": moved, "p50_us": p50_us}
    return Row(**{**FACTS, "p20_us": p50_us, "p80_us": p50_us, **point, **time, **others})


# At the two points of rms_norm, torch's time over cunorm's is 2 and 8, and cunorm's time over a
# copy's is 2 and 0.5. At the points of GATED, its time over the ungated norm's is 1.25 and 5.
GATED = ("rms_norm+pre_gate", "backward", "bfloat16")
NAMES = ("cunorm", "torch", "copy", "cunorm-ungated")
PEERS = ("torch", "torch.compile", "jax")
TIMED = [
    *map(row, NAMES[:3], (100, 200, 50)),
    *(row(*time, shape="65536x256") for time in (("copy", 200), ("torch", 800), ("cunorm", 100))),
    *(row(*time, *GATED, "4096x4096") for time in zip(NAMES, (100, 90, 10, 80), strict=True)),
    *(row(*time, *GATED, "8x96") for time in zip(NAMES, (100, 90, 10, 20), strict=True)),
]


@pytest.fixture
def csv(tmp_path):
    def written(rows: list[Row]) -> Path:
        write_csv(tmp_path / "cpu.csv", Row, rows)
        return tmp_path / "cpu.csv"

    return written


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_rows_are_read_as_they_were_written_and_rows_of_other_columns_are_refused(csv, tmp_path):
    rows = [*TIMED, row("jax", 1.25, host_us=12.5, error=2.5e-07)]
    assert read_csv(csv(rows), Row) == rows
    (tmp_path / "rows.csv").write_text("date,commit\n2026-01-02,0123456\n")
    with pytest.raises(ValueError, match="columns"):
        read_csv(tmp_path / "rows.csv", Row)


def test_the_table_has_the_mean_and_the_worst_point(csv, capsys):
    assert tables.main([str(csv(TIMED))]) == 0
    head, _, plain, gated, *_ = capsys.readouterr().out.splitlines()
    assert dict(zip(cells(head), cells(plain), strict=True)) == {
        "": "rms_norm forward",
        "× torch, float32": "4.00 (2.00 at 4096x4096)",
        "× torch, bfloat16": "–",
        "/ copy, float32": "1.00 (2.00)",
        "/ copy, bfloat16": "–",
        "/ ungated, float32": "–",
        "/ ungated, bfloat16": "–",
    }
    assert cells(gated)[2::2] == ["0.90 (0.90 at 4096x4096)", "10.00 (10.00)", "2.50 (5.00)"]


def test_the_screen_shows_geometric_means_and_worst_points():
    shown = screen.means(TIMED).splitlines()
    assert shown[1].split(maxsplit=3)[3] == (
        "× torch 4.00 (2.00 at 4096x4096); × copy 1.00 (0.50 at 4096x4096)"
    )
    assert shown[2].endswith("; × cunorm-ungated 0.40 (0.20 at 8x96)")
    assert screen.line(TIMED[:1]).endswith("float32 4096x4096: cunorm 100 µs 18.9 GB/s")
    assert screen.means([]) == "no point of cunorm's was timed"
    on_gpu = [replace(one, driver="13.0") for one in [*TIMED, row("jax", 50)]]
    assert screen.means(on_gpu).endswith("The times of jax include host time, other times do not.")
    assert "jax include host time" in tables.markdown(on_gpu)


def test_figures_of_peers_and_of_float16_count_points_of_a_mebibyte_or_more():
    assert "torch.compile" not in tables.markdown(TIMED)
    more = [*(row(*time, shape="8x96") for time in (("cunorm", 1), ("jax", 9), ("copy", 1)))]
    more += [row("jax", 50), row("jax", 400, shape="65536x256"), row("torch.compile", 300)]
    more.append(row("cunorm", 150, *GATED[:2], "float16"))
    _, table = tables.markdown([*TIMED, *more]).split("\n| | ")
    lines = {cells(line)[0]: cells(line)[1:] for line in table.splitlines()[2:]}
    assert cells(table.splitlines()[0])[:3] == [f"× {name}, float32" for name in PEERS]
    assert lines["rms_norm forward"] == ["4.00 (2.00)", "3.00 (3.00)", "1.41 (0.50)", *"–––"]
    assert lines["rms_norm+pre_gate backward"] == [*"–––", "0.90 (0.90)", *"––"]
    assert "float16 is 1.50 (1.50) of" in tables.markdown([*TIMED, *more]).replace("\n", " ")


OTHER = {"device": "Another CPU", "threads": 1, "versions": "cunorm 0.2.0", "commit": "def5678+"}


@pytest.mark.parametrize("name", OTHER)
def test_rows_that_cannot_be_compared_are_an_error(name, csv, capsys):
    for rows, named in (
        ([*TIMED, row("cunorm", 1, "layer_norm", **{name: OTHER[name]})], f"one {name}: ["),
        ([*TIMED, TIMED[0]], "two rows of cunorm at rms_norm"),
        ([], "no rows"),
    ):
        with pytest.raises(SystemExit):
            tables.main([str(csv(rows))])
        assert named in capsys.readouterr().err


PAGE = "before\n<!-- cpu-table: {} -->\nold\n<!-- end -->\nafter\n"


def test_a_page_is_rewritten_between_the_markers_and_then_stays(csv, tmp_path, capsys):
    csv(TIMED)
    path = tmp_path / "page.md"
    path.write_text(PAGE.format("cpu.csv"), encoding="utf-8")
    assert tables.main(["--page", str(path), "--check"]) == 1
    assert "-old" in capsys.readouterr().out
    assert path.read_text(encoding="utf-8") == PAGE.format("cpu.csv")
    assert tables.main(["--page", str(path)]) == 0
    text = path.read_text(encoding="utf-8")
    assert text == PAGE.format("cpu.csv").replace("old", tables.markdown(TIMED))
    assert tables.main(["--page", str(path), "--check"]) == 0
    path.write_text(text.replace("<!-- end -->", ""), encoding="utf-8")
    with pytest.raises(SystemExit):
        tables.main(["--page", str(path)])


@pytest.mark.parametrize(("page", "count"), [("performance", 4), ("accuracy", 1)])
def test_the_tables_of_a_page_match_the_committed_results(page, count):
    path = ROOT / "docs" / f"{page}.md"
    assert path.read_text(encoding="utf-8").count("-table: ../bench/results/") == count
    assert tables.main(["--page", str(path), "--check"]) == 0


def test_a_table_of_predictions_has_the_median_and_the_worst_call_of_default_plans():
    path = ROOT / "bench" / "results" / "static.csv"
    rows = [r for r in read_csv(path, static_rows.Row) if r.operator == "rms_norm"]
    chosen = [r for r in rows if (r.gpu, r.dtype, r.direction) == ("H200", "float32", "forward")]
    shares = {r.shape: float(r.call_prediction) for r in chosen if not r.count}
    rows = [replace(r, call_prediction="0.125") if r.shape == "512" else r for r in rows]
    table = static_tables.page(rows)
    column = cells(table.splitlines()[0]).index("H200")
    name = "| rms_norm forward float32 "
    line = next(line for line in table.splitlines() if line.startswith(name))
    median = statistics.median({**shares, "512": 0.125}.values())
    assert cells(line)[column] == f"{median:.2f} (0.12 at 512)"


def test_the_picture_of_the_readme_matches_the_committed_results(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    overview.main(["--out", str(tmp_path / "overview.svg")])
    pictures = (tmp_path / "overview.svg", ROOT / "docs" / "_static" / "overview.svg")
    drawn, committed = (re.findall(r"<text.*?</text>", p.read_text("utf-8")) for p in pictures)
    assert drawn == committed
    assert len(drawn) > 40


def rows_of_the_grid(
    torch: float, copy: float, ungated: float, dtypes: Sequence[str] = grid.DEFAULT_DTYPES
) -> list[Row]:
    """Return the default grid of a CPU with these times, and 100 µs for cunorm."""
    times = {"cunorm": 100.0, "torch": torch, "copy": copy, "cunorm-ungated": ungated}
    return [
        row(name, time, p.operator.name, p.direction, p.dtype, p.shape_text, p.operator.memory)
        for p in grid.default_points("cpu", grid.DEFAULT_OPERATORS, dtypes=dtypes)
        for name, time in times.items()
        if name != "cunorm-ungated" or p.operator.gate_position
    ]


GOOD = rows_of_the_grid(torch=1300, copy=90, ungated=60)
ALL_DTYPES = rows_of_the_grid(1000, 10, 10, (*grid.DEFAULT_DTYPES, "float16"))
AVX2 = [replace(r, versions="torch 2; SIMD cunorm AVX2, torch AVX2") for r in ALL_DTYPES]


def unmet(rows, time: float | None = None, **chosen: str) -> set[str]:
    """Return the goals that the rows miss if `time` is the time of torch in the chosen rows."""
    chosen = {"provider": "torch", **chosen}
    changed = [
        replace(r, p50_us=time)
        if time and all(getattr(r, name) == value for name, value in chosen.items())
        else r
        for r in rows
    ]
    return {goal.text for goal in goals.goals(changed) if not goal.met}


def test_goals_end_in_a_status_and_are_shown_with_their_figures(csv, capsys):
    assert tables.main([str(csv(GOOD)), "--goals"]) == 0
    assert tables.main([str(csv(rows_of_the_grid(300, copy=70, ungated=40))), "--goals"]) == 1
    lines = capsys.readouterr().out.splitlines()
    for line in (
        "| rms_norm backward, bfloat16: × torch, mean | ≥ 12 | 13.000 | yes |",
        "| rms_norm forward, float32: × torch, mean | ≥ 3 | 3.000 | yes |",
        "| gated norms forward and backward, float32: × torch, mean | ≥ 4 | 3.000 | no |",
        "| ungated norms backward, float32: time / copy, mean | ≤ 1.25 | 1.429 | no |",
        "| ungated norms backward, bfloat16: time / copy, mean | ≤ 2 | 1.429 | yes |",
        "| gated norms forward, float32: time / ungated, mean | ≤ 2 | 2.500 | no |",
    ):
        assert line in lines


def test_every_goal_depends_only_on_its_own_points():
    rms_rows = {"operator": "rms_norm", "direction": "backward", "dtype": "float32"}
    assert unmet(GOOD, 599, **rms_rows) == {"rms_norm backward, float32: × torch, mean"}
    assert unmet(GOOD, 600, **rms_rows) == set()
    assert unmet(GOOD, 199, operator="group_norm+silu", dtype="float32") == {
        "group_norm+silu forward and backward, float32: × torch, mean"
    }
    slow = {"operator": "layer_norm", "direction": "forward", "shape": "4096x4096"}
    assert unmet(GOOD, 96, **slow) == {"every point: × torch"}
    for shape, counts in (("512x512", True), ("511x512", False)):  # a mebibyte, then less
        more = [row("cunorm", 9, shape=shape), row("torch", 1, shape=shape)]
        assert bool(unmet([*GOOD, *more])) == counts


def test_timings_of_avx2_have_their_own_goals_with_float16():
    untimed = "points of the default grid that were not timed"
    half = "every point: float16's time / bfloat16's"
    assert unmet([r for r in AVX2 if r.dtype != "float16"]) == {half, untimed}
    correct = [r for r in AVX2 if (r.provider, r.dtype) != ("torch", "float16")]
    assert unmet(AVX2) == unmet(correct) == set()
    assert unmet(AVX2, 131, provider="cunorm", dtype="float16") == {half}
    of = {"operator": "layer_norm", "direction": "forward", "dtype": "bfloat16"}
    assert unmet(AVX2, 129, **of) == {"layer_norm forward, bfloat16: × torch, mean"}


def test_points_that_were_not_timed_miss_a_goal():
    for operator, provider in (("layer_norm", "copy"), ("l2_norm", "cunorm")):
        left = [r for r in GOOD if (r.operator, r.provider) != (operator, provider)]
        assert "points of the default grid that were not timed" in unmet(left)


def test_a_picture_has_every_panel_and_the_extra_is_named_if_matplotlib_is_missing(csv, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    svg = tmp_path / "cpu.svg"
    draw = f"from bench.report import plot; plot.main([{str(csv(TIMED))!r}, '--out', {str(svg)!r}])"
    run = partial(subprocess.run, cwd=ROOT, capture_output=True, text=True)
    ran = run([sys.executable, "-c", f"import sys; {draw}"])
    assert ran.returncode == 0, ran.stderr
    shown = svg.read_text(encoding="utf-8")
    assert all(f"{r.operator} {r.direction} {r.dtype}" in shown for r in TIMED)
    ran = run([sys.executable, "-c", f"import sys; sys.modules['matplotlib'] = None; {draw}"])
    assert ran.returncode == 1
    assert 'pip install "cunorm[bench]"' in ran.stderr
