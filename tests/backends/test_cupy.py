# SPDX-License-Identifier: MIT
"""CuPy has the attributes that the launcher uses; CuPy's stand-in adds CuPy's compile options."""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder

import pytest

from tests import softgpu
from tests.support.processes import in_process

pytestmark = pytest.mark.gpu

SEARCHED = [path for path in sys.path if path != softgpu.STANDIN]
SCRIPT = """
import struct
import cupy
from cupy.cuda import compiler, driver, function, runtime
from tests import softgpu
from tests.support.internals import KernelBuild, _cuda
from tests.support.nvrtc import CUPY_OPTIONS

assert not cupy.__file__.startswith(softgpu.STANDIN), cupy.__file__

class Stream:
    reads = 0

    @property
    def ptr(self):
        self.reads += 1
        return 0

stream, arguments = Stream(), struct.pack("<qqd", 0, 5, 2.0)
block = np.frombuffer(arguments, dtype=_cuda._block_of(len(arguments)))
kernel = function.Function.__new__(function.Function)  # not loaded
try:
    kernel((1,), (1,), (block,), shared_mem=8, stream=stream)
except (runtime.CUDARuntimeError, driver.CUDADriverError):  # no TypeError: arguments are accepted
    assert stream.reads == 1
else:
    raise AssertionError("a kernel that was never loaded was launched")
build = KernelBuild("probe", (("STEP", "3"),))
options = _cuda.compile_options(build)
kernel = cupy.RawKernel("the source", build.kernel, options)
assert (kernel.name, kernel.options) == ("probe", options)
assert callable(driver.funcSetAttribute)
used = {"kernel", "compile", "shared_size_bytes", "max_dynamic_shared_size_bytes"}
assert used <= vars(cupy.RawKernel).keys()
assert "ptr" in vars(function.Function)

class Program:
    def __init__(self, *given, **more):
        pass

    def compile(self, options, log_stream):
        raise KeyError(*options)

compiler._NVRTCProgram = Program  # with these three changes, no device is needed
compiler._preprocess = lambda *given: ""
compiler._get_arch_for_options_for_nvrtc = lambda arch=None: ("-arch=sm_90", "cubin")
try:
    compiler._compile_with_cache_cuda("the source", options, "90", cache_in_memory=True)
except KeyError as given:
    assert sorted(given.args) == sorted((*options, "-arch=sm_90", *CUPY_OPTIONS)), given.args
names = ("L2CacheSize", "MaxSharedMemoryPerBlockOptin", "MaxSharedMemoryPerMultiprocessor")
assert all(hasattr(runtime, f"cudaDevAttr{name}") for name in names)
"""


@pytest.mark.skipif(PathFinder.find_spec("cupy", SEARCHED) is None, reason="CuPy is not installed")
def test_cupy_accepts_the_launchers_argument_block_and_options():
    """This needs another process: without a GPU, `import cupy` imports the stand-in here."""
    args = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = os.pathsep.join(path for path in args if path != softgpu.STANDIN)
    in_process(SCRIPT, PYTHONPATH=paths, CUDA_VISIBLE_DEVICES="")


@pytest.mark.skipif(not softgpu.is_loaded(), reason="there is a GPU: CuPy is not the stand-in")
def test_the_stand_in_adds_the_options_that_cupy_adds():
    from cupy import _kernels

    from tests.support.nvrtc import CUPY_OPTIONS

    assert _kernels.ADDED_OPTIONS == CUPY_OPTIONS
