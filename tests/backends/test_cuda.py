# SPDX-License-Identifier: MIT
"""The CUDA launcher: a launch's arguments, device and stream; clusters; errors."""

from __future__ import annotations

import re
import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

import cunorm
from tests import softgpu
from tests.support.internals import (
    Device,
    Features,
    KernelBuild,
    Launch,
    OnceMap,
    _cache,
    _cuda,
    _driver,
    start,
)

pytestmark = pytest.mark.gpu
software = pytest.mark.skipif(not softgpu.is_loaded(), reason="needs the software GPU's settings")

PROBE = """
struct Arguments { long long* out; long long value; double scale; };
extern "C" __global__ void probe(const Arguments a) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  a.out[i] = STEP * i + static_cast<long long>(a.value * a.scale) + 1000 * gridDim.x;
}
"""
BUILD = KernelBuild("probe", (("STEP", "3"),))


@pytest.fixture(autouse=True)
def cupy(monkeypatch):
    """Clear the launcher's caches before and after a test; let the launcher compile PROBE."""
    import cupy

    caches = (_cuda._cupy, _cuda.nvrtc_version, _cuda.cuda_include_folders, _cuda.gpu_caps)
    caches += (_cuda.fits_cluster,)
    monkeypatch.setattr(_cuda, "source_text", lambda kernel: PROBE)
    monkeypatch.setattr(_cuda, "loaded", OnceMap())
    monkeypatch.setattr(_cache, "_our_files", lambda folder: [])  # other tests use these libraries
    for cache in caches:
        cache.cache_clear()
    yield cupy
    for cache in caches:
        cache.cache_clear()


def launch(out, grid, block, device=0, stream=0, build=BUILD):
    arguments = struct.pack("<qqd", out.data.ptr, 5, 2.0)
    start(Launch(build, grid, block), arguments, Device("cuda", device), stream)


def expected(grid, block):
    return [3 * i + 10 + 1000 * grid for i in range(grid * block)]


# --- launches -------------------------------------------------------------------------------------


def test_a_launch_hands_over_grid_block_arguments_and_stream(cupy):
    """A capture contains only the launches on its stream."""
    out, stream = cupy.zeros(96, np.int64), cupy.cuda.Stream(non_blocking=True)
    _cuda.prepare(BUILD, Device("cuda", 0))
    current = cupy.cuda.get_current_stream()
    current.synchronize()
    with stream:
        stream.begin_capture()
    launch(out, 3, 32, stream=stream.ptr)
    with stream:
        graph = stream.end_capture()
    assert not out.get().any()
    assert cupy.cuda.get_current_stream() == current
    graph.launch(stream)
    stream.synchronize()
    assert out.get().tolist() == expected(3, 32)


@software
def test_a_build_is_compiled_once_for_each_device_and_the_device_stays_current(cupy, monkeypatch):
    compiled, make = [], cupy.RawKernel
    monkeypatch.setattr(cupy, "RawKernel", lambda *args: (compiled.append(args), make(*args))[1])
    with softgpu.settings(devices=3), cupy.cuda.Device(1):
        for device in (0, 2, 1, 0, 2):
            for grid in (1, 5):
                with cupy.cuda.Device(device):
                    out = cupy.zeros(32 * grid, np.int64)
                launch(out, grid, 32, device)
                assert cupy.cuda.runtime.getDevice() == 1
                with cupy.cuda.Device(device):
                    assert out.get().tolist() == expected(grid, 32)
    assert len(compiled) == cunorm.cache_info().cuda_kernels == 3
    cunorm.clear_cache()
    assert cunorm.cache_info().cuda_kernels == 0


SHARED = """
struct Arguments { long long* out; long long last; double unused; };
extern "C" __global__ void probe(const Arguments a) {
  extern __shared__ long long given[];
  __shared__ volatile long long own;
  own = 7;
  given[a.last] = own;
  a.out[0] = given[a.last];
}
"""


