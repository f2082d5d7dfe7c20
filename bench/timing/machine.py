# SPDX-License-Identifier: MIT
"""The environment of a measurement: date, commit, device and versions."""

from __future__ import annotations

import datetime
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

import cunorm
from bench.timing.providers import Provider
from bench.timing.rows import Environment


def environment(device: Any, providers: Sequence[Provider]) -> Environment:
    """Return the environment: the device and the software."""
    versions = {"cunorm": cunorm.__version__, "numpy": np.__version__} | device.versions()
    for provider in providers:
        if provider.distribution:
            versions[provider.distribution] = _version(provider.distribution)
    if device.kind == "cpu":
        from bench.timing import simd  # it imports torch

        versions["SIMD"] = simd.used(provider.name for provider in providers)
    return Environment(
        date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        commit=commit_of(Path(__file__).parents[1]),
        device=device.name,
        driver=device.driver,
        versions="; ".join(f"{name} {version}" for name, version in versions.items() if version),
        threads=device.threads,
    )


def commit_of(folder: Path) -> str:
    """Return the commit of a folder's source tree, with a plus if tracked files have changed."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        return ran.stdout.strip() if ran.returncode == 0 else ""

    try:
        found = git("rev-parse", "--short=10", "HEAD")
        changed = found and git("status", "--porcelain", "-uno")
    except FileNotFoundError:  # git is not installed
        return "unknown"
    return found + "+" if changed else found or "unknown"


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:  # not installed as a distribution
        return "unknown"
