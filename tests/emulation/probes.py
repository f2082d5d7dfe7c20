# SPDX-License-Identifier: MIT
"""Small kernels for the emulator's own tests."""

import struct

import numpy as np
import pytest

from . import build
from .emulator import EmulationError, compile_emulated, guarded

ACCESS = (build.INCLUDE / "access.cuh").read_text(encoding="utf-8")


def compile_body(body, declarations="", **options):
    """Compile a kernel `probe` of that body; its arguments are int *in, *out and long long n."""
    source = f"""{ACCESS}
struct Arguments {{ int* in; int* out; long long n; }};
{declarations}
extern "C" __global__ void probe(const Arguments a) {{
  const int t = threadIdx.x;
  const int i = blockIdx.x * blockDim.x + t;
  (void)i;
  {body}
}}
"""
    return compile_emulated(source, "probe", **options)


def run_body(body, grid=1, block=64, *, values=None, n=0, declarations="", **options):
    """Return what the kernel of that body writes to `out`, an integer a thread."""
    values = np.zeros(1, np.int32) if values is None else values
    array, out = guarded(values), guarded(np.empty(grid * block, np.int32), role="output")
    arguments = struct.pack("qqq", array.pointer, out.pointer, n)
    compile_body(body, declarations).run(grid, block, arguments, **options)
    return out.array


def problem_of(body, grid=1, block=64, **options):
    """Return the EmulationError that the kernel of that body ends with."""
    with pytest.raises(EmulationError) as error:
        run_body(body, grid, block, **options)
    return error.value
