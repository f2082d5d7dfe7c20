# SPDX-License-Identifier: MIT
"""Compiles the software GPU, once for each state of its sources, compiler and processor."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

SOURCES = Path(__file__).parent / "src"
FLAGS = (
    *("-std=c++20", "-O2", "-march=native", "-ffp-contract=off", "-fno-math-errno"),
    *("-fPIC", "-Wall", "-Wextra"),
)
NEEDED = {"avx2", "fma", "f16c"}  # of the processor


def unavailable() -> str:
    """Say why there can be no software GPU here; nothing where there can be one."""
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        return "the software GPU needs Linux on x86-64"
    if missing := NEEDED - set(_processor().split()):
        return f"the software GPU needs a processor with {', '.join(sorted(missing))}"
    if not compiler():
        return "the software GPU needs a C++ compiler: install g++ or clang++, or point CXX at one"
    if not nvrtc():
        return "the software GPU needs NVRTC: pip install nvidia-cuda-nvrtc nvidia-cuda-runtime"
    return ""


@lru_cache(maxsize=1)
def compiler() -> list[str]:
    """Return the command of a C++ compiler, or nothing."""
    for name in (os.environ.get("CXX", ""), "c++", "g++", "clang++"):
        command = shlex.split(name)
        if command and shutil.which(command[0]):
            return command
    return []


@lru_cache(maxsize=1)
def nvrtc() -> str:
    """Return the path of NVRTC's library in its wheel, or nothing."""
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(path) for path in (spec and spec.submodule_search_locations) or ()]
    kinds = ("cu13/lib/libnvrtc.so.13", "cuda_nvrtc/lib/libnvrtc.so.12")
    found = [path for kind in kinds for folder in folders if (path := folder / kind).is_file()]
    return str(found[0]) if found else ""


def folder() -> Path:
    """Make the user's own folder for the library and for PTX, if need be."""
    path = Path(tempfile.gettempdir()) / f"cunorm-softgpu-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    known = path.lstat()
    if (
        not path.is_dir()
        or path.is_symlink()
        or known.st_uid != os.getuid()
        or known.st_mode & 0o77
    ):
        raise PermissionError(f"{path} is not a folder of this user alone")
    return path


def library() -> Path:
    """Return the path of the library, which is compiled where it is older than its sources.

    Processes wait for the one that compiles. Of what did not change, objects are kept.
    """
    version = subprocess.run([*compiler(), "--version"], capture_output=True, text=True, check=True)
    headers = [path.read_text() for path in sorted(SOURCES.glob("*.h"))]
    common = repr((compiler(), version.stdout, FLAGS, _processor(), headers))
    sources = sorted(SOURCES.glob("*.cpp"))
    objects = {
        path: folder() / f"{path.stem}-{_hash(common, path.read_text())}.o" for path in sources
    }
    made = folder() / f"libsoftgpu-{_hash(*map(str, objects.values()))}.so"
    with (folder() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            missing = {source: kept for source, kept in objects.items() if not kept.exists()}
            _run({kept: [*FLAGS, "-c", str(source)] for source, kept in missing.items()})
            _run({made: ["-shared", "-Wl,-soname,libsoftgpu.so", *map(str, objects.values())]})
    return made


def _run(wanted: dict[Path, list[str]]) -> None:
    """Run the compiler, a process to a core; each file takes its name when all are complete."""
    parts = {made: made.with_suffix(".part") for made in wanted}

    def compile_one(made: Path) -> subprocess.CompletedProcess[str]:
        command = [*compiler(), *wanted[made], "-o", str(parts[made])]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        answers = list(pool.map(compile_one, wanted))
    if any(answer.returncode for answer in answers):
        logs = "".join(answer.stderr for answer in answers)
        raise RuntimeError(f"the software GPU does not compile:\n{logs}")
    for made, part in parts.items():
        part.replace(made)


@lru_cache(maxsize=1)
def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line for line in lines if line.startswith("flags")), "")


def _hash(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]
