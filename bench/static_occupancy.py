# SPDX-License-Identifier: MIT
"""How many blocks of a kernel a multiprocessor holds at once, from what ptxas says of it."""

from __future__ import annotations

from typing import NamedTuple

_WARP = 32
_REGISTERS = 64 << 10  # of a multiprocessor, and at most of a block
_PARTITIONS = 4  # of a multiprocessor; a warp's registers are in one of them
_REGISTER_UNIT = 256  # in which a warp's registers are allocated


class Architecture(NamedTuple):
    """The limits of a multiprocessor, and how many of them a GPU has.

    From the CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"; how
    registers and shared memory are allocated, here and in `occupancy`, from cuda_occupancy.h of
    CUDA 13.0; the second cache as PyTorch prints it.
    """

    warps: int
    blocks: int
    shared: int  # bytes
    sm_count: int
    l2: int  # bytes of the GPU's second cache
    shared_unit: int = 128  # in which a block's shared memory is allocated
    reserved: int = 1 << 10  # of each block's shared memory, by the driver


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
    """Return how many blocks a multiprocessor holds; 0 where it has not room for one.

    Parameters
    ----------
    architecture
        The limits.
    threads
        Threads of a block.
    registers
        Registers of a thread.
    shared
        Bytes of shared memory of a block.
    """
    warps = -(-threads // _WARP)
    of_warp = _up(registers * _WARP, _REGISTER_UNIT)
    if of_warp * _up(warps, _PARTITIONS) > _REGISTERS:
        return 0
    by_registers = _REGISTERS // _PARTITIONS // of_warp * _PARTITIONS // warps
    by_shared = architecture.shared // max(
        1, _up(shared + architecture.reserved, architecture.shared_unit)
    )
    return min(architecture.blocks, architecture.warps // warps, by_registers, by_shared)


def l2_keeps(architecture: str, size: int) -> bool:
    """Whether half of a GPU's L2 has room for so many bytes, that the next launch reads again."""
    return size <= ARCHITECTURES[architecture].l2 // 2


def _up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
