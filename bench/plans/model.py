# SPDX-License-Identifier: MIT
"""A model of GPUs, which predicts from a kernel's SASS the share of copy speed that it reaches.

No number here was measured with cunorm. This file has the constants and their sources, and
the costs of starting launches; rounds.py computes how long a launch runs. `occupancy` is not a
model: it computes how many blocks fit a multiprocessor as CUDA does.

The model counts the bytes of accesses, not the sectors that they touch. It ignores the partial sums
that a streamed backward keeps in memory, and multiprocessors that stay idle because a cluster's
blocks must be neighbours. It gives H100 the plans of H200, although the L2 of H100 is smaller. All
three make predictions too high.
"""

from __future__ import annotations

from typing import NamedTuple


class Gpu(NamedTuple):
    """The constants of a GPU in the model, in seconds, bytes and hertz."""

    architecture: str  # compute capability
    sm_count: int
    clock: float
    copy: float  # bytes that a copy reads and writes in a second
    latency: float = 0.45e-6  # of a load from idle memory
    l2_latency: float = 0.15e-6  # of a load from L2
    fma: float = 4.0  # float32 warp instructions that a multiprocessor starts per clock
    sm_bytes: int = 64  # bytes that a multiprocessor gets from L2 per clock


# - sm_count, clock (boost) and peak bandwidth: NVIDIA's data sheets and white papers of A100
#   80GB SXM (2.04 TB/s), H100 SXM (3.35 TB/s), H200 SXM (4.8 TB/s) and B200 SXM (8 TB/s).
# - copy: 0.9 of the peak on H100 and H200; QuACK's authors measured 3.0 TB/s for a clone on H100.
#   For A100 it is 0.83 of the peak, which device-to-device copies roughly reach. For B200 it is
#   0.88 of the peak, an assumption: somewhat less than the 0.9 of H200.
# - latency: a load takes 0.3 to 0.45 µs on an idle H100 or A100 (published pointer chases: 470 to
#   660 clocks). `rate` in rounds.py adds the waits for other loads.
# - l2_latency: about 260 clocks (published pointer chases on A100 and H100).
# - fma: the CUDA C++ Programming Guide, "Arithmetic Instructions".
# - sm_bytes: the port of a multiprocessor's L1 (published microbenchmarks since Volta).
GPUS = {
    "A100": Gpu("80", sm_count=108, clock=1.410e9, copy=1.7e12, fma=2.0),
    "H100": Gpu("90", sm_count=132, clock=1.755e9, copy=3.0e12),
    "H200": Gpu("90", sm_count=132, clock=1.755e9, copy=4.3e12),
    "B200": Gpu("100", sm_count=148, clock=1.850e9, copy=7.0e12),
}
MODELLED = tuple(dict.fromkeys(gpu.architecture for gpu in GPUS.values()))
# Warp instructions that a multiprocessor starts per clock, in all and by pipe. According to the
# guide, a multiprocessor has four schedulers. Each clock it gives 64 results of integers, logic and
# conversions to 16 bits, 16 of roots, powers, reductions of a warp and other conversions, and 32 of
# shuffles; a warp instruction has 32 results. Multiplications of integers (64 results, too) are on
# the pipe of fma (NVIDIA's descriptions of the pipes in its forum). Two floats of a packed
# instruction are taken to need as long there as two instructions.
SLOTS, HALF_FMA, INTEGER, SPECIAL, SHUFFLES = 4.0, 2.0, 2.0, 0.5, 1.0
# Seconds from the moment a block has its own sums until it has those of all blocks of its cluster:
# an estimate. The latency of another block's shared memory is 0.1 µs (published); the rest is
# waiting for the slowest block.
EXCHANGE = 0.5e-6
L1_CLOCKS = 40  # of a load from the first-level cache (published pointer chases: 33 to 40)
LAUNCH = 3e-6  # seconds from the end of a kernel to the start of the next on its stream
# Seconds from the end of a call's first launch to the start of its second, if the second is set up
# meanwhile (programmatic dependent launch, from compute capability 9.0 on): an estimate.
DEPENDENT_LAUNCH = 1e-6
ELEMENTS = 1 << 26  # of x in predictions, except those for a few rows or samples (planned.py)


class Traffic(NamedTuple):
    """Bytes read and written, by an operator for each element of x, or by a `Round` (rounds.py)."""

    reads: float
    writes: float

    @property
    def total(self) -> float:
        """Reads and writes."""
        return self.reads + self.writes


class Work(NamedTuple):
    """The instructions of a warp, in all and by pipe, and its waits."""

    total: float = 0.0
    alone: float = 0.0  # clocks from first to last instruction if it has its scheduler to itself
    fma: float = 0.0
    half_fma: float = 0.0  # on the same pipe as fma, at most two per clock
    integer: float = 0.0
    special: float = 0.0
    shuffles: float = 0.0
    shared: float = 0.0  # clocks of the multiprocessor's shared memory and L1
    exchanges: float = 0.0  # how often the warp waits for the sums of its cluster

    def plus(self, other: Work, times: float = 1.0) -> Work:
        """Return the sum of this and a multiple of the other."""
        return Work(*(one + times * two for one, two in zip(self, other, strict=True)))


def issue_clocks(gpu: Gpu, work: Work) -> dict[str, float]:
    """Return the clocks that each pipe of a multiprocessor takes for a warp's work."""
    return {
        "issue": work.total / SLOTS,
        "fma": work.fma / gpu.fma + work.half_fma / HALF_FMA,
        "integer": work.integer / INTEGER,
        "special": work.special / SPECIAL,
        "shuffles": work.shuffles / SHUFFLES,
        "shared memory": work.shared,
    }


def copy_time(gpu: Gpu, moved: float) -> float:
    """Return the seconds of a copy that moves that many bytes, including its launch."""
    return LAUNCH + gpu.latency + moved / gpu.copy


def between(gpu: Gpu) -> float:
    """Return the seconds from the end of a call's first launch to the start of its second."""
    return DEPENDENT_LAUNCH if int(gpu.architecture) >= 90 else LAUNCH


def param_grad_time(gpu: Gpu, partial_bytes: int, serial_loads: float) -> float:
    """Return the seconds that partial sums and param_grad add to a backward.

    The main kernel writes the partial sums at copy speed. param_grad reads them at copy speed, or
    takes the latency of L2 for each of a thread's serial loads, whichever is longer.
    """
    moved = partial_bytes / gpu.copy
    return moved + between(gpu) + max(moved, serial_loads * gpu.l2_latency)


# --- occupancy ------------------------------------------------------------------------------------

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
    by_registers = _REGISTERS // _PARTITIONS // of_warp * _PARTITIONS // warps
    of_block = _up(shared + architecture.reserved, architecture.shared_unit)
    by_shared = architecture.shared // max(1, of_block)
    return min(architecture.blocks, architecture.warps // warps, by_registers, by_shared)


def l2_keeps(architecture: str, size: int) -> bool:
    """Whether the next launch finds `size` bytes in L2, as is assumed for up to half of L2."""
    return size <= ARCHITECTURES[architecture].l2 // 2


def _up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
