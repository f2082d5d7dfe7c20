# SPDX-License-Identifier: MIT
"""The machine's C++ compiler: its command, its runs, and the options that it takes."""

import errno
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from cunorm._backends.cpu import processes
from cunorm._backends.cpu.files import digest, temporary

_REFUSAL_TTL = 24 * 60 * 60  # seconds until a refused option is tried again
_ANSWER_LIMIT = 60.0  # seconds, for --version
_NO_PROGRAM = (errno.ENOENT, errno.EACCES, errno.ENOEXEC, errno.ENOTDIR, errno.ELOOP)
# Messages of compilers if they or their child processes lacked memory or disk space.
_STOPPED = re.compile(
    r"killed|signal|no space left|disk quota|file too large|file size limit|memory exhausted"
    r"|out of memory|cannot allocate",
    re.IGNORECASE,
)
_PROBE = """#ifdef _OPENMP
#include <omp.h>
extern "C" int threads() { return omp_get_max_threads(); }
#endif
"""

Options = tuple[str, ...]


class Compiler(NamedTuple):
    command: tuple[str, ...]
    version: str  # the first line of its --version
    is_gcc: bool


class Search(NamedTuple):
    """The result of a search for a compiler."""

    compiler: Compiler | None
    cxx_problem: str  # says that $CXX does not answer; empty if it does or is not set
    warnings: tuple[str, ...]  # about programs that are not used


_warned: set[str] = set()


def has_compiler() -> bool:
    """Whether there is a C++ compiler; warn once if there is none."""
    if compiler() is not None:
        return True
    problem = f" ({search().cxx_problem})" if search().cxx_problem else ""
    _warn_once(
        f"cunorm found no C++ compiler{problem}, so CPU arrays are normalised by the slow NumPy "
        "reference: install g++ or clang++, or point CXX at one"
    )
    return False


def _warn_once(text: str) -> None:
    """Warn once for each text, at the line of the user's code."""
    if text in _warned:
        return
    _warned.add(text)
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_globals["__name__"].startswith("cunorm."):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, RuntimeWarning, stacklevel=level)


def compiler() -> Compiler | None:
    """Return the C++ compiler or None; warn once about programs that are not used."""
    found = search()
    for text in found.warnings:
        _warn_once(text)
    return found.compiler


def forget() -> None:
    """Let the next use search for a compiler again, and warn again."""
    search.cache_clear()
    _warned.clear()


@cache
def search() -> Search:
    """Find the first C++ compiler of $CXX, c++, g++, clang++ that answers."""
    chosen, found, cxx_problem = _chosen(), None, ""
    remarks: list[str] = []
    for command in filter(None, (chosen, ["c++"], ["g++"], ["clang++"])):
        try:
            found = _answer(command)
        except processes.Stopped as stopped:
            cause = stopped.__cause__
            if isinstance(cause, OSError) and cause.errno not in _NO_PROGRAM:
                raise  # the compiler may start later, for example when there is memory
            remarks.append(f"{stopped}\n  It is not used.")
        if found is not None:
            break
        if command is chosen:
            cxx_problem = f"CXX={os.environ['CXX']} does not answer"
    if cxx_problem and found is not None and not remarks:
        remarks.append(f"{cxx_problem}: cunorm compiles with {found.command[0]}")
    return Search(found, cxx_problem, tuple(remarks))


def _answer(command: Sequence[str]) -> Compiler | None:
    if not shutil.which(command[0]):
        return None
    answer = processes.run([*command, "--version"], limit=_ANSWER_LIMIT)
    if answer.returncode != 0:
        return None
    version = answer.stdout.partition("\n")[0]
    return Compiler(tuple(command), version, "Free Software Foundation" in answer.stdout)


def _chosen() -> list[str]:
    """Return the command in $CXX, an empty list if it is not set."""
    chosen = os.environ.get("CXX", "")
    try:
        return shlex.split(chosen)
    except ValueError as error:
        raise ValueError(f"CXX is {chosen!r}, expected a command of a shell: {error}") from None


def run(command: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the compiler with its temporary files in a folder; if it does not start, forget it."""
    in_english = {**os.environ, "TMPDIR": os.fspath(folder), "LC_ALL": "C"}
    try:
        return processes.run(command, in_english)
    except processes.Stopped as stopped:
        if isinstance(stopped.__cause__, OSError):
            forget()
        raise


@cache
def cpu_identity() -> str:
    """Return a text about the CPU; with the same text, -march=native means the same."""
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    kinds = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in text.splitlines() if line.startswith(kinds)}))


def _groups() -> tuple[Options, ...]:
    """Return groups of options that a compiler may refuse; a group is refused as a whole.

    Cross compilers refuse -march=native; on ARM, so do Apple's Clang and Clang before 15. With
    -fschedule-insns GCC computes several items of a pack at a time, and a gated forward takes a
    tenth less time; with 16 registers, GCC also needs -fsched-pressure to avoid spills.
    -fno-gcse-after-reload makes a compile a tenth shorter and kernels no slower. Without -mmove-max
    and -mstore-max, GCC copies items of AVX-512 in halves; a load of an item then waits for both.
    """
    if "avx512f" in cpu_identity():
        faster: tuple[Options, ...] = (("-fschedule-insns",), ("-mmove-max=512", "-mstore-max=512"))
    else:
        faster = (("-fschedule-insns", "-fsched-pressure"), ("-fno-gcse-after-reload",))
    return (("-march=native",), ("-fopenmp",), *faster)


def optional(cxx: Compiler, options: Options, folder: Path) -> Options:
    """Return the options of `_groups` that a compiler accepts, to be put before `options`.

    A file in the folder lists refused options for a day; all others count as accepted.
    """
    path = _refusals(cxx, options, folder)
    try:
        is_recent = time.time() - path.stat().st_mtime <= _REFUSAL_TTL
        refused = path.read_text("utf-8").splitlines() if is_recent else []
    except (OSError, ValueError):
        refused = []
    accepted = (group for group in _groups() if " ".join(group) not in refused)
    return tuple(option for group in accepted for option in group)


def probe(cxx: Compiler, options: Options, folder: Path) -> None:
    """Try each group of `_groups` with a compiler that failed; list the refused groups in a file.

    A group is refused if the compiler fails with it and succeeds without it. If the compiler is
    stopped, the file does not change.
    """
    path = _refusals(cxx, options, folder)
    with temporary(path) as made:
        source, found = made / "probe.cpp", made / "refused"
        source.write_text(_PROBE, encoding="utf-8")
        rest = (*options, str(source), "-o", str(made / "probe.so"))
        if run([*cxx.command, *rest], made).returncode != 0:
            return
        answers = {group: run([*cxx.command, *group, *rest], made) for group in _groups()}
        if not any(map(was_stopped, answers.values())):
            refused = [" ".join(group) for group, answer in answers.items() if answer.returncode]
            found.write_text("\n".join(refused), encoding="utf-8")
            found.replace(path)


def was_stopped(answer: subprocess.CompletedProcess[str]) -> bool:
    """Whether a compiler failed for a reason other than its options and input."""
    return answer.returncode < 0 or bool(answer.returncode and _STOPPED.search(answer.stderr))


def _refusals(cxx: Compiler, options: Options, folder: Path) -> Path:
    return folder / f"refused-{digest(*cxx, *options, _groups(), cpu_identity())}.txt"
