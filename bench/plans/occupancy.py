# SPDX-License-Identifier: MIT
"""How many blocks of a kernel fit a multiprocessor, from ptxas's resource usage."""

from __future__ import annotations

from typing import NamedTuple

_WARP = 32
_REGISTERS = 64 << 10  # of a multiprocessor; also the limit of a block
_PARTITIONS = 4  # of a multiprocessor; each holds the registers of its own warps
_REGISTER_UNIT = 256  # allocation unit of a warp's registers


class Architecture(NamedTuple):
    """The limits of a multiprocessor, and the number of multiprocessors of a GPU.

    The limits are from the CUDA C++ Programming Guide, "Technical Specifications per Compute
    Capability"; the allocation of registers and shared memory, here and in `occupancy`, from
    cuda_occupancy.h of CUDA 13.0; the size of L2 as PyTorch prints it.
    """

    warps: int
    blocks: int
    shared: int  # bytes
    sm_count: int
    l2: int  # bytes
    shared_unit: int = 128  # allocation unit of a block's shared memory
    reserved: int = 1 << 10  # bytes of each block's shared memory that the driver takes


# By compute capability: T4, A100, RTX 3090, RTX 4090, H200, B200, RTX 5090.
ARCHITECTURES = {
    "75": Architecture(32, 16, 64 << 10, sm_count=40, l2=4 << 20, shared_unit=256, reserved=0),
    "80": Architecture(64, 32, 164 << 10, sm_count=108, l2=40 << 20),
    "86": Architecture(48, 16, 100 << 10, sm_count=82, l2=6 << 20),
    "89": Architecture(48, 24, 100 << 10, sm_count=128, l2=72 << 20),
    "90": Architecture(64, 32, 228 << 10, sm_count=132, l2=60 << 20),
    "100": Architecture(64, 32, 228 << 10, sm_count=148, l2=126 << 20),
    "120": Architecture(48, 24, 100 << 10, sm_count=170, l2=96 << 20),
}


def occupancy(architecture: Architecture, threads: int, registers: int, shared: int) -> int:
    """Return how many blocks of so many threads fit a multiprocessor; 0 if not even one does.

    `registers` are those of a thread, `shared` is a block's bytes of shared memory.
    """
    warps = -(-threads // _WARP)
    of_warp = _up(registers * _WARP, _REGISTER_UNIT)
    if of_warp * _up(warps, _PARTITIONS) > _REGISTERS:
        return 0
    by_registers = _REGISTERS // _PARTITIONS // of_warp * _PARTITIONS // warps
    of_block = _up(shared + architecture.reserved, architecture.shared_unit)
    by_shared = architecture.shared // max(1, of_block)
    return min(architecture.blocks, architecture.warps // warps, by_registers, by_shared)


def l2_keeps(architecture: str, size: int) -> bool:
    """Whether the next launch finds `size` bytes in L2, as is assumed for up to half of L2."""
    return size <= ARCHITECTURES[architecture].l2 // 2


def _up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