@software
@pytest.mark.parametrize(("size", "is_right"), [(8, True), (70_000, True), (69_992, False)])
def test_a_launch_gives_a_block_its_shared_memory_and_no_more(cupy, monkeypatch, size, is_right):
    monkeypatch.setattr(_cuda, "source_text", lambda kernel: SHARED)
    out = cupy.zeros(1, np.int64)
    last = 0 if size == 8 else 70_000 // 8 - 1
    arguments = struct.pack("<qqd", out.data.ptr, last, 0.0)
    with nullcontext() if is_right else pytest.raises(RuntimeError, match="outside of the block's"):
        one = Launch(BUILD, 1, 1, shared=size)
        start(one, arguments, Device("cuda", 0), 0)
        cupy.cuda.Device().synchronize()
        assert out.item() == 7


# --- clusters -------------------------------------------------------------------------------------

PAIRS = KernelBuild(
    "probe", (("STEP", "1"), ("CLUSTER", "2"), ("CLUSTER_OF", "__cluster_dims__(2,1,1)"))
)
GPU = Device("cuda", 0)


@pytest.fixture
def pairs(cupy, monkeypatch):
    """Give the small kernel clusters of two blocks; load and return its build."""
    if int(cupy.cuda.Device(0).compute_capability) < 90:
        pytest.skip("clusters need compute capability 9.0")
    source = PROBE.replace("void probe", "void CLUSTER_OF probe")
    monkeypatch.setattr(_cuda, "source_text", lambda kernel: source)
    _cuda.prepare(PAIRS, GPU)
    return PAIRS


def in_new_thread(work):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


@software
def test_a_gpu_says_whether_clusters_with_the_shared_memory_of_a_launch_fit(pairs):
    for shared in (0, 100_000):
        assert _cuda.fits_cluster(Launch(pairs, 2, 32, shared=shared), GPU)
    with pytest.raises(RuntimeError, match=r"INVALID_VALUE: .* 300000 bytes of dynamic"):
        _cuda.fits_cluster(Launch(pairs, 2, 32, shared=300_000), GPU)


def test_a_thread_without_a_context_finds_the_same_room(cupy, pairs):
    """A thread of autograd may plan a backward whose kernels `warmup` loaded in another thread."""
    function, _ = _cuda.prepare(pairs, GPU)
    assert in_new_thread(lambda: _driver.clusters_that_fit(cupy, function, Launch(pairs, 2, 32)))


def test_a_thread_without_a_context_loads_what_cupy_has_loaded(pairs):
    """CuPy makes a context when it loads a module, but none for a module that it has kept."""
    cunorm.clear_cache()
    assert in_new_thread(lambda: _cuda.prepare(pairs, GPU))


@pytest.mark.parametrize(
    ("functions", "answer"),
    [
        ({"cuOccupancyMaxActiveClusters": lambda *given: 201}, "CUDA_ERROR_INVALID_CONTEXT"),
        ({"cuOccupancyMaxActiveClusters": lambda *given: 912}, False),  # INVALID_CLUSTER_SIZE
        ({"cuOccupancyMaxActiveClusters": lambda *given: 0}, False),  # success, but 0 clusters fit
        ({}, False),  # a driver older than clusters
    ],
)
def test_an_error_of_the_driver_is_not_a_lack_of_room(pairs, monkeypatch, functions, answer):
    monkeypatch.setattr(_driver, "library", lambda: SimpleNamespace(**functions))
    named = f"how many clusters of 2 blocks fit: {answer}: "
    with nullcontext() if answer is False else pytest.raises(RuntimeError, match=named):
        assert _cuda.fits_cluster(Launch(pairs, 2, 32), GPU) is answer


@software
@pytest.mark.parametrize("capability", [80, 90])
def test_device_limits_are_those_of_the_gpu_and_are_queried_once(capability):
    with softgpu.settings(capability=capability):
        limits = _cuda.gpu_caps(Device("cuda", 0))
    is_90 = capability == 90
    features = Features(clusters=is_90, async_copies=True, programmatic_launches=is_90)
    shared, l2 = {80: (164 << 10, 40 << 20), 90: (228 << 10, 60 << 20)}[capability]
    assert limits == (132, str(capability), 2048, shared - 1024, shared, l2, features)
    assert _cuda.gpu_caps(Device("cuda", 0)) is limits


