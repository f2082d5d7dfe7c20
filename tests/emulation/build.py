# SPDX-License-Identifier: MIT
"""Compiles kernels for emulation, once for each text, compiler and machine."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

_HERE = Path(__file__).parent
INCLUDE = _HERE / "include"
_STAND_INS = _HERE.parents[1] / "cunorm" / "_cpu" / "include"  # cuda_fp16.h and the like
_OPTIONS = (
    "-std=c++17",
    "-g0",
    "-march=native",
    "-ffp-contract=off",
    "-fvisibility=hidden",
    "-fno-exceptions",
    "-fno-rtti",
    "-shared",
    "-fPIC",
    f"-I{INCLUDE}",
    f"-I{_STAND_INS}",
)


class CompileError(RuntimeError):
    """A kernel that the C++ compiler refuses, or no compiler."""


def compile_kernel(
    source_text: str, kernel: str, macros: tuple[tuple[str, str], ...], scheduler: Path
) -> Path:
    """Return the library of a kernel, compiled for emulation or found in the cache."""
    defines = [f"-D{name}={value}" for name, value in macros]
    options = ["-O1", *defines, "-include", "device.h"]
    text = f"{source_text}\nEMULATION_KERNEL({kernel})\n"
    return _library(kernel, text, options, [str(scheduler)])


@cache
def compile_scheduler(options: tuple[str, ...] = ()) -> Path:
    """Return the scheduler's library, to which every kernel is linked."""
    text = (_HERE / "scheduler.cpp").read_text(encoding="utf-8")
    return _library("scheduler", text, ["-O2", *options], [])


@cache
def compiler() -> str | None:
    """Return the C++ compiler: $CXX or the first that is found."""
    names = (os.environ.get("CXX"), "g++", "c++", "clang++")
    return next(filter(None, (shutil.which(name) for name in names if name)), None)


def unavailable() -> str:
    """Return why kernels cannot be emulated on this machine; nothing where they can."""
    if sys.platform != "linux":
        return "emulation needs Linux (ELF sections hold the shared arrays)"
    return "" if compiler() else "emulation needs a C++ compiler: $CXX, g++, c++ or clang++"


def _library(name: str, text: str, options: list[str], libraries: list[str]) -> Path:
    """Compile the text of a source file to a shared library, unless the cache has it."""
    if reason := unavailable():
        raise CompileError(reason)
    command = [compiler(), *_OPTIONS, *options, "-x", "c++", "-", "-x", "none", *libraries, "-o"]
    key = hashlib.sha256("\0".join([_environment(), *command, text]).encode()).hexdigest()
    library = _cache_folder() / f"{name}-{key[:32]}.so"
    if library.exists():
        return library
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        built = Path(folder) / library.name
        command.append(str(built))
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            first_lines = "\n".join(done.stderr.splitlines()[:30])
            raise CompileError(f"{name} does not compile\n{' '.join(command)}\n{first_lines}")
        built.replace(library)
    return library


@cache
def _environment() -> str:
    """Return all that a library depends on beside its own text and options."""
    version = subprocess.run([compiler(), "--version"], capture_output=True, text=True, check=True)
    cpu = Path("/proc/cpuinfo")
    flags = [
        line
        for line in (cpu.read_text().splitlines() if cpu.exists() else [])
        if line.startswith(("flags", "Features", "model name"))
    ]
    headers = sorted([*INCLUDE.glob("*.h"), *_STAND_INS.glob("*.h")])
    texts = [path.read_text(encoding="utf-8") for path in headers]
    return "\0".join([version.stdout, platform.machine(), *sorted(set(flags)), *texts])


@cache
def _cache_folder() -> Path:
    """Return $CUNORM_EMULATION_CACHE or this user's folder under the temporary one."""
    chosen = os.environ.get("CUNORM_EMULATION_CACHE")
    folder = Path(chosen or Path(tempfile.gettempdir()) / f"cunorm-emulation-{os.getuid()}")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if not chosen and (status.st_uid != os.getuid() or status.st_mode & 0o022):
        raise PermissionError(f"{folder} can be written by others: remove it")
    return folder
