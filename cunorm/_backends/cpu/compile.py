# SPDX-License-Identifier: MIT
"""Compiles kernels with the machine's C++ compiler, caches them on disk, and loads them."""

import ctypes
import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from threading import Event
from typing import NamedTuple

from cunorm._backends.cpu import compiler as _compiler
from cunorm._backends.cpu import files, precompiled, waiting
from cunorm._backends.cpu.compiler import Compiler, Options, compiler, cpu_identity, run
from cunorm._backends.cpu.files import TEMPORARY, cache_folder, checksum_matches, digest
from cunorm._backends.cpu.processes import call_concurrently
from cunorm._backends.cpu.threads import short_waits
from cunorm._backends.sources import error_lines, source_text
from cunorm._core.build import KernelBuild
from cunorm._core.memo import OnceMap, memoize, on_clear

_INCLUDE = Path(__file__).parent / "include"
_HOST = _INCLUDE / "host"
# Strict IEEE arithmetic: no option may set flush-to-zero in the process that loads the library, and
# a product and a sum are contracted only where the source says fma.
_OPTIONS = (
    "-std=c++17",
    "-O3",
    "-ffp-contract=off",
    "-shared",
    "-fPIC",
    "-fvisibility=hidden",
    "-w",
)
_STOPPED = (
    "cunorm's compiler was stopped, as for want of memory or disk space: free some, or let "
    "CUNORM_CACHE_DIR name a folder on another disk, and call again"
)
_MORE_OPTIONS = "CUNORM_CXXFLAGS"  # an environment variable; its options come last


class Entry(NamedTuple):
    """The functions of a library; see launch.h."""

    run: Callable[[bytes, bytes, int], int]  # runs kernels of this and other libraries
    blocks: int  # the address of the function that runs blocks of its kernel


class Failed(RuntimeError):
    """A build does not compile."""

    was_stopped = False  # for a reason other than its options and source


def libraries(builds: Iterable[KernelBuild]) -> list[Entry]:
    """Return the entries of builds; those that are not loaded are compiled in parallel."""
    builds = list(builds)
    found = {build: loaded.get(build) for build in builds}
    missing = [build for build, entry in found.items() if entry is None]
    if missing:
        calls = [partial(library, build) for build in missing]
        announce = partial(waiting.announce_compile, missing)
        entries = call_concurrently(calls, waiting.PATIENCE, announce)
        found |= zip(missing, entries, strict=True)
    return [entry for build in builds if (entry := found[build]) is not None]


def library(build: KernelBuild) -> Entry:
    """Return the entry of a build: loaded, from the cache on disk, or compiled."""
    return loaded.get(build) or loaded.load_once(build, partial(_load, build))[0]


loaded: OnceMap[KernelBuild, Entry] = OnceMap()
_cleared = Event()
on_clear(_cleared.set)


def prepare(build: KernelBuild) -> bool:
    """Load a build before its first launch; return whether that called the compiler."""
    return loaded.load_once(build, partial(_load, build))[1]


def prepare_headers() -> None:
    """Compile the system's headers ahead of many builds that share them."""
    cxx = compiler()
    if cxx is not None:
        base, folder = base_options(), cache_folder()
        precompiled.prepare(cxx, (*_compiler.optional(cxx, base, folder), *base))


def _load(build: KernelBuild) -> tuple[Entry, bool]:
    tries, was_compiled = 3, False
    while True:
        path, is_new = _compiled(build)
        was_compiled = was_compiled or is_new
        try:
            with short_waits():
                return entry_of(_opened(path)), was_compiled
        except OSError:  # another process cleared the cache
            tries -= 1
            if not tries:
                raise


def entry_of(shared: ctypes.CDLL) -> Entry:
    run = shared.cunorm_run  # no argtypes: they would check each argument, which is bytes or an int
    blocks = ctypes.cast(shared.cunorm_blocks, ctypes.c_void_p).value
    assert blocks is not None
    return Entry(run, blocks)


