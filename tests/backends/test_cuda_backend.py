# SPDX-License-Identifier: MIT
"""The CUDA launcher: against a stand-in for CuPy, against CuPy itself without a GPU, and on one."""

from __future__ import annotations

import struct
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from cunorm import _cuda
from cunorm._arrays import Device
from cunorm._builds import Build, Launch
from cunorm._features import Features
from cunorm._loaded import Loaded
from tests.support import nvrtc
from tests.support.nvrtc import CUPY_OPTIONS, ResourceUsage, compile_cubin, resource_usage

PROBE = """
struct Arguments { long long* out; long long value; double scale; };
extern "C" __global__ void probe(const Arguments a) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  a.out[i] = STEP * i + static_cast<long long>(a.value * a.scale);
}
"""
BUILD = Build("probe", (("STEP", "3"),))
ARGUMENTS = struct.pack("<qqd", 0, 5, 2.0)


@pytest.fixture(autouse=True)
def fresh_caches(monkeypatch):
    for module in (_cuda, nvrtc):
        monkeypatch.setattr(module, "source_text", lambda kernel: PROBE)
    monkeypatch.setattr(_cuda, "_loaded", Loaded())
    caches = (
        _cuda._cupy,
        _cuda.nvrtc_version,
        _cuda.cuda_include_folders,
        _cuda.device_limits,
    )
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


class CompileException(Exception):
    """CuPy's, for the stand-in."""


class FakeCupy:
    """CuPy as far as the launcher uses it, on a machine with four devices; keeps a diary."""

    def __init__(self) -> None:
        self.current, self.diary, self.log = 0, [], ""
        fake = self

        class FakeDevice:
            compute_capability = "90"

            def __init__(self, index: int) -> None:
                self.index = index
                self.attributes = {
                    "MultiProcessorCount": 132,
                    "MaxThreadsPerMultiProcessor": 2048,
                    "MaxSharedMemoryPerBlock": 49152,
                }
                fake.diary.append(("device", index))

            def __enter__(self) -> None:
                self.before, fake.current = fake.current, self.index

            def __exit__(self, *exception: object) -> None:
                fake.current = self.before

        self.cuda = SimpleNamespace(
            Device=FakeDevice,
            runtime=SimpleNamespace(getDevice=lambda: fake.current),
            nvrtc=SimpleNamespace(getVersion=lambda: (13, 0)),
            get_cuda_path=lambda: None,
            driver=SimpleNamespace(
                funcSetAttribute=lambda *what: self.diary.append(("attribute", *what))
            ),
            compiler=SimpleNamespace(CompileException=CompileException),
        )

    def RawKernel(self, source, name, options):
        def compile_it() -> None:
            self.diary.append(("compile", name, self.current))
            if self.log:
                raise CompileException(self.log)

        def start(grid, block, arguments, *, stream):
            (argument,) = arguments
            assert isinstance(argument, np.ndarray)
            assert argument.size == 1  # all that CuPy passes by value
            self.diary.append(("launch", grid, block, argument.tobytes(), stream.ptr, self.current))

        members = {
            "compile": staticmethod(compile_it),
            "__call__": staticmethod(start),
            "kernel": SimpleNamespace(ptr=0xF),
        }
        return type("Kernel", (), members)()


@pytest.fixture
def fake(monkeypatch):
    fake = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    return fake


def launches(fake):
    return [entry for entry in fake.diary if entry[0] == "launch"]


def test_a_launch_hands_over_grid_block_arguments_and_stream(fake):
    _cuda.launch(Launch(BUILD, 7, 64), ARGUMENTS, Device("cuda", 0), 0x1234)
    assert launches(fake) == [("launch", (7,), (64,), ARGUMENTS, 0x1234, 0)]
    assert ("device", 0) not in fake.diary  # it was current already


def test_a_launch_enters_the_device_and_leaves_the_callers_current(fake):
    fake.current = 1
    _cuda.launch(Launch(BUILD, 1, 32), ARGUMENTS, Device("cuda", 3), 0)
    assert [entry[-1] for entry in launches(fake)] == [3]
    assert fake.current == 1


