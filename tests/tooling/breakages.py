# SPDX-License-Identifier: MIT
"""`python -m tests.tooling.breakages`: each small mistake in the source makes some test fail.

`breakages.toml` lists the mistakes: a text that occurs once in a file, its replacement, and the
tests that must notice. Each mistake is made in a copy of the working tree, and the tests run there;
one of them must fail. The failed test runs again in the copy without the mistake, and must pass.
The exit status is 1 if a mistake is not seen.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

try:
    import tomllib
except ImportError:  # Python 3.10; pytest depends on tomli there
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("breakages.toml")
CACHES = ("CUNORM_CACHE_DIR",)  # of compiled kernels
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=line", "-rf")
_FAILED = re.compile(r"^FAILED (.*?)(?: - .*)?$", re.MULTILINE)
_TESTS_FAILED = 1  # pytest's exit status of failed tests; collection errors have another
_MOST_SECONDS = 900


@dataclass(frozen=True)
class Breakage:
    """A mistake, and the arguments of pytest for the tests that must see it."""

    name: str
    area: str
    file: str
    find: str
    replace: str
    tests: str

    def broken(self, text: str) -> str:
        """Return the file's text with the mistake."""
        if text.count(self.find) != 1:
            raise ValueError(f"{self.name}: {self.file} has {self.find!r} {text.count(self.find)}×")
        return text.replace(self.find, self.replace)


@dataclass(frozen=True)
class Outcome:
    """The result of a breakage's tests: the test that failed."""

    name: str
    seen_by: str
    seconds: float  # of all cores
    why_not: str = ""

    def __str__(self) -> str:
        return (
            f"{self.name:60} {self.seconds:6.1f} s  {self.seen_by or 'NOT SEEN: ' + self.why_not}"
        )


def breakages() -> list[Breakage]:
    """Return the list."""
    areas = tomllib.loads(LIST.read_text("utf-8"))
    return [
        Breakage(name, area, one["file"], *one["change"], one["tests"])
        for area, named in areas.items()
        for name, one in named.items()
    ]


def main(argv: list[str] | None = None) -> int:
    """Run the selected breakages; return 1 if one is not seen."""
    options = _arguments(argv)
    chosen = [one for one in breakages() if _is_chosen(one, options)]
    if not chosen:
        raise SystemExit("no breakage is of that name or area")
    with tempfile.TemporaryDirectory(prefix="cunorm-breakages-") as folder:
        copy = Path(folder, "tree")
        _copy_tree(copy)
        environment = _environment(copy, Path(folder))
        found = []
        for one in chosen:
            found.append(_outcome(one, copy, environment))
            print(found[-1], flush=True)
        unbroken = _failures(copy, environment, sorted({one.seen_by for one in found} - {""}))
    for test in unbroken:
        print(f"fails without a breakage, too: {test}")
    unseen = [one for one in found if not one.seen_by or one.seen_by in unbroken]
    print(f"{len(found) - len(unseen)} of {len(found)} seen")
    return 1 if unseen else 0


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.tooling.breakages", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--only", default="", help="those whose names have this in them")
    parser.add_argument("--area", help="those of an area")
    return parser.parse_args(argv)


def _is_chosen(one: Breakage, options: argparse.Namespace) -> bool:
    return options.only in one.name and options.area in (None, one.area)


def _copy_tree(copy: Path) -> None:
    """Copy the files that git tracks or does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        **{"cwd": ROOT, "capture_output": True, "text": True, "check": True},
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)


def _environment(copy: Path, folder: Path) -> dict[str, str]:
    """Return the environment of the tests: caches depend only on the copy's sources."""
    caches = {name: os.environ.get(name) or str(folder / name) for name in CACHES}
    # No .pyc: a file that changes within a second may keep a stale one.
    more = {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "300"}
    return {**os.environ, **caches, **more}


def _outcome(one: Breakage, copy: Path, environment: dict[str, str]) -> Outcome:
    """Break the copy, run the tests up to the first failure, and restore the copy."""
    start = _cpu_seconds()
    with _broken(one, copy / one.file):
        ran = _pytest(["-x", *shlex.split(one.tests)], copy, environment)
    seconds = _cpu_seconds() - start
    failed = _FAILED.search(ran.stdout)
    if ran.returncode == _TESTS_FAILED and failed:
        return Outcome(one.name, failed[1], seconds)
    lines = [line for line in (ran.stdout + ran.stderr).splitlines() if line.strip()]
    why_not = f"status {ran.returncode}: {lines[-1] if lines else 'no output'}"
    return Outcome(one.name, "", seconds, why_not)


@contextmanager
def _broken(one: Breakage, path: Path) -> Iterator[None]:
    text = path.read_text("utf-8")
    path.write_text(one.broken(text), "utf-8")
    try:
        yield
    finally:
        path.write_text(text, "utf-8")


def _cpu_seconds() -> float:
    """Return the CPU seconds of finished child processes."""
    times = os.times()
    return times.children_user + times.children_system


def _failures(copy: Path, environment: dict[str, str], tests: list[str]) -> list[str]:
    """Return the tests that fail in a copy without a mistake."""
    if not tests:
        return []
    ran = _pytest(tests, copy, environment)
    failed = [found[1] for found in _FAILED.finditer(ran.stdout)]
    if ran.returncode not in (0, _TESTS_FAILED) or bool(ran.returncode) != bool(failed):
        raise SystemExit(f"pytest ends with {ran.returncode}:\n{ran.stdout}{ran.stderr}")
    return failed


def _pytest(
    arguments: list[str], copy: Path, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *PYTEST, *arguments]
    started = {"cwd": copy, "env": environment, "capture_output": True, "text": True}
    try:
        return subprocess.run(command, **started, timeout=_MOST_SECONDS)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, -1, "", f"not done in {_MOST_SECONDS} s")


if __name__ == "__main__":
    sys.exit(main())
