# SPDX-License-Identifier: MIT
"""`python -m tests.tooling.mutants`: changing a token of a kernel makes some test fail.

Mutants of all kernels and headers are drawn, at least two of each file and more of long files. Each
mutant is made in a copy of the working tree. There the tests that `mutants.toml` lists for that
file run up to the first failure. The tests that are most likely to fail run first. A mutant that
does not compile is replaced by the next mutant of its file. The exit status is 1 if a mutant
survives and `mutants.toml` does not say why no test can see it. A seed draws the same mutants of
the same text, and nearly the same mutants of a changed text.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shlex
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

try:
    import tomllib
except ImportError:  # Python 3.10; pytest depends on tomli there
    import tomli as tomllib

from tests.tooling.copies import FAILED, ROOT, Ran, Tree, last_line
from tests.tooling.mutations import Mutant, Skip, mutants

LIST = Path(__file__).with_name("mutants.toml")
FOLDERS = ("kernels_cu", "cunorm/_backends/cpu/include/host")
MIN_MUTANTS = 2  # of each file
MAX_SECONDS = 1800
# A test that hangs ends the run; each other test takes a minute at most.
HANGS = ("-o", "faulthandler_timeout=150", "-o", "faulthandler_exit_on_timeout=true")
KILLED, SURVIVED, EQUIVALENT, INVALID = "killed", "survived", "equivalent", "does not compile"
_COUNTED = (KILLED, EQUIVALENT, SURVIVED)
# Messages of the CPU's compiler and of NVRTC for a text that does not compile.
_INVALID = re.compile(r"compiler does not compile|NVRTC does not compile|CompileException")
_TEST = re.compile(r'File ".*?(tests/[\w/]+\.py)", line \d+ in (test_\w+)')


class Settings(NamedTuple):
    """The contents of mutants.toml."""

    skips: list[Skip]
    equivalents: dict[tuple[str, str], str]  # file and change: why
    first_tests: dict[str, list[str]]  # by file, or by folder for all other files
    last_tests: dict[str, list[str]]  # by the beginning of a file's path

    def tests_of(self, file: str) -> list[str]:
        """Return the arguments of the runs of pytest."""
        first = self.first_tests.get(file) or self.first_tests[file.rpartition("/")[0]]
        last = [its for begin, its in self.last_tests.items() if file.startswith(begin)]
        return [*first, *(last[0] if last else ())]


class Outcome(NamedTuple):
    """The outcome of a mutant, and the test that failed."""

    mutant: Mutant
    status: str
    by: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.status:8} {self.seconds:4.0f} s  {self.mutant}  {self.by}"


def settings() -> Settings:
    """Read mutants.toml."""
    read = tomllib.loads(LIST.read_text("utf-8"))
    skips = [Skip(**one) for one in read["skip"]]
    equivalents = {
        (one["file"], change): one["why"]
        for one in read.get("equivalent", ())
        for change in one["changes"]
    }
    return Settings(skips, equivalents, read["first_tests"], read["last_tests"])


def files() -> list[str]:
    """Return the names of the files that have mutants."""
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).iterdir())]
    return [path.relative_to(ROOT).as_posix() for path in paths if path.is_file()]


def all_mutants(skips: list[Skip]) -> dict[str, list[Mutant]]:
    """Return the mutants of each file that has some."""
    found = {name: mutants(name, (ROOT / name).read_text("utf-8"), skips) for name in files()}
    return {name: some for name, some in found.items() if some}


def shares(sizes: dict[str, int], count: int) -> dict[str, int]:
    """Return how many mutants to draw from each file, about in proportion to how many it has."""
    least = {name: min(MIN_MUTANTS, size) for name, size in sizes.items()}
    rest = max(0, count - sum(least.values()))
    left = {name: size - least[name] for name, size in sizes.items()}
    total, given, seen = sum(left.values()), 0, 0
    for name, size in left.items():
        seen += size
        more = min(size, rest * seen // max(1, total) - given)
        least[name] += more
        given += more
    return least


def main(argv: list[str] | None = None) -> int:
    """Draw mutants and run their tests; return 1 if a mutant that is not equivalent survives."""
    options, known = _arguments(argv), settings()
    if options.quick:
        known = known._replace(last_tests={})
    drawn = {
        name: sorted(chosen, key=partial(_sort_key, options.seed))
        for name, some in all_mutants(known.skips).items()
        if (chosen := [one for one in some if options.only in str(one)])
    }
    if not drawn:
        raise SystemExit("no mutant has that in its file, line and change")
    if options.list:
        for one in (one for some in drawn.values() for one in some):
            print(one)
        return 0
    found = _run(drawn, options, known)
    _print_totals(found)
    return 1 if any(one.status == SURVIVED for one in found) else 0


def _sort_key(seed: str, mutant: Mutant) -> bytes:
    """Return the sort key of a mutant, which does not depend on other mutants."""
    return hashlib.sha256(f"{seed} {mutant.file} {mutant.change}".encode()).digest()


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.tooling.mutants", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--count", type=int, default=110, help="how many mutants are drawn")
    parser.add_argument("--seed", default="1", help="another seed draws other mutants")
    parser.add_argument("--jobs", type=int, default=1, help="how many run at the same time")
    parser.add_argument("--only", default="", help="mutants with this text in file:line: change")
    parser.add_argument("--quick", action="store_true", help="leave out the last tests")
    parser.add_argument("--list", action="store_true", help="print all in order, run none")
    return parser.parse_args(argv)


def _run(
    drawn: dict[str, list[Mutant]], options: argparse.Namespace, known: Settings
) -> list[Outcome]:
    """Run the tests of the drawn mutants, several in parallel, each in its own copy."""
    from tests.tooling.regions import compiled_lines, macros_here

    machines = macros_here()
    lines = {name: compiled_lines((ROOT / name).read_text("utf-8"), machines) for name in drawn}
    here = {name: [one for one in some if one.line in lines[name]] for name, some in drawn.items()}
    count = shares({name: len(some) for name, some in here.items()}, options.count)
    trees: SimpleQueue[Tree] = SimpleQueue()

    def next_outcome(candidates: Iterator[Mutant]) -> Outcome | None:
        tree = trees.get()
        try:
            for mutant in candidates:
                found = outcome(mutant, tree, known)
                print(found, flush=True)
                if found.status != INVALID:
                    return found
        finally:
            trees.put(tree)
        return None

    with (
        tempfile.TemporaryDirectory(prefix="cunorm-mutants-") as folder,
        ThreadPoolExecutor(options.jobs) as pool,
    ):
        for number in range(options.jobs):
            trees.put(Tree.made(Path(folder), f"tree{number}", ROOT))
        queues = {name: Shared(iter(some)) for name, some in here.items()}
        taken = [queues[name] for name in here for _ in range(count[name])]
        return [one for one in pool.map(next_outcome, taken) if one]


class Shared:
    """An iterator that several threads take from."""

    def __init__(self, items: Iterator[Any]) -> None:
        self._queue: SimpleQueue[Any] = SimpleQueue()
        for item in items:
            self._queue.put(item)

    def __iter__(self) -> Iterator[Any]:
        while not self._queue.empty():
            yield self._queue.get()


def outcome(mutant: Mutant, tree: Tree, known: Settings) -> Outcome:
    """Make a mutant in the copy, and run the first and last tests of its file up to a failure."""
    begin = time.monotonic()

    def made(status: str, by: str) -> Outcome:
        return Outcome(mutant, status, by, time.monotonic() - begin)

    if why := known.equivalents.get((mutant.file, mutant.change)):
        return made(EQUIVALENT, why)
    text = (tree.path / mutant.file).read_text("utf-8")
    with tree.changed(mutant.file, mutant.applied(text)):
        for tests in known.tests_of(mutant.file):
            ran = tree.pytest(["-x", *HANGS, *shlex.split(tests)], MAX_SECONDS)
            if ran.returncode != 0:
                return made(*verdict(ran))
    return made(SURVIVED, "")


def verdict(ran: Ran) -> tuple[str, str]:
    """Return the status of a run that did not pass, and which test failed, hung or crashed."""
    if _INVALID.search(ran.stdout + ran.stderr):
        return INVALID, ""
    if failed := FAILED.search(ran.stdout):
        return KILLED, failed[1]
    if stopped := _TEST.search(ran.stderr):
        what = "does not end" if "Timeout" in ran.stderr else "crashes"
        return KILLED, f"{stopped[1]}::{stopped[2]} {what}"
    return KILLED, f"status {ran.returncode}: {last_line(ran)}"


def _print_totals(found: list[Outcome]) -> None:
    """Print how many mutants of each file, and of all, were killed, equivalent or survived."""
    counts = Counter((one.mutant.file, one.status) for one in found)
    names = sorted({one.mutant.file for one in found})
    for name in (*names, "all"):
        some = names if name == "all" else [name]
        total = {status: sum(counts[one, status] for one in some) for status in _COUNTED}
        print(f"{name:50}", *(f"{number:4} {status}" for status, number in total.items()))


if __name__ == "__main__":
    sys.exit(main())