@software
@pytest.mark.parametrize(("version", "has_clusters"), [((12, 0), False), ((12, 1), True)])
def test_plans_have_no_clusters_where_nvrtc_cannot_compile_them(
    cupy, monkeypatch, version, has_clusters
):
    monkeypatch.setattr(cupy.cuda.nvrtc, "getVersion", lambda: version)
    assert _cuda.gpu_caps(GPU).features.clusters is has_clusters


# --- errors ---------------------------------------------------------------------------------------


def refused(cupy, build=BUILD):
    with pytest.raises(RuntimeError) as caught:
        launch(cupy.zeros(32, np.int64), 1, 32, build=build)
    return str(caught.value)


def test_a_failed_compile_names_build_options_and_first_errors(cupy, monkeypatch):
    wrong = "".join(f"int one_{n} = missing_{n};\n" for n in range(20))
    monkeypatch.setattr(_cuda, "source_text", lambda kernel: f"#warning odd\n{wrong}{PROBE}")
    text = refused(cupy)
    assert "does not compile the build probe STEP=3" in text
    assert "options: -std=c++17 --fmad=false" in text
    assert "-DSTEP=3" in text
    assert '"missing_0" is undefined' in text
    assert "warning" not in text
    assert len(text.splitlines()) < 15


def test_missing_cuda_headers_are_named_with_the_remedy(cupy, monkeypatch):
    missing = "#include <missing/cuda_bf16.h>\n"  # CuPy itself may find cuda_bf16.h
    monkeypatch.setattr(_cuda, "source_text", lambda kernel: f"{missing}{PROBE}")
    assert 'pip install "cunorm[cuda13]"' in refused(cupy)


@pytest.mark.parametrize("missing", ["need CuPy", "no NVRTC", "13.6.0", "14.0.1", None])
def test_a_library_that_is_missing_or_old_is_named_with_the_remedy(cupy, monkeypatch, missing):
    def fail():
        raise RuntimeError("libnvrtc.so.13: cannot open shared object file")

    out, text = cupy.zeros(32, np.int64), missing
    if missing == "need CuPy":
        monkeypatch.setitem(sys.modules, "cupy", None)
    elif missing == "no NVRTC":
        monkeypatch.setattr(cupy.cuda.nvrtc, "getVersion", fail)
    elif missing:
        monkeypatch.setattr(cupy, "__version__", missing)
        text = rf"need CuPy 14\.1, found {re.escape(missing)}:"
    for version in () if missing else ("14.1.0", "14.10.0", "15.0.0a1"):
        monkeypatch.setattr(cupy, "__version__", version)
        _cuda._cupy.cache_clear()
        launch(out, 1, 32)
    if missing:
        with pytest.raises(ImportError, match=rf'{text}.*pip install "cunorm\[cuda13\]"'):
            launch(out, 1, 32)


HEADERS = {13: "cu13", 12: "cuda_runtime", 14: "cu14", None: "toolkit"}


@pytest.mark.parametrize("major", HEADERS)
def test_the_headers_are_those_of_nvrtcs_own_wheels_or_of_a_toolkit(
    cupy, monkeypatch, tmp_path, major
):
    for folder in HEADERS.values():
        (tmp_path / folder / "include").mkdir(parents=True)
        (tmp_path / folder / "include" / "cuda_fp16.h").touch()
    spec = major and SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(_cuda.importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(cupy.cuda.nvrtc, "getVersion", lambda: (major or 13, 0))
    monkeypatch.setattr(cupy.cuda, "get_cuda_path", lambda: str(tmp_path / "toolkit"))
    assert _cuda.cuda_include_folders() == (tmp_path / HEADERS[major] / "include",)
