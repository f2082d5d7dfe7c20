# SPDX-License-Identifier: MIT
"""CuPy itself, without a GPU, takes what the launcher hands it.

In a process of its own: where there is no GPU, `import cupy` imports a stand-in in this one.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder

import pytest

from tests import softgpu
from tests.support.processes import in_process

SEARCHED = [path for path in sys.path if path != softgpu.STANDIN]
pytestmark = pytest.mark.skipif(
    PathFinder.find_spec("cupy", SEARCHED) is None, reason="CuPy is not installed"
)

SCRIPT = """
import struct
import cupy
from cupy.cuda import driver, function, runtime
from tests import softgpu
from tests.support.internals import Build, _cuda

assert not cupy.__file__.startswith(softgpu.STANDIN), cupy.__file__

class Stream:
    asked = 0

    @property
    def ptr(self):
        self.asked += 1
        return 0

stream, arguments = Stream(), struct.pack("<qqd", 0, 5, 2.0)
block = np.frombuffer(arguments, dtype=_cuda._block_of(len(arguments)))
kernel = function.Function.__new__(function.Function)  # one that was never loaded
try:
    kernel((1,), (1,), (block,), stream=stream)
except (runtime.CUDARuntimeError, driver.CUDADriverError):  # not TypeError: it got that far
    assert stream.asked == 1
else:
    raise AssertionError("a kernel that was never loaded was launched")
build = Build("probe", (("STEP", "3"),))
options = _cuda.compile_options(build)
kernel = cupy.RawKernel("the source", build.kernel, options)
assert (kernel.name, kernel.options) == ("probe", options)
assert callable(driver.funcSetAttribute)
assert {"kernel", "compile"} <= vars(cupy.RawKernel).keys()
assert "ptr" in vars(function.Function)
"""


def test_cupy_takes_our_argument_block_and_our_options():
    told = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = os.pathsep.join(path for path in told if path != softgpu.STANDIN)
    in_process(SCRIPT, PYTHONPATH=paths, CUDA_VISIBLE_DEVICES="")
