# SPDX-License-Identifier: MIT
"""The occupancies of `python -m bench static` are those of CUDA's header."""

from __future__ import annotations

import subprocess
from itertools import product

import pytest

from bench.plans.model import ARCHITECTURES, occupancy

THREADS, REGISTERS = (32, 96, 128, 256, 320, 512, 1024), (16, 24, 33, 40, 64, 65, 128, 168, 255)
SHARED = (0, 1, 1028, 4095, 12_345, 49_152)


# Reads a compute capability, limits and a kernel's resources for each case; prints occupancies.
PROGRAM = """
#include <cstddef>
#include <cstdio>
#include <cuda_occupancy.h>

int main() {
  int capability, warps, shared, reserved, threads, registers, of_block;
  while (std::scanf("%d %d %d %d %d %d %d", &capability, &warps, &shared, &reserved, &threads,
                    &registers, &of_block) == 7) {
    cudaOccDeviceProp gpu;
    gpu.computeMajor = capability / 10;
    gpu.computeMinor = capability % 10;
    gpu.maxThreadsPerBlock = 1024;
    gpu.maxThreadsPerMultiprocessor = 32 * warps;
    gpu.regsPerBlock = gpu.regsPerMultiprocessor = 65536;
    gpu.warpSize = 32;
    gpu.sharedMemPerBlock = 49152;
    gpu.sharedMemPerMultiprocessor = shared;
    gpu.numSms = 1;
    gpu.sharedMemPerBlockOptin = shared - reserved;
    gpu.reservedSharedMemPerBlock = reserved;
    cudaOccFuncAttributes kernel;
    kernel.maxThreadsPerBlock = 1024;
    kernel.numRegs = registers;
    kernel.sharedSizeBytes = of_block;
    cudaOccDeviceState state;
    cudaOccResult result;
    if (cudaOccMaxActiveBlocksPerMultiprocessor(&result, &gpu, &kernel, &state, threads, 0))
      return 1;
    std::printf("%d\\n", result.activeBlocksPerMultiprocessor);
  }
}
"""


def test_occupancy_is_that_of_cuda_occupancy_h(tmp_path):
    pytest.importorskip("cupy", reason="CuPy is not installed")
    from tests.support.internals import _cuda, compiler

    found = compiler()
    folders = [f for f in _cuda.cuda_include_folders() if (f / "cuda_occupancy.h").is_file()]
    if not folders or found is None:
        pytest.skip("needs cuda_occupancy.h of the CUDA runtime and a C++ compiler")
    cases = list(product(ARCHITECTURES, THREADS, REGISTERS, SHARED))
    of_gpu = {n: f"{n} {one.warps} {one.shared} {one.reserved}" for n, one in ARCHITECTURES.items()}
    lines = [f"{of_gpu[number]} {' '.join(map(str, kernel))}" for number, *kernel in cases]
    (tmp_path / "program.cpp").write_text(PROGRAM)
    command = [*found.command, "-w", f"-I{folders[0]}", "program.cpp", "-o", "program"]
    subprocess.run(command, cwd=tmp_path, check=True)
    options = {"input": "\n".join(lines), "capture_output": True, "text": True, "check": True}
    printed = subprocess.run([tmp_path / "program"], **options).stdout
    got = [occupancy(ARCHITECTURES[number], *kernel) for number, *kernel in cases]
    assert got == list(map(int, printed.split()))
    assert {0, 1, 2, 16, 24, 32} <= set(got)
