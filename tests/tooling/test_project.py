# SPDX-License-Identifier: MIT
"""The project's files agree with each other, and its modules form layers."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import cunorm
from tests.support.processes import ROOT, python

FUNCTIONS = [name for name in cunorm.__all__ if inspect.isfunction(getattr(cunorm, name))]
PIN = re.compile(r"\b(ruff|mypy|clang-format)==([\w.]+)")


def test_pre_commit_and_the_dev_extra_pin_the_same_versions():
    dev, hooks = (
        set(PIN.findall((ROOT / name).read_text("utf-8")))
        for name in ("pyproject.toml", ".pre-commit-config.yaml")
    )
    assert {name for name, _ in dev} == {"ruff", "mypy", "clang-format"}
    assert hooks == dev


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_argument_of_a_public_function_is_named_in_its_docstring(name):
    function = getattr(cunorm, name)
    section = inspect.getdoc(function).partition("\nParameters\n")[2].partition("\n\n")[0]
    lines = re.findall(r"^(\w[\w, ]*?) :", section, re.M)
    named = [argument for line in lines for argument in line.split(", ")]
    assert sorted(named) == sorted(inspect.signature(function).parameters)


def test_the_citation_has_the_version_of_the_package():
    assert f"\nversion: {cunorm.__version__}\n" in (ROOT / "CITATION.cff").read_text("utf-8")


def test_imports_point_down_and_form_no_cycle():
    """pyproject.toml has the layers."""
    pytest.importorskip("importlinter", reason="import-linter is not installed")
    check = "from importlinter.cli import lint_imports_command as c; c(['--no-cache', '--no-logo'])"
    done = python("-c", check)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_tests_of_tools_are_found_without_pytorch_and_jax():
    script = """
import sys
sys.modules.update(torch=None, jax=None)
import pytest
sys.exit(pytest.main(["--collect-only", "-q", "tests/tooling"]))
"""
    done = python("-c", script)
    assert done.returncode == 0, done.stdout + done.stderr


def test_few_modules_are_directly_in_the_package():
    assert len([*Path(cunorm.__file__).parent.glob("*.py")]) <= 8
