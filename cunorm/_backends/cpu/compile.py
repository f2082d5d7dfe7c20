# SPDX-License-Identifier: MIT
"""Compiles a kernel's source with the machine's C++ compiler, and loads it; cached on disk."""

from __future__ import annotations

import ctypes
import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import NamedTuple

from cunorm._backends.cpu import compiler as _compiler
from cunorm._backends.cpu import precompiled
from cunorm._backends.cpu.compiler import Compiler, Options, compiler, run
from cunorm._backends.cpu.compiler import cpu_identity as _cpu_identity
from cunorm._backends.cpu.files import TEMPORARY, cache_folder, digest, is_whole, seal, temporary
from cunorm._backends.sources import source_text
from cunorm._backends.store import OnceMap
from cunorm._core.build import KernelBuild
from cunorm._core.memo import memoize, on_clear

_INCLUDE = Path(__file__).parent / "include"
_HOST = _INCLUDE / "host"
# Strict IEEE arithmetic: no option here may set flush-to-zero in whoever loads the library, and a
# product and a sum are contracted only where the source says fma.
_OPTIONS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-shared", "-fPIC", "-w")
_MORE_OPTIONS = "CUNORM_CXXFLAGS"  # of the environment: they come after ours
_ERROR_LINES = 8


class Entry(NamedTuple):
    """What a library offers; see launch.h."""

    run: Callable[[bytes, bytes, int], None]  # lists of kernels of this and other libraries
    blocks: int  # the address of what runs blocks of its kernel


class Failed(RuntimeError):
    """A build does not compile."""

    was_stopped = False  # by what has nothing to do with its options and its text


def library(build: KernelBuild) -> Entry:
    """Return the entry of a build, compiled or from the cache on disk."""
    return _loaded.get(build) or _ready(build)[0]


_loaded: OnceMap[KernelBuild, Entry] = OnceMap()
_times_cleared = 0


def prepare(build: KernelBuild) -> bool:
    """Load a build ahead of its first launch; return whether this called the compiler for it."""
    return _ready(build)[1]


def _ready(build: KernelBuild) -> tuple[Entry, bool]:
    """Return the entry of a build, and whether the compiler was called for it here and now."""
    return _loaded.load_once(build, partial(_load, build))


def loaded_count() -> int:
    """Return how many builds this process has loaded."""
    return len(_loaded)


def _count_clear() -> None:
    global _times_cleared
    _times_cleared += 1


on_clear(_count_clear)


def _load(build: KernelBuild) -> tuple[Entry, bool]:
    shared, was_compiled = _opened(build)
    return entry_of(shared), was_compiled


def entry_of(shared: ctypes.CDLL) -> Entry:
    """Return what an open library offers."""
    run = shared.cunorm_run
    run.restype = None  # bytes and an int are passed as they are, which argtypes would ask again
    blocks = ctypes.cast(shared.cunorm_blocks, ctypes.c_void_p).value
    assert blocks is not None
    return Entry(run, blocks)


def _opened(build: KernelBuild, tries: int = 3) -> tuple[ctypes.CDLL, bool]:
    path, was_compiled = _compiled(build)
    try:
        return (_opened_by_new_name if _times_cleared else _opened_by_path)(path), was_compiled
    except OSError:
        if tries == 1:
            raise
    shared, was_compiled_again = _opened(build, tries - 1)  # somebody clears the cache
    return shared, was_compiled or was_compiled_again


def _opened_by_path(path: Path) -> ctypes.CDLL:
    return ctypes.CDLL(os.fspath(path))


def _opened_by_new_name(path: Path) -> ctypes.CDLL:
    """Open a library by a name that this process never used, and that is gone when it is open.

    A loader takes a name that it had before for the library of then, be the file another.
    """
    with tempfile.TemporaryDirectory(prefix=TEMPORARY, dir=path.parent) as folder:
        link = Path(folder, f"{next(_numbers)}-{path.name}")
        link.symlink_to(path)
        return _opened_by_path(link)


_numbers = count()


def _compiled(build: KernelBuild) -> tuple[Path, bool]:
    """Return the shared library of a build, and whether the cache had none and it was made now."""
    found = compiler()
    if found is None:
        raise RuntimeError("cunorm: no C++ compiler")
    base, folder = base_options(), cache_folder()
    optional = _compiler.optional(found, base, folder)
    try:
        return _compiled_with(build, found, (*base, *optional))
    except Failed as failed:
        if failed.was_stopped:
            raise
    _compiler.ask(found, base, folder)
    if _compiler.optional(found, base, folder) != optional:
        return _compiled(build)  # without what it refuses
    # It takes each option, but not with this text.
    with suppress(Failed):
        return _compiled_with(build, found, (*base, *_compiler.needed(optional)))
    return _compiled_with(build, found, base)


def _compiled_with(build: KernelBuild, found: Compiler, options: Options) -> tuple[Path, bool]:
    """Return the library that certain options make, which its name tells."""
    text = _translation_unit(build)
    name = digest(text, *options, *found, _stand_ins(), _cpu_identity())
    target = cache_folder() / f"{build.kernel}-{name}.so"
    if is_whole(target):
        return target, False
    _compile(build, found, options, text, target)
    return target, True


def base_options() -> Options:
    """Return what every compiler is given, whatever else it takes."""
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
    """Return the text of the stand-in headers, which the compiler includes by itself."""
    return "".join(path.read_text("utf-8") for path in sorted(_INCLUDE.rglob("*.h")))


def _compile(
    build: KernelBuild, found: Compiler, options: Options, text: str, target: Path
) -> None:
    """Compile a build, with the system's headers as they were compiled before, if they were."""
    headers = precompiled.options_for(found, options)
    with temporary(target) as made_in:
        folder = Path(made_in)
        source, made = folder / f"{build.kernel}.cpp", folder / "made.so"
        source.write_text(text, encoding="utf-8")
        own = (f"-I{_HOST}", f"-I{_INCLUDE}", str(source), "-o", str(made))
        command = [*found.command, *options, *headers, *own]
        answer = run(command, folder)
        first = answer
        if answer.returncode != 0 and headers:
            command = [*found.command, *options, *own]
            answer = run(command, folder)
            if answer.returncode == 0 and not _compiler.was_stopped(first):
                precompiled.give_up(headers)
        if answer.returncode != 0:
            failed = Failed(_error_text(build, command, answer))
            failed.was_stopped = _compiler.was_stopped(answer)
            raise failed
        seal(made)
        made.replace(target)


def _error_text(
    build: KernelBuild, command: list[str], answer: subprocess.CompletedProcess[str]
) -> str:
    lines = answer.stderr.splitlines()
    if answer.returncode < 0:
        lines.append(f"error: killed by signal {-answer.returncode}")
    errors = [line for line in lines if "error" in line] or lines
    shown = "\n".join(f"  {line}" for line in errors[:_ERROR_LINES])
    return f"the C++ compiler does not compile {build}\n  {shlex.join(command)}\n{shown}"