def _opened(path: Path) -> ctypes.CDLL:
    """Open a library; once the cache was cleared, by a new name, as loaders reuse known names."""
    if not _cleared.is_set():
        return ctypes.CDLL(os.fspath(path))
    with tempfile.TemporaryDirectory(prefix=TEMPORARY, dir=path.parent) as folder:
        link = Path(folder, f"{next(_numbers)}-{path.name}")
        link.symlink_to(path)
        return ctypes.CDLL(os.fspath(link))


_numbers = count()


def _compiled(build: KernelBuild) -> tuple[Path, bool]:
    """Return the shared library of a build, and whether this call compiled it."""
    cxx = compiler()
    if cxx is None:
        raise RuntimeError("cunorm: no C++ compiler")
    base, folder = base_options(), cache_folder()
    optional = _compiler.optional(cxx, base, folder)
    try:
        return _compiled_with(build, cxx, (*optional, *base))
    except Failed as failed:
        if failed.was_stopped:
            raise
    _compiler.probe(cxx, base, folder)
    if _compiler.optional(cxx, base, folder) != optional:
        return _compiled(build)  # without the refused options
    # Each option works, but not with this source: drop first those that are only for speed.
    with suppress(Failed):
        needed = (option for option in optional if option in ("-march=native", "-fopenmp"))
        return _compiled_with(build, cxx, (*needed, *base))
    return _compiled_with(build, cxx, base)


def _compiled_with(build: KernelBuild, cxx: Compiler, options: Options) -> tuple[Path, bool]:
    """Return the library of a build; its name depends on the options."""
    made_by = (*options, *cxx, _stand_ins(), cpu_identity())
    text = f"#define LIBRARIES cunorm_{digest(*made_by)}\n{_translation_unit(build)}"
    name = digest(text, *made_by)
    target = cache_folder() / f"{build.kernel}-{name}.so"
    if checksum_matches(target):
        return target, False
    _compile(build, cxx, options, text, target)
    return target, True


def base_options() -> Options:
    more = os.environ.get(_MORE_OPTIONS, "")
    try:
        return (*_OPTIONS, *shlex.split(more))
    except ValueError as error:
        raise ValueError(
            f"{_MORE_OPTIONS} is {more!r}, expected options of a shell: {error}"
        ) from None


def _translation_unit(build: KernelBuild) -> str:
    macros = "".join(f"#define {name} {value}\n" for name, value in build.macros)
    source = source_text(build.kernel, (_HOST,))
    end = f'#define KERNEL {build.kernel}\n#include "launch.h"\n'
    return f'{macros}#include "device.h"\n{source}{end}'


@memoize(maxsize=1)
def _stand_ins() -> str:
    """Return the text of the headers that the compiler, not `source_text`, includes."""
    return "".join(path.read_text("utf-8") for path in sorted(_INCLUDE.rglob("*.h")))


def _compile(build: KernelBuild, cxx: Compiler, options: Options, text: str, target: Path) -> None:
    """Compile a build, with the system's precompiled headers if there are any."""
    headers = precompiled.options_for(cxx, options)
    with files.temporary(target) as folder:
        source, made = folder / f"{build.kernel}.cpp", folder / "made.so"
        source.write_text(text, encoding="utf-8")
        own = (f"-I{_HOST}", f"-I{_INCLUDE}", str(source), "-o", str(made))
        first = answer = run([*cxx.command, *options, *headers, *own], folder)
        if first.returncode != 0 and headers:
            answer = run([*cxx.command, *options, *own], folder)
            if answer.returncode == 0 and not _compiler.was_stopped(first):
                precompiled.give_up(headers)
        if answer.returncode != 0:
            raise _failure(build, answer)
        files.append_checksum(made)
        made.replace(target)


def _failure(build: KernelBuild, answer: subprocess.CompletedProcess[str]) -> Failed:
    log = answer.stderr.splitlines()
    if answer.returncode < 0:
        log.append(f"error: killed by signal {-answer.returncode}")
    was_stopped = _compiler.was_stopped(answer)
    lines = [
        f"the C++ compiler does not compile {build.kernel}:",
        *error_lines(log),
        *((_STOPPED,) if was_stopped else ()),
        f"  its command: {shlex.join(answer.args)}",
        f"  the build: {build}",
    ]
    failed = Failed("\n".join(lines))
    failed.was_stopped = was_stopped
    return failed
