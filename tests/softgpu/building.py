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
import stat
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from pathlib import Path

SOURCES = Path(__file__).parent / "src"
FLAGS = (
    *("-std=c++20", "-march=native", "-ffp-contract=off", "-fno-math-errno"),
    *("-fPIC", "-Wall", "-Wextra"),
)
# Each unit: sources that are compiled together, to save time, and their optimization level.
UNITS = {
    ("arithmetic", "conversions"): "-O2",
    ("memory", "operations", "schedule", "barriers", "mbarriers", "races", "counters"): "-O2",
    ("module", "decode", "kernels", "driver", "streams"): "-O1",
}
NEEDED = {"avx2", "fma", "f16c"}  # CPU flags


def unavailable() -> str:
    """Return why the software GPU cannot run here; "" if it can."""
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
    """Return the command of a C++ compiler; empty without one."""
    for name in (os.environ.get("CXX", ""), "c++", "g++", "clang++"):
        command = shlex.split(name)
        if command and shutil.which(command[0]):
            return command
    return []


@lru_cache(maxsize=1)
def nvrtc() -> str:
    """Return the path of NVRTC's library in its wheel; "" without it."""
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(path) for path in (spec and spec.submodule_search_locations) or ()]
    kinds = ("cu13/lib/libnvrtc.so.13", "cuda_nvrtc/lib/libnvrtc.so.12")
    found = [path for kind in kinds for folder in folders if (path := folder / kind).is_file()]
    return str(found[0]) if found else ""


def folder() -> Path:
    """Return the user's own folder for the library and PTX; create it if necessary."""
    path = Path(tempfile.gettempdir()) / f"cunorm-softgpu-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o77:
        raise PermissionError(f"{path} is not a folder of this user alone")
    return path


def library() -> Path:
    """Return the path of the library compiled from SOURCES; compile it if necessary.

    Other processes wait for the process that compiles.
    """
    version = subprocess.run([*compiler(), "--version"], capture_output=True, text=True, check=True)
    sources = [path.read_text() for path in sorted(SOURCES.iterdir())]
    key = repr((compiler(), version.stdout, FLAGS, UNITS, _processor(), sources))
    target = folder() / f"libsoftgpu-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    with (folder() / "lock").open("w") as lock, tempfile.TemporaryDirectory() as objects:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                compiled = list(pool.map(partial(_compiled, Path(objects)), UNITS))
            part = Path(objects) / target.name
            _run("-shared", "-Wl,-soname,libsoftgpu.so", *compiled, "-o", str(part))
            part.replace(target)
    return target


def _compiled(folder: Path, unit: tuple[str, ...]) -> str:
    target = str(folder / f"{unit[0]}.o")
    included = [word for name in unit for word in ("-include", str(SOURCES / f"{name}.cpp"))]
    _run(*FLAGS, UNITS[unit], *included, "-x", "c++", "-c", os.devnull, "-o", target)
    return target


def _run(*arguments: str) -> None:
    done = subprocess.run([*compiler(), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the software GPU does not compile:\n{done.stderr}")


@lru_cache(maxsize=1)
def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line for line in lines if line.startswith("flags")), "")
