# SPDX-License-Identifier: MIT
"""The tables of timings say what the CSV says, on the screen and in the README."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from bench import tables
from tests.support.bench_rows import row, written

ROOT = Path(__file__).parents[2]
# × torch 2 and 8, geometric mean 4; over a copy 2 and 0.5, mean 1; over the ungated 1.25 and 5.
KNOWN = [
    *(row(name, time) for name, time in (("cunorm", 100), ("torch", 200), ("copy", 50))),
    *(
        row(name, time, shape="65536x256")
        for name, time in (("copy", 200), ("torch", 800), ("cunorm", 100))
    ),
    *(
        row(name, time, "rms_norm+pre_gate", "backward", "bfloat16", shape)
        for shape, ungated in (("4096x4096", 80), ("8x96", 20))
        for name, time in (
            ("cunorm", 100),
            ("torch", 90),
            ("copy", 10),
            ("cunorm-ungated", ungated),
        )
    ),
]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.fixture
def csv(tmp_path):
    return partial(written, tmp_path / "cpu.csv")


def test_means_and_worst_points_are_those_of_the_points(csv, capsys):
    assert tables.main([str(csv(KNOWN))]) == 0
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
    assert cells(gated) == [
        "rms_norm+pre_gate backward",
        "–",
        "0.90 (0.90 at 4096x4096)",
        "–",
        "10.00 (10.00)",
        "–",
        "2.50 (5.00)",
    ]


def test_another_peer_is_compared_at_the_points_it_has(csv, capsys):
    path = csv([*KNOWN, row("liger", 300)])
    assert tables.main([str(path), "--peer", "liger"]) == 0
    head, _, plain, *_ = capsys.readouterr().out.splitlines()
    assert cells(head)[1] == "× liger, float32"
    assert cells(plain)[1] == "3.00 (3.00 at 4096x4096)"
    with pytest.raises(SystemExit):
        tables.main([str(path), "--peer", "quack"])
    message = capsys.readouterr().err
    assert "quack" in message
    assert "liger" in message


def test_a_point_without_cunorm_is_named():
    text = tables.markdown([*KNOWN, row("torch", 1, "layer_norm", shape="3x5")])
    assert " ".join(text.split()).endswith("Without cunorm: layer_norm forward float32 3x5.")


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ([], "no rows"),
        ([*KNOWN, KNOWN[0]], "two rows of cunorm at rms_norm"),
        *(
            (
                [*KNOWN, row("cunorm", 1, "layer_norm", **{name: other})],
                f"more than one {name}: [{getattr(KNOWN[0], name)!r}, {other!r}]",
            )
            for name, other in (
                ("device", "Another CPU"),
                ("driver", "13.0"),
                ("threads", 1),
                ("versions", "cunorm 0.2.0"),
                ("commit", "def5678+"),
            )
        ),
    ],
)
def test_rows_that_cannot_be_compared_are_an_error(rows, named, csv, capsys):
    with pytest.raises(SystemExit):
        tables.main([str(csv(rows))])
    assert named in capsys.readouterr().err


README = "before\n<!-- cpu-table: {} -->\nold\n<!-- end -->\nafter\n"


def test_a_readme_is_rewritten_between_the_markers_and_then_stays(csv, tmp_path, capsys):
    csv(KNOWN)
    path = tmp_path / "README.md"
    path.write_text(README.format("cpu.csv"), encoding="utf-8")
    assert tables.main(["--readme", str(path), "--check"]) == 1
    assert "-old" in capsys.readouterr().out
    assert path.read_text(encoding="utf-8") == README.format("cpu.csv")
    assert tables.main(["--readme", str(path)]) == 0
    text = path.read_text(encoding="utf-8")
    assert text == README.format("cpu.csv").replace("old", tables.markdown(KNOWN))
    assert tables.main(["--readme", str(path), "--check"]) == 0
    assert tables.main(["--readme", str(path)]) == 0
    assert path.read_text(encoding="utf-8") == text


@pytest.mark.parametrize("text", ["no markers", "<!-- cpu-table: cpu.csv -->\nno end"])
def test_a_readme_without_both_markers_is_an_error(text, csv, tmp_path, capsys):
    csv(KNOWN)
    path = tmp_path / "README.md"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SystemExit):
        tables.main(["--readme", str(path)])
    assert "<!-- end -->" in capsys.readouterr().err
    assert path.read_text(encoding="utf-8") == text


def test_the_readme_is_what_the_committed_timings_give():
    readme = ROOT / "README.md"
    if "<!-- cpu-table:" not in readme.read_text(encoding="utf-8"):
        pytest.skip("the README has no table that is drawn from timings yet")
    assert tables.main(["--readme", str(readme), "--check"]) == 0
