# SPDX-License-Identifier: MIT
"""`python -m tests.tooling.breakages`: each small mistake in the source makes some test fail.

`breakages.toml` lists the mistakes: a text that occurs once in a file, its replacement, and the
tests that must notice. Each mistake is made in a copy of the working tree, and the tests run there;
one of them must fail. That test runs again in the copy without the mistake, and must pass.
The exit status is 1 if some mistake makes no test fail.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.tooling.copies import FAILED, ROOT, TESTS_FAILED, Tree, last_line

try:
    import tomllib
except ImportError:  # Python 3.10; pytest depends on tomli there
    import tomli as tomllib

LIST = Path(__file__).with_name("breakages.toml")


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
    """The first test that failed with a breakage; if none did, `why_not` says how the run ended."""

    name: str
    seen_by: str
    seconds: float  # of CPU time
    why_not: str = ""

    def __str__(self) -> str:
        return (
            f"{self.name:60} {self.seconds:6.1f} s  {self.seen_by or 'NOT SEEN: ' + self.why_not}"
        )


def breakages() -> list[Breakage]:
    """Return the mistakes that breakages.toml lists."""
    areas = tomllib.loads(LIST.read_text("utf-8"))
    return [
        Breakage(name, area, one["file"], *one["change"], one["tests"])
        for area, named in areas.items()
        for name, one in named.items()
    ]


def main(argv: list[str] | None = None) -> int:
    """Run the selected breakages; return 1 if any breakage is not seen."""
    options = _arguments(argv)
    chosen = [one for one in breakages() if _is_chosen(one, options)]
    if not chosen:
        raise SystemExit("no breakage has that name or area")
    with tempfile.TemporaryDirectory(prefix="cunorm-breakages-") as folder:
        tree = Tree.made(Path(folder), root=ROOT)
        found = []
        for one in chosen:
            found.append(_outcome(one, tree))
            print(found[-1], flush=True)
        unbroken = tree.failures(sorted({one.seen_by for one in found} - {""}))
    for test in unbroken:
        print(f"fails without a breakage, too: {test}")
    unseen = [one for one in found if not one.seen_by or one.seen_by in unbroken]
    print(f"{len(found) - len(unseen)} of {len(found)} seen")
    return 1 if unseen else 0


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.tooling.breakages", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--only", default="", help="breakages whose names contain this")
    parser.add_argument("--area", help="breakages of an area")
    return parser.parse_args(argv)


def _is_chosen(one: Breakage, options: argparse.Namespace) -> bool:
    return options.only in one.name and options.area in (None, one.area)


def _outcome(one: Breakage, tree: Tree) -> Outcome:
    """Break the copy, run the tests up to the first failure, and restore the copy."""
    start = _cpu_seconds()
    with tree.changed(one.file, one.broken((tree.path / one.file).read_text("utf-8"))):
        ran = tree.pytest(["-x", *shlex.split(one.tests)])
    seconds = _cpu_seconds() - start
    failed = FAILED.search(ran.stdout)
    if ran.returncode == TESTS_FAILED and failed:
        return Outcome(one.name, failed[1], seconds)
    return Outcome(one.name, "", seconds, f"status {ran.returncode}: {last_line(ran)}")


def _cpu_seconds() -> float:
    """Return the CPU seconds of finished child processes."""
    times = os.times()
    return times.children_user + times.children_system


if __name__ == "__main__":
    sys.exit(main())
