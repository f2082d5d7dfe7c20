# SPDX-License-Identifier: MIT
"""Variables of modules: initial values, and sharing between kernels and the host."""

from __future__ import annotations

import ctypes
from ctypes import byref

from tests import softgpu
from tests.softgpu.launching import cupy

PTX = b""".version 8.0
.target sm_90
.address_size 64
.visible .global .align 4 .u32 chosen;
.visible .global .align 4 .b8 reached[32];
.visible .global .align 8 .f64 halves[3] = {0d3FE0000000000000, 0d3FF8000000000000};
.visible .entry k() {
  .reg .u32 %r<4>;
  .reg .u64 %rd<4>;
  ld.global.u32 %r1, [chosen];
  mul.wide.u32 %rd1, %r1, 4;
  mov.u64 %rd2, reached;
  add.u64 %rd3, %rd2, %rd1;
  atom.global.add.u32 %r2, [%rd3], 1;
  red.global.add.u32 [reached+28], 1;
  ret;
}
"""


def test_variables_are_shared_with_kernels_and_begin_with_their_initial_values():
    cupy.zeros(1, "f")  # creates a context
    driver, module, kernel = softgpu.load(), ctypes.c_void_p(), ctypes.c_void_p()
    assert driver.cuModuleLoadData(byref(module), PTX) == 0
    assert driver.cuModuleGetFunction(byref(kernel), module, b"k") == 0

    def variable(name: bytes, kind: type) -> ctypes.Array:
        address, size = ctypes.c_uint64(), ctypes.c_size_t()
        assert driver.cuModuleGetGlobal_v2(byref(address), byref(size), module, name) == 0
        return (kind * (size.value // ctypes.sizeof(kind))).from_address(address.value)

    chosen, reached = variable(b"chosen", ctypes.c_uint), variable(b"reached", ctypes.c_uint)
    assert list(variable(b"halves", ctypes.c_double)) == [0.5, 1.5, 0]
    assert (list(chosen), list(reached)) == ([0], [0] * 8)
    for chosen[0] in (2, 5):
        sizes = (2, 1, 1, 32, 1, 1, 0)
        assert driver.cuLaunchKernel(kernel, *sizes, None, None, None) == 0
    assert driver.softgpu_finish() == 0
    assert list(reached) == [0, 0, 64, 0, 0, 64, 0, 128]
