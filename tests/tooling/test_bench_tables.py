# SPDX-License-Identifier: MIT
"""The tables and pictures of timings match their CSV."""

from __future__ import annotations

import math
import re
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from bench.plans import rows as static_rows
from bench.report import overview, plot, screen, static_tables, tables
from bench.report.records import read_csv, write_csv
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


def test_rows_that_cannot_be_compared_are_an_error(csv, capsys):
    other = {"device": "Another CPU", "threads": 1, "versions": "cunorm 0.2.0", "commit": "def5678"}
    wrong = {
        f"one {name}: [": [*TIMED, row("cunorm", 1, "layer_norm", **{name: value})]
        for name, value in other.items()
    }
    wrong |= {"two rows of cunorm at rms_norm": [*TIMED, TIMED[0]], "no rows": []}
    for named, rows in wrong.items():
        with pytest.raises(SystemExit):
            tables.main([str(csv(rows))])
        assert named in capsys.readouterr().err


PAGE = "before\n<!-- cpu-table: {} -->\nold\n<!-- end -->\nafter\n"


def test_a_page_is_rewritten_between_the_markers(csv, tmp_path):
    csv(TIMED)
    path = tmp_path / "page.md"
    path.write_text(PAGE.format("cpu.csv"), encoding="utf-8")
    assert tables.main(["--page", str(path)]) == 0
    text = path.read_text(encoding="utf-8")
    assert text == PAGE.format("cpu.csv").replace("old", tables.markdown(TIMED))
    path.write_text(text.replace("<!-- end -->", ""), encoding="utf-8")
    with pytest.raises(SystemExit):
        tables.main(["--page", str(path)])


@pytest.mark.parametrize(("page", "count"), [("performance", 5), ("accuracy", 1)])
def test_the_tables_of_a_page_match_the_committed_results(page, count):
    path = ROOT / "docs" / f"{page}.md"
    text = path.read_text(encoding="utf-8")
    assert text.count("-table: ../bench/results/") == count
    assert tables.rewritten(path) == text


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


def test_a_picture_has_every_panel(csv, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    svg = tmp_path / "cpu.svg"
    plot.main([str(csv(TIMED)), "--out", str(svg)])
    shown = svg.read_text(encoding="utf-8")
    assert all(f"{r.operator} {r.direction} {r.dtype}" in shown for r in TIMED)
    plot.main([str(csv(TIMED)), "--out", str(svg), "--dtype", "float32"])
    assert "bfloat16" not in svg.read_text(encoding="utf-8")
