# SPDX-License-Identifier: MIT
"""The CUDA backend: NVRTC compiles kernels through ``cupy.RawKernel``, and CuPy launches them.

CuPy is imported at the first use. It compiles for the current device and has its own cache on disk.
"""

import importlib.util
import re
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from cunorm._backends import driver
from cunorm._backends.sources import error_lines, source_text
from cunorm._core.build import KernelBuild, Launch
from cunorm._core.caps import PORTABLE_CLUSTER, GpuCaps, features_of
from cunorm._core.memo import OnceMap, memoize
from cunorm._core.plan import CallSize, KernelCall
from cunorm._core.tensor import Device

_INSTALL = 'pip install "cunorm[cuda13]" (or "cunorm[cuda12]" where the driver is of CUDA 12)'
# CuPy 14.0 copies views of more than 2 GiB wrongly, and 13 knows no bfloat16.
_MIN_CUPY = (14, 1)
_MIN_NVRTC_FOR_CLUSTERS = (12, 1)  # has st.async, with which blocks send each other sums


def launch(planned: Launch, function: Any, arguments: bytes, stream: int) -> None:
    """Start a function on the current device; `arguments` are the bytes of its only argument."""
    if planned.dependent:
        return driver.launch_dependent(_cupy(), function, planned, arguments, stream)
    # CuPy passes a NumPy array by value if it has one element, of any size.
    argument = np.frombuffer(arguments, dtype=_block_of(len(arguments)))
    grid, block = (planned.grid,), (planned.block,)
    raw = SimpleNamespace(ptr=stream)  # 0 is the legacy default stream, 2 the per-thread one
    function(grid, block, (argument,), shared_mem=planned.shared, stream=raw)
    return None


@memoize(maxsize=64)
def _block_of(size: int) -> np.dtype[np.void]:
    return np.dtype((np.void, size))


loaded: OnceMap[tuple[KernelBuild, int], Any] = OnceMap()


def _load(build: KernelBuild) -> Any:
    """Compile a build for the current device, or read it from CuPy's cache on disk, and load it.

    Return this device's function, because a RawKernel would look it up at each launch. The function
    may use all the shared memory that a block can have.
    """
    cupy = _cupy()
    gpu = cupy.cuda.Device()
    gpu.use()  # sets the context for driver calls; CuPy sets none if it has the module already
    options = compile_options(build)
    kernel = cupy.RawKernel(source_text(build.kernel), build.kernel, options)
    try:
        kernel.compile()
    except cupy.cuda.compiler.CompileException as error:
        raise RuntimeError(compile_error_text(build, options, str(error))) from None
    most = gpu.attributes["MaxSharedMemoryPerBlockOptin"]
    kernel.max_dynamic_shared_size_bytes = most - kernel.shared_size_bytes
    function = kernel.kernel
    if build.cluster > PORTABLE_CLUSTER:
        driver.allow_large_clusters(cupy, function)
    return function


def prepare(build: KernelBuild, device: Device) -> tuple[Any, bool]:
    """Return CuPy's function of a build on a device, and whether this call loaded it."""
    with _cupy().cuda.Device(device.index):
        return loaded.load_once((build, device.index), lambda: (_load(build), True))


def compile_options(build: KernelBuild) -> tuple[str, ...]:
    """Return NVRTC's options for a build; CuPy adds ``-ftz=true`` and the architecture.

    CuPy also adds ``--device-as-default-execution-space``, without which NVRTC 13.0 treats lambdas
    as host functions. With ``--fmad=false`` a product and a sum are contracted only where the
    source says ``fma``, so a result does not depend on the rest of the build.
    """
    macros = tuple(f"-D{name}={value}" for name, value in build.macros)
    includes = tuple(f"-I{folder}" for folder in cuda_include_folders())
    return ("-std=c++17", "--fmad=false", *includes, *macros)


@cache
def cuda_include_folders() -> tuple[Path, ...]:
    """Return the folder with ``cuda_fp16.h`` and ``cuda_bf16.h``, if there is one.

    Wheels of NVRTC's version precede CuPy's path, because CuPy 14 finds no wheels of CUDA 12.
    """
    major, spec = nvrtc_version()[0], importlib.util.find_spec("nvidia")
    wheels = [Path(path) for path in (spec and spec.submodule_search_locations) or ()]
    folders = [wheel / f"cu{major}" / "include" for wheel in wheels]
    if major == 12:
        folders += [wheel / "cuda_runtime" / "include" for wheel in wheels]
    if root := _cupy().cuda.get_cuda_path():
        folders.append(Path(root) / "include")
    return tuple(folder for folder in folders if (folder / "cuda_fp16.h").is_file())[:1]


@cache
def nvrtc_version() -> tuple[int, int]:
    try:
        major, minor = _cupy().cuda.nvrtc.getVersion()
    except RuntimeError as error:  # CuPy looks for the library at the first call
        raise ImportError(f"CuPy finds no NVRTC to compile with: {_INSTALL}: {error}") from error
    return major, minor