def test_a_build_is_compiled_once_for_each_device(fake):
    for index in (0, 2, 0, 2):
        for grid in (1, 5):
            _cuda.launch(Launch(BUILD, grid, 32), ARGUMENTS, Device("cuda", index), 0)
    compiled = [entry for entry in fake.diary if entry[0] == "compile"]
    assert compiled == [("compile", "probe", 0), ("compile", "probe", 2)]


def test_a_failed_compile_names_build_options_and_first_errors(fake):
    errors = [f"row.cuh({line}): error: no" for line in range(20)]
    fake.log = "\n".join(["row.cuh(3): warning: odd", *errors])
    with pytest.raises(RuntimeError) as caught:
        _cuda.launch(Launch(BUILD, 1, 32), ARGUMENTS, Device("cuda", 0), 0)
    text = str(caught.value)
    assert "does not compile the build probe STEP=3" in text
    assert "options: -std=c++17 --fmad=false" in text
    assert "-DSTEP=3" in text
    assert "row.cuh(0): error: no" in text
    assert "warning" not in text
    assert len(text.splitlines()) < 15
    assert fake.current == 0


def test_missing_cuda_headers_are_named_with_the_remedy(fake):
    fake.log = 'dtypes.cuh(6): catastrophic error: cannot open source file "cuda_bf16.h"'
    with pytest.raises(RuntimeError, match=r'pip install "cunorm\[cuda13\]"'):
        _cuda.launch(Launch(BUILD, 1, 32), ARGUMENTS, Device("cuda", 0), 0)


def test_without_cupy_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ImportError, match=r'need CuPy.*pip install "cunorm\[cuda13\]"'):
        _cuda.launch(Launch(BUILD, 1, 32), ARGUMENTS, Device("cuda", 0), 0)


def test_without_nvrtc_the_error_says_what_to_install(fake):
    def missing() -> None:
        raise RuntimeError("libnvrtc.so.13: cannot open shared object file")

    fake.cuda.nvrtc.getVersion = missing
    with pytest.raises(ImportError, match=r'no NVRTC.*pip install "cunorm\[cuda13\]"'):
        _cuda.launch(Launch(BUILD, 1, 32), ARGUMENTS, Device("cuda", 0), 0)


def test_device_limits_are_asked_once(fake):
    limits = _cuda.device_limits(Device("cuda", 2))
    assert limits == (132, "90", 2048, 49152, Features())
    assert _cuda.device_limits(Device("cuda", 2)) is limits
    assert fake.diary == [("device", 2)]


@pytest.mark.parametrize(("blocks", "attributes"), [(1, []), (8, []), (16, [(14, 1)])])
def test_clusters_that_are_not_portable_are_allowed(fake, blocks, attributes):
    build = Build("probe", (("STEP", "3"), ("CLUSTER", str(blocks))))
    _cuda.launch(Launch(build, 16, 64), ARGUMENTS, Device("cuda", 0), 0)
    assert [entry[2:] for entry in fake.diary if entry[0] == "attribute"] == attributes


@pytest.mark.parametrize(
    ("major", "folder"), [(13, "cu13/include"), (12, "cuda_runtime/include"), (14, "cu14/include")]
)
def test_the_headers_are_those_of_nvrtcs_own_wheels(fake, monkeypatch, tmp_path, major, folder):
    for each in ("cu13/include", "cuda_runtime/include", "cu14/include"):
        (tmp_path / each).mkdir(parents=True)
        (tmp_path / each / "cuda_fp16.h").touch()
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(_cuda.importlib.util, "find_spec", lambda name: spec)
    fake.cuda.nvrtc.getVersion = lambda: (major, 0)
    assert _cuda.cuda_include_folders() == (tmp_path / folder,)


def test_the_headers_of_a_toolkit_serve_where_there_are_no_wheels(fake, monkeypatch, tmp_path):
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "cuda_fp16.h").touch()
    monkeypatch.setattr(_cuda.importlib.util, "find_spec", lambda name: None)
    fake.cuda.get_cuda_path = lambda: str(tmp_path)
    assert _cuda.cuda_include_folders() == (tmp_path / "include",)


