# SPDX-License-Identifier: MIT
"""`python -m tests.tooling.mutants`: each small mistake in the source makes some test fail.

A mistake is another token, or a condition, an argument or a statement less, in a kernel, a header
or a Python file of `cunorm/`. It is made in a copy of the working tree. There the tests that
`mutants.toml` lists for that file run up to the first failure; those that are most likely to fail
run first. A mutant that does not compile is replaced by another. The exit status is 1 if a mutant
survives and `mutants.toml` does not say why no test can see it. A seed draws the same mutants of
the same text, and nearly the same mutants of a changed text.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

try:
    import tomllib
except ImportError:  # Python 3.10; pytest depends on tomli there
    import tomli as tomllib

from tests.tooling.copies import FAILED, ROOT, Ran, Tree, last_line
from tests.tooling.mutations import CPP_RULES, Mutant, mutants

FOLDERS = ("kernels_cu", "cunorm")
SUFFIXES = (".cu", ".cuh", ".h", ".py")
RULES = (*CPP_RULES, "argument")
MAX_SECONDS = 1800
# A test that hangs ends the run; each other test takes a minute at most.
HANGS = ("-o", "faulthandler_timeout=150", "-o", "faulthandler_exit_on_timeout=true")
KILLED, SURVIVED, EQUIVALENT, INVALID = "killed", "survived", "equivalent", "does not compile"
# Messages of the CPU's compiler and of NVRTC for a text that does not compile.
_INVALID = re.compile(r"compiler does not compile|NVRTC does not compile|CompileException")
_TEST = re.compile(r'File ".*?(tests/[\w/]+\.py)", line \d+ in (test_\w+)')


def settings() -> dict[str, Any]:
    """Read mutants.toml."""
    return tomllib.loads(Path(__file__).with_name("mutants.toml").read_text("utf-8"))


def tests_of(file: str, known: dict[str, Any], *, quick: bool = False) -> list[str]:
    """Return the arguments of the runs of pytest: those of the longest beginnings of the path."""
    runs = []
    for tests in (known["first_tests"], *([] if quick else [known["last_tests"]])):
        runs += tests[max(filter(file.startswith, tests), key=len)]
    return runs


def files() -> list[str]:
    """Return the names of the files that have mutants."""
    paths = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.*"))
    return [path.relative_to(ROOT).as_posix() for path in paths if path.suffix in SUFFIXES]


def macros_here() -> set[str]:
    """Return the compiler's own macros for this machine."""
    command = ["c++", "-march=native", "-dM", "-E", "-x", "c++", "/dev/null"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"^#define (\w+)", text, re.MULTILINE))


def drawn(options: argparse.Namespace, known: dict[str, Any]) -> list[Mutant]:
    """Return the chosen mutants, in an order that depends on the seed and on each mutant alone."""
    macros = macros_here()
    found = [
        one
        for name in files()
        if name.startswith(options.area)
        for one in mutants(name, (ROOT / name).read_text("utf-8"), known["skip"], macros)
        if options.only in str(one) and options.rule in ("", one.rule)
    ]
    if not found:
        raise SystemExit("no mutant has that in its file, line and change")

    def key(one: Mutant) -> bytes:
        return hashlib.sha256(f"{options.seed} {one.file} {one.change}".encode()).digest()

    return sorted(found, key=key)


def main(argv: list[str] | None = None) -> int:
    """Draw mutants and run their tests; return 1 if a mutant that is not equivalent survives."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.tooling.mutants", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--count", type=int, default=110, help="how many mutants run")
    parser.add_argument("--seed", default="1", help="another seed draws other mutants")
    parser.add_argument("--jobs", type=int, default=1, help="how many run at the same time")
    parser.add_argument("--area", default="", help="how the file's path begins: cunorm/torch")
    parser.add_argument("--rule", default="", choices=RULES, help="the kind of mistake")
    parser.add_argument("--only", default="", help="mutants with this text in file:line: change")
    parser.add_argument("--quick", action="store_true", help="leave out the last tests")
    parser.add_argument("--list", action="store_true", help="print all in order, run none")
    options, known = parser.parse_args(argv), settings()
    candidates = drawn(options, known)
    if options.list:
        print(*candidates, sep="\n")
        return 0
    queue: SimpleQueue[Mutant] = SimpleQueue()
    for one in candidates:
        queue.put(one)

    def some(number: int) -> list[str]:
        tree = Tree.made(Path(folder), f"tree{number}")
        return list(islice(statuses(queue, tree, known, options.quick), share))

    share = -(-options.count // options.jobs)
    with (
        tempfile.TemporaryDirectory(prefix="cunorm-mutants-") as folder,
        ThreadPoolExecutor(options.jobs) as pool,
    ):
        totals = Counter(chain.from_iterable(pool.map(some, range(options.jobs))))
    print(*(f"{totals[status]} {status}" for status in (KILLED, EQUIVALENT, SURVIVED)), sep=", ")
    return 1 if totals[SURVIVED] else 0


def statuses(
    queue: SimpleQueue[Mutant], tree: Tree, known: dict[str, Any], quick: bool
) -> Iterator[str]:
    """Run mutants of the queue in a copy; print each, and yield its status if it compiles."""
    with suppress(Empty):
        while mutant := queue.get_nowait():
            begin = time.monotonic()
            status, by = outcome(mutant, tree, known, quick)
            print(f"{status:8} {time.monotonic() - begin:4.0f} s  {mutant}  {by}", flush=True)
            if status != INVALID:
                yield status


def outcome(mutant: Mutant, tree: Tree, known: dict[str, Any], quick: bool) -> tuple[str, str]:
    """Run the tests of a mutant up to a failure; return its status, and the test or the reason."""
    if why := known["equivalent"].get(mutant.file, {}).get(mutant.change):
        return EQUIVALENT, why
    text = (tree.path / mutant.file).read_text("utf-8")
    with tree.changed(mutant.file, mutant.applied(text)):
        for tests in tests_of(mutant.file, known, quick=quick):
            ran = tree.pytest(["-x", *HANGS, *shlex.split(tests)], MAX_SECONDS)
            if ran.returncode != 0:
                return verdict(ran)
    return SURVIVED, ""


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


if __name__ == "__main__":
    sys.exit(main())
