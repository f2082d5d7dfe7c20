# SPDX-License-Identifier: MIT
"""The pages on kernels quote the current sources and show the current plans."""

import re
import runpy
from pathlib import Path

import pytest

from tests.support.gpus import limits_of
from tests.support.internals import (
    FLOAT32,
    BackwardTypes,
    ForwardTypes,
    RowShape,
    cuda_backward,
    cuda_forward,
)

DOCS = Path(__file__).parents[2] / "docs"
SOURCES = sorted((DOCS.parent / "kernels_cu").iterdir())
PAGES = sorted((DOCS / "kernels").glob("*.md"))
QUOTED = re.compile(r"^```cpp\n(.*?)^```$", re.S | re.M)
TEAMS = re.compile(r"^\| (\d+) \| (.+) \| (\d+) \| (.+) \| (\d+) \|$", re.M)


def unindented(text: str) -> str:
    return "\n".join(line.strip() for line in text.strip().splitlines())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_quoted_code_is_in_a_source(page):
    sources = [unindented(path.read_text("utf-8")) for path in SOURCES]
    quotes = [unindented(quote) for quote in QUOTED.findall(page.read_text("utf-8"))]
    assert quotes
    assert [quote for quote in quotes if not any(quote in source for source in sources)] == []


def test_the_drawings_are_those_of_the_script():
    drawn = runpy.run_path(str(DOCS / "drawings.py"))["files"]()
    there = {path.name: path.read_text("utf-8") for path in (DOCS / "_static/drawings").iterdir()}
    assert drawn == there, "run python docs/drawings.py, which writes the drawings"


def team_of(launch) -> tuple[str, str]:
    """Return the team of a launch's rows in words, and how many packs each thread has."""
    macros = dict(launch.build.macros)
    threads, row = int(macros["THREADS"]), int(macros["THREADS_PER_ROW"])
    text = f"{row} lanes" if row <= 32 else f"a block of {threads}"
    if row > threads:
        text = f"{row // threads} blocks of {threads}"
    is_streamed = int(macros["WIDTH"]) > row * int(macros["PACK"]) * int(macros["PACKS"])
    return text + (", streamed" if is_streamed else ""), macros["PACKS"]


def test_the_table_of_teams_shows_the_planned_teams():
    forward = dict.fromkeys(("compute", "x", "y", "weight"), FLOAT32)
    backward = dict.fromkeys(("compute", "dy", "x", "dx", "weight"), FLOAT32)
    table = TEAMS.findall((DOCS / "kernels/row-norms.md").read_text("utf-8"))
    assert len(table) == 9
    for width, *teams in table:
        rows = RowShape(16384, int(width))
        launches = (
            cuda_forward(ForwardTypes(**forward), rows, 4, limits_of("90")),
            cuda_backward(BackwardTypes(**backward, dweight=True), rows, 4, limits_of("90")),
        )
        assert teams == [cell for launch in launches for cell in team_of(launch)], width
