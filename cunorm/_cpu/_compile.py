# SPDX-License-Identifier: MIT
"""Compiles a kernel's source with the machine's C++ compiler, and loads it; cached on disk."""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Callable
from functools import cache, lru_cache, partial
from itertools import count
from pathlib import Path
from typing import NamedTuple

from cunorm._builds import Build
from cunorm._loaded import Loaded
from cunorm._sources import source_text

_INCLUDE = Path(__file__).parent / "include"
_HOST = _INCLUDE / "host"
# Strict IEEE arithmetic: no option here may set flush-to-zero in whoever loads the library, and a
# product and a sum are contracted only where the source says fma.
_OPTIONS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-shared", "-fPIC", "-w")
_ERROR_LINES = 8

TEMPORARY = "compiling-"  # how the names of folders begin that are removed after their use


class Entry(NamedTuple):
    """What a library offers; see launch.h."""

    run: Callable[[bytes, bytes, int], None]  # lists of kernels of this and other libraries
    blocks: int  # the address of what runs blocks of its kernel


class Compiler(NamedTuple):
    """A C++ compiler: its command and what it says of its version."""

    command: tuple[str, ...]
    version: str


@cache
def compiler() -> Compiler | None:
    """Return the first C++ compiler of $CXX, c++, g++, clang++ that answers, None without one."""
    candidates = [shlex.split(os.environ.get("CXX", "")), ["c++"], ["g++"], ["clang++"]]
    for command in candidates:
        if command and shutil.which(command[0]):
            answer = subprocess.run([*command, "--version"], capture_output=True, text=True)
            if answer.returncode == 0:
                return Compiler(tuple(command), answer.stdout.partition("\n")[0])
    return None


def library(build: Build) -> Entry:
    """Return the entry of a build, compiled or from the cache on disk."""
    return _loaded.get(build) or _ready(build)[0]


_loaded: Loaded[Build, Entry] = Loaded()
_times_forgotten = 0


def prepare(build: Build) -> bool:
    """Load a build ahead of its first launch; return whether this called the compiler for it."""
    return _ready(build)[1]


def _ready(build: Build) -> tuple[Entry, bool]:
    """Return the entry of a build, and whether the compiler was called for it here and now."""
    return _loaded.ready(build, partial(_load, build))


def loaded_count() -> int:
    """Return how many builds this process has loaded."""
    return len(_loaded)


def forget() -> None:
    """Let the next launch of every build load it anew; calls in progress go on undisturbed."""
    global _times_forgotten
    _times_forgotten += 1
    _loaded.forget()
    _stand_ins.cache_clear()


def _load(build: Build) -> tuple[Entry, bool]:
    shared, was_compiled = _opened(build)
    return entry_of(shared), was_compiled


def entry_of(shared: ctypes.CDLL) -> Entry:
    """Return what an open library offers."""
    run = shared.cunorm_run
    run.restype = None  # bytes and an int are passed as they are, which argtypes would ask again
    blocks = ctypes.cast(shared.cunorm_blocks, ctypes.c_void_p).value
    assert blocks is not None
    return Entry(run, blocks)


def _opened(build: Build, tries: int = 3) -> tuple[ctypes.CDLL, bool]:
    path, was_compiled = _compiled(build)
    try:
        return (_opened_by_new_name if _times_forgotten else _opened_by_path)(path), was_compiled
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


def _compiled(build: Build) -> tuple[Path, bool]:
    """Return the shared library of a build, and whether the cache had none and it was made now."""
    found = compiler()
    if found is None:
        raise RuntimeError("cunorm: no C++ compiler")
    text = _translation_unit(build)
    macros = tuple(f"-D{name}={value}" for name, value in build.macros)
    identity = (text, *macros, *_OPTIONS, *_optional()[0], *found, _stand_ins(), _cpu_identity())
    name = hashlib.sha256("\0".join(map(str, identity)).encode()).hexdigest()[:32]
    target = cache_folder() / f"{build.kernel}-{name}.so"
    if target.exists():
        return target, False
    _compile(build, found, text, macros, target)
    return target, True


def _translation_unit(build: Build) -> str:
    source = source_text(build.kernel, (_HOST,))
    return f'#include "device.h"\n{source}#define KERNEL {build.kernel}\n#include "launch.h"\n'


@cache
def _stand_ins() -> str:
    """Return the text of the stand-in headers, which the compiler includes by itself."""
    return "".join(path.read_text("utf-8") for path in sorted(_INCLUDE.rglob("*.h")))


def _compile(
    build: Build, found: Compiler, text: str, macros: tuple[str, ...], target: Path
) -> None:
    """Compile with all that the compiler takes of what is optional."""
    with tempfile.TemporaryDirectory(prefix=TEMPORARY, dir=target.parent) as folder:
        source, made = Path(folder, f"{build.kernel}.cpp"), Path(folder, "made.so")
        source.write_text(text, encoding="utf-8")
        includes = (f"-I{_HOST}", f"-I{_INCLUDE}")
        for optional in _optional():
            command = [*found.command, *_OPTIONS, *optional, *includes, *macros, str(source)]
            command += ["-o", str(made)]
            answer = subprocess.run(command, capture_output=True, text=True)
            if answer.returncode == 0:
                made.replace(target)
                return
    raise RuntimeError(_error_text(build, command, answer.stderr))


def _error_text(build: Build, command: list[str], log: str) -> str:
    lines = log.splitlines()
    errors = [line for line in lines if "error" in line] or lines
    shown = "\n".join(f"  {line}" for line in errors[:_ERROR_LINES])
    return f"the C++ compiler does not compile {build}\n  {shlex.join(command)}\n{shown}"


def _optional() -> tuple[tuple[str, ...], ...]:
    """Return options that a compiler may refuse, and fewer of them for when it does.

    With the 32 registers of AVX-512, scheduling before they are given out lets several items of a
    pack be computed at a time (a gated forward takes a tenth less); with 16, it spills. And with
    AVX-512 GCC copies items in halves, for which a load of a whole one would have to wait.
    """
    scheduled, whole = ("-fschedule-insns",), ("-mmove-max=512", "-mstore-max=512")
    has_avx512 = "avx512f" in _cpu_identity()
    faster = ((*scheduled, *whole), scheduled, ()) if has_avx512 else ((),)
    return tuple((*openmp, *more) for openmp in (("-fopenmp",), ()) for more in faster)


@lru_cache(maxsize=1)
def _cpu_identity() -> str:
    """Return what -march=native depends on."""
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    kinds = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in text.splitlines() if line.startswith(kinds)}))


@cache
def cache_folder() -> Path:
    """Return where compiled kernels are kept: a folder that is this user's alone."""
    chosen = os.environ.get("CUNORM_CACHE_DIR")
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
        folder = (Path(chosen) if chosen else Path(base, "cunorm")).expanduser().absolute()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        owned = not hasattr(os, "getuid") or folder.stat().st_uid == os.getuid()
        private = owned and not folder.stat().st_mode & 0o022
        if private and os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):
        pass
    warnings.warn(
        "cunorm keeps compiled kernels for this process only: its cache folder must be writable, "
        "and by its user alone; CUNORM_CACHE_DIR names another",
        RuntimeWarning,
        stacklevel=2,
    )
    folder = Path(tempfile.mkdtemp(prefix="cunorm-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