def current_device() -> int:
    return int(_cupy().cuda.runtime.getDevice())


@memoize(maxsize=64)
def gpu_caps(device: Device) -> GpuCaps:
    gpu = _cupy().cuda.Device(device.index)
    attributes, features = gpu.attributes, features_of(gpu.compute_capability)
    if nvrtc_version() < _MIN_NVRTC_FOR_CLUSTERS:
        features = features._replace(clusters=False)
    if not driver.has_programmatic_launches(_cupy()):
        features = features._replace(programmatic_launches=False)
    return GpuCaps(
        sm_count=attributes["MultiProcessorCount"],
        compute_capability=gpu.compute_capability,
        max_threads_per_sm=attributes["MaxThreadsPerMultiProcessor"],
        shared_memory_per_block_optin=attributes["MaxSharedMemoryPerBlockOptin"],
        shared_memory_per_sm=attributes["MaxSharedMemoryPerMultiprocessor"],
        l2_bytes=attributes["L2CacheSize"],
        features=features,
    )


def caps_that_fit(device: Device, first_launch: Callable[[GpuCaps], Launch]) -> GpuCaps:
    """Return the caps of a device, with the largest clusters that it has room for, if any.

    A partition of a GPU may lack room for clusters that fit the whole GPU. Assume that each block
    needs a whole multiprocessor, as blocks for misaligned arrays may.
    """
    caps: GpuCaps = gpu_caps(device)
    more_than_half = caps.shared_memory_per_sm // 2
    while (launch := first_launch(caps)).build.cluster > 1:
        if fits_cluster(replace(launch, shared=max(launch.shared, more_than_half)), device):
            break
        fewer = min(launch.build.cluster, caps.features.largest_cluster) // 2
        features = caps.features._replace(clusters=fewer > 1, largest_cluster=fewer)
        caps = caps._replace(features=features)
    return caps


@memoize()
def fits_cluster(launch: Launch, device: Device) -> bool:
    function, _ = prepare(launch.build, device)
    with _cupy().cuda.Device(device.index):
        return driver.clusters_that_fit(_cupy(), function, launch) > 0


class _Kernel(NamedTuple):
    function: Any  # CuPy's
    launch: Launch
    words: "array[int]"  # the argument struct, for arrays at address 0
    relocations: tuple[tuple[int, int], ...]
    sized: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Launcher:
    """Starts kernels on a stream of a device, given the addresses of arrays.

    Each call makes new arguments, because several threads may call it concurrently.
    """

    kernels: list[_Kernel]
    device: Device

    @classmethod
    def load(cls, calls: Sequence[KernelCall], device: Device) -> "Launcher":
        kernels = []
        for launch, args, *_ in calls:
            function, _ = prepare(launch.build, device)
            kernels.append(_Kernel(function, launch, array("Q", args.data), *args[1:]))
        return cls(kernels, device)

    def resized(self, sizes: Sequence[CallSize]) -> "Launcher":
        """Return the launcher for another number of rows."""
        kernels = []
        for kernel, (grid, _, values) in zip(self.kernels, sizes, strict=True):
            words = kernel.words[:]
            for word, value in zip(kernel.sized, values, strict=True):
                words[word] = value
            resized = replace(kernel.launch, grid=grid)
            kernels.append(kernel._replace(launch=resized, words=words))
        return Launcher(kernels, self.device)

    def __call__(self, pointers: Sequence[int], stream: int) -> None:
        cuda, index = _cupy().cuda, self.device.index
        if cuda.runtime.getDevice() != index:
            with cuda.Device(index):
                return self(pointers, stream)
        for function, planned, words, relocations, _ in self.kernels:
            filled = words[:]
            for word, slot in relocations:
                filled[word] += pointers[slot]
            launch(planned, function, filled.tobytes(), stream)
        return None


@cache
def _cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise ImportError(
            f"CUDA arrays need CuPy, which compiles and launches the kernels: {_INSTALL}: {error}"
        ) from error
    found = tuple(map(int, re.findall(r"\d+", cupy.__version__)[:2]))
    if found < _MIN_CUPY:
        least = ".".join(map(str, _MIN_CUPY))
        raise ImportError(f"CUDA arrays need CuPy {least}, found {cupy.__version__}: {_INSTALL}")
    return cupy


require = _cupy  # raises ImportError if CuPy is not installed or too old


def compile_error_text(build: KernelBuild, options: tuple[str, ...], log: str) -> str:
    head = (f"NVRTC does not compile the build {build}", f"  options: {' '.join(options)}")
    lacks_headers = "cuda_fp16.h" in log or "cuda_bf16.h" in log
    end = (f"  The headers of the CUDA runtime are missing: {_INSTALL}",) if lacks_headers else ()
    return "\n".join((*head, *error_lines(log.splitlines()), *end))
