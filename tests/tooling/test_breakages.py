# SPDX-License-Identifier: MIT
"""The list of mistakes matches the source, and a mistake that no test sees is reported."""

from __future__ import annotations

import shlex
import subprocess

import pytest

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


def test_each_mistake_changes_a_text_that_occurs_once_and_its_tests_exist():
    for one in breakages.breakages():
        one.broken((breakages.ROOT / one.file).read_text("utf-8"))  # or raises ValueError
        files = [word.partition("::")[0] for word in shlex.split(one.tests) if "/" in word]
        assert files
        assert all((breakages.ROOT / file).exists() for file in files), one


@pytest.mark.parametrize(("only", "status", "seen"), [("two", 0, 1), ("true", 1, 0)])
def test_a_mistake_that_no_test_sees_ends_in_status_1(
    only, status, seen, tmp_path, monkeypatch, capsys
):
    files = {
        "thing.py": "def one():\n    return 1\n",
        "test_thing.py": "import thing\n\n\ndef test_one():\n    assert thing.one() == 1\n",
        "breakages.toml": AREA,
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    monkeypatch.setattr(breakages, "ROOT", tmp_path)
    monkeypatch.setattr(breakages, "LIST", tmp_path / "breakages.toml")
    assert breakages.main(["--only", only]) == status
    assert f"{seen} of 1 seen" in capsys.readouterr().out
