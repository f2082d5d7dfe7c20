# SPDX-License-Identifier: MIT
"""The README's examples run unchanged, and the files that it names exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import cunorm

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```", README, re.S | re.M)
PRINTED = re.compile(r"^print\(.*\)  # (.+)$", re.M)


@pytest.mark.parametrize("code", EXAMPLES, ids=lambda code: code.split("\n\n")[0].split()[1])
def test_an_example_prints_what_it_says(code, capsys):
    for module in re.findall(r"^import (torch|ml_dtypes|jax)\b", code, re.M):
        pytest.importorskip(module, reason=f"{module} is not installed")
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out.splitlines() == PRINTED.findall(code) != []


def test_every_public_function_is_named():
    functions = {name for name in cunorm.__all__ if not isinstance(getattr(cunorm, name), type)}
    assert {name for name in functions if name not in README} == set()


def test_every_file_linked_or_listed_is_there():
    root = Path(__file__).parents[2]
    places = re.findall(r"\]\((\w+\.md)\)", README) + re.findall(
        r"^\| `([\w/]+/)` \|", README, re.M
    )
    assert len(places) > 4
    assert [place for place in places if not (root / place).exists()] == []