# CuPy itself, where it is installed ------------------------------------------------------------


def test_cupy_takes_our_argument_block_and_our_stream():
    function = pytest.importorskip("cupy.cuda.function")
    cupy = pytest.importorskip("cupy")
    asked = []

    class Stream:
        @property
        def ptr(self) -> int:
            asked.append("ptr")
            return 0

    kernel = function.Function.__new__(function.Function)  # one that was never loaded
    block = np.frombuffer(ARGUMENTS, dtype=_cuda._block_of(len(ARGUMENTS)))
    if why := _no_driver(cupy):
        with pytest.raises(cupy.cuda.runtime.CUDARuntimeError):  # not TypeError: it got that far
            kernel((1,), (1,), (block,), stream=Stream())
        assert asked == ["ptr"], why


def _no_driver(cupy) -> str | None:
    try:
        cupy.cuda.runtime.getDevice()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return str(error)
    return None


def test_cupy_makes_a_raw_kernel_with_our_options():
    cupy = pytest.importorskip("cupy")
    options = _cuda.compile_options(BUILD)
    kernel = cupy.RawKernel(PROBE, BUILD.kernel, options)
    assert kernel.options == options
    assert kernel.name == "probe"


@pytest.mark.parametrize("architecture", ["75", "80", "86", "89", "90", "100", "120"])
def test_nvrtc_compiles_without_a_gpu_and_says_what_a_kernel_takes(architecture):
    pytest.importorskip("cupy")
    cubin, log = compile_cubin(BUILD, architecture)
    assert cubin.startswith(b"\x7fELF")
    usage = resource_usage(log)
    assert usage.registers > 0
    assert (usage.spill_stores, usage.spill_loads, usage.shared, usage.stack) == (0, 0, 0, 0)


def test_nvrtc_finds_the_headers_of_half_precision(monkeypatch):
    pytest.importorskip("cupy")
    source = f"#include <cuda_fp16.h>\n#include <cuda_bf16.h>\n{PROBE}"
    monkeypatch.setattr(nvrtc, "source_text", lambda kernel: source)
    compile_cubin(BUILD, "90")


def test_nvrtcs_refusal_names_build_options_and_first_errors():
    pytest.importorskip("cupy")
    with pytest.raises(RuntimeError) as caught:
        compile_cubin(Build("probe", (("STEP", "nothing"),)), "90")
    text = str(caught.value)
    assert "NVRTC does not compile the build probe STEP=nothing" in text
    assert 'error: identifier "nothing" is undefined' in text
    assert all(option in text for option in CUPY_OPTIONS)


def test_resource_usage_reads_spills_and_shared_memory():
    log = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'f' for 'sm_90'
ptxas         .     24 bytes stack frame, 8 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 256 bytes smem, 368 bytes cmem[0]
"""
    assert resource_usage(log) == ResourceUsage(255, 8, 16, 256, 24)


# On a GPU --------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_struct_travels_by_value_to_the_stream_that_was_given():
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    current = cupy.cuda.get_current_stream()
    out = cupy.zeros(96, np.int64)
    current.synchronize()
    arguments = struct.pack("<qqd", out.data.ptr, 5, 2.0)
    with stream:
        captured = cupy.cuda.get_current_stream()
    _cuda.launch(Launch(BUILD, 3, 32), arguments, Device("cuda", 0), captured.ptr)
    assert cupy.cuda.get_current_stream() == current
    stream.synchronize()
    assert out.get().tolist() == [3 * i + 10 for i in range(96)]


@pytest.mark.gpu
def test_device_limits_are_those_of_a_gpu():
    limits = _cuda.device_limits(Device("cuda", 0))
    assert limits.sm_count > 0
    assert int(limits.compute_capability) >= 50
    assert limits.max_threads_per_sm >= 1024
    assert limits.shared_memory_per_block >= 48 * 1024
