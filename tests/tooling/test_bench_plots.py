# SPDX-License-Identifier: MIT
"""The picture of timings shows what the CSV has, legibly, and is a small file that repeats."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from bench import plot
from bench.rows import write_csv
from tests.support.bench_rows import row, rows_of_a_run

pytest.importorskip("matplotlib", reason="matplotlib is not installed")
SVG = "{http://www.w3.org/2000/svg}"
ROWS = rows_of_a_run(torch=300, copy=90, ungated=60)


def drawn(tmp_path: Path, rows, *options: str) -> str:
    path, svg = tmp_path / "cpu.csv", tmp_path / "cpu.svg"
    write_csv(path, rows)
    assert plot.main([str(path), "--out", str(svg), *options]) == 0
    return svg.read_text(encoding="utf-8")


def texts(svg: str) -> list[str]:
    return [element.text for element in ET.fromstring(svg).iter(f"{SVG}text")]


def figure_of(*rows):
    return plot._figure(rows)


def points(line) -> list[tuple[float, float]]:
    return list(zip(line.get_xdata(), line.get_ydata(), strict=True))


def test_every_operator_direction_and_dtype_is_a_panel(tmp_path):
    shown = texts(drawn(tmp_path, ROWS))
    titles = {f"{r.operator} {r.memory}".rstrip() + f" {r.direction} {r.dtype}" for r in ROWS}
    assert len(titles) == 4 * 4 + 2 * 4
    assert titles <= set(shown)
    for provider in ("cunorm", "torch", "copy"):
        assert shown.count(provider) == len(titles)
    assert "cunorm-ungated" not in shown


def test_a_line_goes_through_the_geometric_means_of_each_size():
    figure = figure_of(
        row("torch", 1.0, shape="512x512", gb_per_s=4.0),
        row("torch", 1.0, shape="1024x512", gb_per_s=3.0),
        row("torch", 1.0, shape="512x1024", gb_per_s=12.0),
    )
    (panel,) = figure.axes
    spans, means = panel.get_lines()
    assert points(means) == [(2**20, 4.0), (2**21, pytest.approx(6.0))]
    assert points(spans)[:2] == [(2**21, 3.0), (2**21, 12.0)]
    assert panel.get_xscale() == "log"
    assert panel.get_ylim()[0] == 0


def test_the_same_rows_give_the_same_bytes_whatever_the_users_settings(tmp_path, monkeypatch):
    import matplotlib

    first = drawn(tmp_path, ROWS[:60])
    assert "date>" not in first
    monkeypatch.setitem(matplotlib.rcParams, "axes.linewidth", 9.0)
    monkeypatch.setitem(matplotlib.rcParams, "font.size", 20.0)
    assert drawn(tmp_path, ROWS[:60]) == first
    assert matplotlib.rcParams["font.size"] == 20.0


def test_drawing_leaves_pyplot_alone_and_without_matplotlib_names_the_extra(tmp_path):
    csv, svg = tmp_path / "cpu.csv", tmp_path / "cpu.svg"
    write_csv(csv, [row("cunorm", 1.0)])
    draw = f"from bench import plot; plot.main([{str(csv)!r}, '--out', {str(svg)!r}])"
    for code, status, message in (
        (f"import sys; {draw}; assert 'matplotlib.pyplot' not in sys.modules", 0, ""),
        (f"import sys; sys.modules['matplotlib'] = None; {draw}", 1, 'pip install "cunorm[bench]"'),
    ):
        root = Path(__file__).parents[2]
        ran = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
        assert ran.returncode == status, ran.stderr
        assert message in ran.stderr
