# SPDX-License-Identifier: MIT
"""The project's files agree with each other."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import cunorm

ROOT = Path(__file__).parents[2]
FUNCTIONS = [name for name in cunorm.__all__ if inspect.isfunction(getattr(cunorm, name))]
PIN = re.compile(r"\b(ruff|mypy|clang-format)==([\w.]+)")


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_pre_commit_and_the_dev_extra_pin_the_same_versions():
    dev = set(PIN.findall(text("pyproject.toml")))
    assert {name for name, _ in dev} == {"ruff", "mypy", "clang-format"}
    assert set(PIN.findall(text(".pre-commit-config.yaml"))) == dev


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_argument_of_a_public_function_is_named_in_its_docstring(name):
    function = getattr(cunorm, name)
    section = inspect.getdoc(function).partition("\nParameters\n")[2].partition("\n\n")[0]
    lines = re.findall(r"^(\w[\w, ]*?) :", section, re.M)
    named = [argument for line in lines for argument in line.split(", ")]
    assert sorted(named) == sorted(inspect.signature(function).parameters)


def test_the_citation_has_the_version_of_the_package():
    assert f"\nversion: {cunorm.__version__}\n" in text("CITATION.cff")
