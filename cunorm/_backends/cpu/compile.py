# SPDX-License-Identifier: MIT
"""Compiles kernels with the machine's C++ compiler, caches them on disk, and loads them."""

import ctypes
import logging
import os
import shlex
import subprocess
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Event
from time import monotonic
from typing import NamedTuple

from cunorm._backends.cpu import compiler as _compiler
from cunorm._backends.cpu import files
from cunorm._backends.cpu.compiler import Compiler, Options, compiler, cpu_identity, run
from cunorm._backends.cpu.files import cache_folder, checksum_matches, digest
from cunorm._backends.cpu.processes import call_concurrently
from cunorm._backends.cpu.threads import short_waits
from cunorm._backends.sources import error_lines, source_text
from cunorm._core.build import KernelBuild
from cunorm._core.memo import OnceMap, memoize

_INCLUDE = Path(__file__).parent / "include"
_HOST = _INCLUDE / "host"
# Arithmetic is that of IEEE: no option lets a library set flush-to-zero in the process that loads
# it, and a product and a sum are contracted only where the source says fma.
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
_MORE_OPTIONS = "CUNORM_CXXFLAGS"  # an environment variable
PATIENCE = 2.0  # seconds until a call logs that it waits for the compiler
is_announced = Event()  # callers that inform the user themselves set it, too


class Entry(NamedTuple):
    """The functions of a library; see launch.h."""

    run: Callable[[bytes, bytes, int], int]  # runs kernels of this library and of others
    blocks: int  # the address of the function that runs blocks of the library's kernel


class Failed(RuntimeError):
    """A build does not compile because of its options or its source."""


def libraries(builds: Iterable[KernelBuild]) -> list[Entry]:
    """Return the entries of builds; compile missing builds in parallel."""
    builds = list(builds)
    found = {build: entry for build in builds if (entry := loaded.values.get(build))}
    missing = [build for build in dict.fromkeys(builds) if build not in found]
    if missing:
        calls = [partial(prepare, build) for build in missing]
        step = partial(announce_after, monotonic() + PATIENCE, missing)
        futures = call_concurrently(calls, step=step)
        found |= {build: future.result()[0] for build, future in zip(missing, futures, strict=True)}
    return [found[build] for build in builds]


def announce_after(end: float, builds: Iterable[KernelBuild], ended: int = 0) -> None:
    """Log what is being compiled, once in a process and only after the time `end`."""
    if monotonic() >= end and not is_announced.is_set():
        is_announced.set()
        names = " and ".join(dict.fromkeys(build.kernel for build in builds))
        text = "cunorm compiles %s, once for this machine; cunorm.warmup does so ahead"
        with suppress(OSError, ValueError):  # a stream that was closed
            logging.getLogger("cunorm").warning(text, names)


loaded: OnceMap[KernelBuild, Entry] = OnceMap()


def prepare(build: KernelBuild) -> tuple[Entry, bool]:
    """Return the entry of a build, and whether this call compiled it."""
    return loaded.load_once(build, partial(_load, build))


def _load(build: KernelBuild) -> tuple[Entry, bool]:
    tries, was_compiled = 3, False
    while True:
        path, is_new = _compiled(build)
        was_compiled = was_compiled or is_new
        try:
            with short_waits():
                return entry_of(path), was_compiled
        except OSError:  # for example, another process cleared the cache
            tries -= 1
            if not tries:
                raise


def entry_of(path: Path) -> Entry:
    shared = ctypes.CDLL(os.fspath(path))
    run = shared.cunorm_run  # has no argtypes: checking arguments takes time
    blocks = ctypes.cast(shared.cunorm_blocks, ctypes.c_void_p).value
    assert blocks is not None
    return Entry(run, blocks)


def _compiled(build: KernelBuild) -> tuple[Path, bool]:
    """Return the shared library of a build, and whether this call compiled it."""
    cxx = compiler()
    if cxx is None:
        raise RuntimeError("cunorm: no C++ compiler")
    base, folder = base_options(), cache_folder()
    optional = _compiler.optional(cxx, base, folder)
    try:
        return _compiled_with(build, cxx, (*optional, *base))
    except Failed:
        _compiler.probe(cxx, base, folder)
    if _compiler.optional(cxx, base, folder) != optional:
        return _compiled(build)  # without the refused options
    # The probe refused no other option. Try again with the most useful options, then with none.
    with suppress(Failed):
        needed = (option for option in optional if option in ("-march=native", "-fopenmp"))
        return _compiled_with(build, cxx, (*needed, *base))
    return _compiled_with(build, cxx, base)


def _compiled_with(build: KernelBuild, cxx: Compiler, options: Options) -> tuple[Path, bool]:
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
    """Return the text of all `.h` headers, of which `source_text` inlines only some."""
    return "".join(path.read_text("utf-8") for path in sorted(_INCLUDE.rglob("*.h")))


def _compile(build: KernelBuild, cxx: Compiler, options: Options, text: str, target: Path) -> None:
    with files.temporary(target) as folder:
        source, made = folder / f"{build.kernel}.cpp", folder / "made.so"
        source.write_text(text, encoding="utf-8")
        own = (f"-I{_HOST}", f"-I{_INCLUDE}", str(source), "-o", str(made))
        answer = run([*cxx.command, *options, *own], folder)
        if answer.returncode != 0:
            raise _failure(build, answer)
        files.append_checksum(made)
        made.replace(target)


def _failure(build: KernelBuild, answer: subprocess.CompletedProcess[str]) -> RuntimeError:
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
    return (RuntimeError if was_stopped else Failed)("\n".join(lines))
