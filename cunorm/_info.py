# SPDX-License-Identifier: MIT
"""`python -m cunorm info`: the versions, devices, compilers and caches that cunorm uses."""

import os
import platform
import sys
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import cunorm
from cunorm import _cache
from cunorm._backends import cuda
from cunorm._backends.cpu.compiler import search
from cunorm._backends.cpu.files import planned_folder
from cunorm._backends.cpu.threads import thread_count
from cunorm._backends.sources import kernel_folder
from cunorm._core.caps import MIN_CAPABILITY, describe_feature

# Versions are read without importing the packages: torch and JAX take seconds and memory.
_PACKAGES = ("numpy", "ml_dtypes", "torch", "jax")
_CUDA_PACKAGES = (
    *("cupy", "cupy-cuda13x", "cupy-cuda12x", "nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"),
    *("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12"),
)

Lines = Iterable[tuple[str, str]]


def report() -> str:
    cores, threads = str(os.cpu_count()), str(thread_count())
    sections: dict[str, Lines] = {
        "versions": _versions(),
        "CPU": (("model", cpu_name()), ("logical cores", cores), ("threads used", threads)),
        "CUDA": (*_cuda_lines(), *_feature_lines()),
        "compilers": _compilers(),
        "caches": _caches(),
    }
    text = []
    for title, lines in sections.items():
        text += [title, *(f"  {name:24} {value}" for name, value in lines), ""]
    return "\n".join(text[:-1])


def cuda_devices() -> tuple[int, str]:
    """Return how many CUDA devices CuPy finds, and the reason if it finds none."""
    try:
        import cupy
    except ImportError as error:
        return 0, f"no CuPy: {error}"
    try:
        count = int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return 0, f"no device: {error}"
    return count, "" if count else "no device"


def cuda_name(index: int) -> str:
    import cupy

    return str(cupy.cuda.runtime.getDeviceProperties(index)["name"].decode())


def cpu_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _versions() -> Lines:
    yield "cunorm", f"{cunorm.__version__}, kernels in {kernel_folder()}"
    yield "Python", f"{platform.python_version()} on {platform.platform()}, {sys.executable}"
    for name in _PACKAGES:
        yield name, _version(name) or "not installed"
    installed = {name: number for name in _CUDA_PACKAGES if (number := _version(name))}
    yield from installed.items()
    if not any(name.startswith("cupy") for name in installed):
        yield "cupy", "not installed"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cuda_lines() -> Lines:
    count, reason = cuda_devices()
    if not count:
        yield "devices", reason
        return
    import cupy

    number = cupy.cuda.runtime.driverGetVersion()
    yield "driver", f"for CUDA {number // 1000}.{number % 1000 // 10}"
    for index in range(count):
        gpu = cupy.cuda.runtime.getDeviceProperties(index)
        size = (
            f"{gpu['multiProcessorCount']} multiprocessors, {gpu['totalGlobalMem'] / 2**30:.1f} GiB"
        )
        capability = f"compute capability {gpu['major']}.{gpu['minor']}"
        yield f"device {index}", f"{cuda_name(index)}, {capability}, {size}"


def _feature_lines() -> Lines:
    for name in MIN_CAPABILITY:
        try:
            yield name, describe_feature(name)
        except ValueError as error:  # the report shows a wrong environment variable
            yield name, str(error)


def _compilers() -> Lines:
    missing = "none found: install g++ or clang++, or point CXX at one"
    try:
        cxx, cxx_problem, _ = search()
        found = missing if cxx is None else f"{' '.join(cxx.command)}: {cxx.version}"
        yield "C++", f"{found} ({cxx_problem})" if cxx_problem else found
    except ValueError as error:  # CXX is no command
        yield "C++", str(error)
    try:
        major, minor = cuda.nvrtc_version()
        folders = [*cuda.cuda_include_folders(), "(none found)"]
        yield "NVRTC", f"{major}.{minor}, headers in {folders[0]}"
    except ImportError as error:
        yield "NVRTC", f"none found: {str(error).partition(': ')[2] or error}"


def _caches() -> Lines:
    folder = _cache.cupy_cache_folder()
    sizes = [path.stat().st_size for path in folder.glob("*") if path.is_file()]
    ours = "kept for one process only: let CUNORM_CACHE_DIR name a folder only you can write to"
    if planned_folder() is not None:  # else `cache_info` would make a folder
        info = _cache.cache_info()
        ours = f"{info.folder}: {info.libraries} files, {info.bytes / 2**20:.1f} MiB"
    yield "CPU builds", ours
    yield "CuPy's kernels", f"{folder}: {len(sizes)} files, {sum(sizes) / 2**20:.1f} MiB"
