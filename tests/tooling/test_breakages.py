# SPDX-License-Identifier: MIT
"""The list of mistakes is one of the source as it is, and one that nothing sees is reported."""

from __future__ import annotations

import subprocess

from tests.tooling import breakages

AREA = """
[thing."one is two"]
file = "thing.py"
change = ["return 1", "return 2"]
tests = "test_thing.py"
[thing."one is true"]
file = "thing.py"
change = ["return 1", "return True"]
tests = "test_thing.py"
"""


def test_what_is_broken_stands_once_in_its_file():
    for one in breakages.breakages():
        one.broken((breakages.ROOT / one.file).read_text("utf-8"))  # else a ValueError


def test_a_mistake_that_no_test_sees_ends_in_status_1(tmp_path, monkeypatch, capsys):
    (tmp_path / "thing.py").write_text("def one():\n    return 1\n")
    (tmp_path / "test_thing.py").write_text(
        "import thing\n\n\ndef test_one():\n    assert thing.one() == 1\n"
    )
    (tmp_path / "breakages.toml").write_text(AREA)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    monkeypatch.setattr(breakages, "ROOT", tmp_path)
    monkeypatch.setattr(breakages, "LIST", tmp_path / "breakages.toml")
    assert breakages.main([]) == 1
    said = capsys.readouterr().out
    assert "1 of 2 seen" in said
    assert "one is true" in next(line for line in said.splitlines() if "NOT SEEN" in line)
