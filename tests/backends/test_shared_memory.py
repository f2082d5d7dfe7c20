# SPDX-License-Identifier: MIT
"""Plans of row_norm_backward reserve the shared memory that the kernel uses, within GPU limits."""

from __future__ import annotations

import struct
from random import Random

import numpy as np
import pytest

from tests.support.gpus import ARCHITECTURES, limits_of
from tests.support.internals import (
    DTYPES,
    FLOAT32,
    FLOAT64,
    BackwardTypes,
    Device,
    Features,
    Formula,
    KernelBuild,
    Launch,
    OnceMap,
    RowShape,
    _cuda,
    cuda_backward,
    source_text,
    start,
    workspace_size,
)

DRIVER, DECLARED = 1 << 10, 1 << 10  # bytes that the driver takes, and that the kernel declares
WIDTHS = (1, 8, 33, 100, 400, 512, 1000, 4096, 5003, 12288, 20001, 32768, 65536)
WIDTHS += (100003, 131072, 1 << 20)
# Creates objects in shared memory as the kernel does; writes the size of the dynamic ones to out.
TAKEN = """
extern "C" __global__ void __launch_bounds__(Build::threads) CLUSTER_LAUNCH
    probe(unsigned long long* out) {
  __shared__ Team<Build>::Scratch scratch;
  Team<Build> team(scratch);
  const Arguments<Build> arguments{};
  const Walk<Build> walk(team, BlockShare(1, Team<Build>::blocks), 1, Build::width);
  SharedMemory memory;
  const unsigned char* const first = memory.next;
  StagedRows<Build> staged(memory);
  ParamSums<Build> sums(arguments, walk, memory);
  if (threadIdx.x == 0 && blockIdx.x == 0) out[0] = memory.next - first;
}
"""


def drawn(count: int, seed: int = 0):
    """Yield operands, widths, groups, and the access that alignment allows."""
    random = Random(seed)
    for _ in range(count):
        x = DTYPES[random.choice(("float16", "bfloat16", "float32", "float64"))]
        gate, more = random.choice((None, None, x)), random.choice((None, x))
        weight, is_pre = random.choice((None, x)), random.random() < 0.5
        formula = Formula(
            center=random.random() < 0.5,
            activation="silu" if gate else "identity",
            pre_gate=bool(gate) and is_pre,
        )
        dweight, dbias = random.choice(((False, False), (True, False), (True, True)))
        types = BackwardTypes(
            FLOAT64 if x is FLOAT64 else FLOAT32,
            **{"dy": x, "x": x, "dx": x, "weight": weight, "gate": gate, "dgate": gate},
            **{"dresidual_out": more, "dweight": dweight, "dbias": dbias, "formula": formula},
            bias=x if gate and not is_pre else None,
        )
        yield types, random.choice(WIDTHS), random.choice((1, 3)), random.choice((1, 2, 16))


def plans(count: int, architecture: str):
    """Yield plans for a GPU, with features that it can have."""
    number, random = int(architecture), Random(int(architecture))
    for types, width, groups, access in drawn(count):
        largest = random.choice((8, 16))
        features = random.choice((Features(number >= 90, number >= 80, largest), Features()))
        walk = RowShape(random.choice((1, 7, 1 << 20)), width, groups)
        gpu = limits_of(architecture, features)
        yield types, walk, gpu, cuda_backward(types, walk, access, gpu)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_plan_exceeds_a_gpus_shared_memory_or_the_documented_workspace(architecture):
    for types, walk, gpu, launch in plans(500, architecture):
        macros = dict(launch.build.macros)
        blocks = int(macros["BLOCKS_PER_SM"])
        assert launch.shared + DECLARED <= gpu.shared_memory_per_block_optin
        if launch.shared:
            used = blocks * (launch.shared + DECLARED + DRIVER)
            assert used <= gpu.shared_memory_per_sm, launch
        assert blocks * launch.block * 32 <= 1 << 16, "a thread has at least 32 registers"
        several = int(macros["THREADS_PER_ROW"]) < launch.block
        why = "if a block has several teams, they must add up their sums in shared memory"
        assert not several or macros["SUMS_IN_SHARED"] == "true", why
        assert macros["STAGES"] == "0" or gpu.features.async_copies
        size = workspace_size(types.compute, walk, gpu.sm_count)
        if types.dweight or types.dbias:
            assert launch.sums_size * types.compute.itemsize <= size, launch


@pytest.mark.gpu
def test_a_plan_reserves_the_shared_memory_that_the_kernel_uses(monkeypatch):
    import cupy

    monkeypatch.setattr(_cuda, "loaded", OnceMap())
    text = source_text("row_norm_backward") + TAKEN
    monkeypatch.setattr(_cuda, "source_text", lambda kernel: text)
    gpu = _cuda.gpu_caps(Device("cuda", 0))
    seen, out = set(), cupy.zeros(1, np.uint64)
    for types, width, groups, access in drawn(12):
        plan = cuda_backward(types, RowShape(1 << 20, width, groups), access, gpu)
        macros, cluster = dict(plan.build.macros), plan.build.cluster
        probe = Launch(
            KernelBuild("probe", plan.build.macros), cluster, plan.block, shared=plan.shared
        )
        start(probe, struct.pack("<q", out.data.ptr), Device("cuda", 0), 0)
        assert int(out.get()[0]) == plan.shared, plan
        seen.add((macros["STAGES"] > "0", macros["SUMS_IN_SHARED"]))
    assert len(seen) == 3
