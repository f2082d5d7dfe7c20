# SPDX-License-Identifier: MIT
"""A model of a GPU that predicts, from a kernel's SASS, what share of copy speed it can reach.

Nothing here was measured with these kernels. A row norm and a launch of a group norm are bound by
three things, each as a share of the speed of a device-to-device copy of their own bytes (more than
1: it is no bound):

- issue: a multiprocessor starts so many warp instructions a clock, and of a group norm's so many
  special functions;
- latency: what is loaded at a time arrives a loaded memory latency later (Little's law), and reads
  are a part of the traffic alone;
- traffic: a row that is read twice moves more than the operator's bytes, where L2 does not hold it.

A group norm's block copies all of its tile at once, and then computes and reads nothing. So its
tile counts as bytes in flight for the share of the block's time (`block_time`) that is the latency.
Where a group norm takes several launches, each has its own bytes, which are in memory or, if the
launch before left them there, in L2; its call takes the sum of their times (`launch_time`).

The model does not see what a row norm's blocks wait for beside row operands (barriers, clusters,
weight from L2, the latency of arithmetic), that their phases follow one another (`overlap_share`
does), a last wave of blocks, partial sums that a streamed backward adds to in memory, that blocks
of a cluster wait for each other, nor how well copies coalesce. So a prediction is a ceiling, and
one that misses a goal is worth more than one that meets it.
"""

from __future__ import annotations

from math import ceil, inf
from typing import NamedTuple


class Gpu(NamedTuple):
    """What the model asks of a GPU; seconds, bytes and hertz."""

    sm_count: int
    clock: float
    copy: float  # bytes a second that a copy reads and writes
    latency: float = 0.85e-6  # of a load from memory while memory is busy
    l2_latency: float = 0.15e-6  # of a load that L2 holds
    issue_slots: int = 4  # warp instructions a multiprocessor starts in a clock
    special: int = 16  # roots, powers, reciprocals and the like, of threads, the same
    sm_bytes: int = 64  # that a multiprocessor gets from L2 in a clock


# By compute capability. Others have no prediction.
# - sm_count, clock (boost) and peak bandwidth: NVIDIA's data sheets and white papers of A100
#   80GB SXM (2.04 TB/s), H200 SXM (4.8 TB/s) and B200 SXM (8 TB/s).
# - copy: H200's is that which the goals are stated with, 0.9 of its peak. Of the others it is the
#   peak times a share: 0.83 for an A100, about what device-to-device copies reach there, and for a
#   B200 0.88, somewhat less than H200's.
# - latency: a load takes 0.3 to 0.45 µs on an idle H100 or A100 (published pointer chases: 470 to
#   660 clocks). With memory near its peak it is about twice that: 0.85 µs, which says that a copy
#   needs 14 KB of reads in flight on a multiprocessor of an H200. No better figure for the others.
# - l2_latency: about 260 clocks (published pointer chases on A100 and H100).
# - issue_slots: four schedulers, since Volta. special: the CUDA C++ Programming Guide, "Arithmetic
#   Instructions", results a clock and multiprocessor.
# - sm_bytes: the port of a multiprocessor's first cache (published microbenchmarks since Volta).
GPUS = {
    "80": Gpu(sm_count=108, clock=1.410e9, copy=1.7e12),
    "90": Gpu(sm_count=132, clock=1.755e9, copy=4.3e12),
    "100": Gpu(sm_count=148, clock=1.850e9, copy=7.0e12),
}
LAUNCH = 3e-6  # seconds from the end of a kernel to the work of the next on its stream
# Seconds that a block of a group norm waits for its sums: in the SASS of a forward some 6 barriers,
# 25 shuffles and 15 loads from shared memory follow one another, each about 30 clocks (published
# microbenchmarks), with two divisions, a root and 100 additions of 4 clocks between them.
REDUCTIONS = 1e-6
ELEMENTS = 1 << 26  # of x, in all predictions


class Traffic(NamedTuple):
    """Bytes for each element of x that an operator must move."""

    reads: int
    writes: int

    @property
    def total(self) -> int:
        """Both."""
        return self.reads + self.writes


class Shares(NamedTuple):
    """The ceilings as shares of copy speed; a prediction is the least of them, and 1 at most."""

    issue: float
    latency: float
    traffic: float

    @property
    def prediction(self) -> float:
        """The share of copy speed that the model predicts."""
        return min(1.0, *self)

    @property
    def limit(self) -> str:
        """Name what bounds the prediction."""
        name, share = min(self._asdict().items(), key=lambda item: item[1])
        return name if share < 1.0 else "copy"


class ParamGrad(NamedTuple):
    """What param_grad does after a backward.

    Attributes
    ----------
    partial_bytes
        Of all partial sums: the backward writes them, this reads them.
    serial_loads
        Loads that a thread makes one after another, each batch that is in flight together once.
    """

    partial_bytes: int
    serial_loads: float


def shares(
    gpu: Gpu,
    traffic: Traffic,
    instructions: float,
    bytes_in_flight: float,
    reads: float,
    special: float = 0.0,
) -> Shares:
    """Return the ceilings of a kernel.

    Parameters
    ----------
    gpu
        Where it runs.
    traffic
        What the operator must move.
    instructions
        Warp instructions times 32 for each element of x.
    bytes_in_flight
        Bytes of reads in flight on a multiprocessor.
    reads
        Bytes for each element of x that it reads; more than `traffic.reads` if a row twice.
    special
        Of the instructions, special functions; 0 where they are not looked at.

    Notes
    -----
    With n elements a second on a multiprocessor:

    - copy speed:  n = copy / sm_count / (reads + writes)
    - issue:       n = clock * issue_slots * 32 / instructions, or clock * gpu.special / special
    - latency:     n = bytes_in_flight / latency / (bytes that the kernel reads)
    """
    at_copy_speed = gpu.copy / gpu.sm_count / traffic.total
    started = gpu.special / special if special else inf
    issued = gpu.clock * min(gpu.issue_slots * 32 / instructions, started)
    read = bytes_in_flight / gpu.latency / reads
    return Shares(
        issued / at_copy_speed, read / at_copy_speed, traffic.total / (reads + traffic.writes)
    )


class Blocks(NamedTuple):
    """The blocks of a group norm's launch.

    Attributes
    ----------
    tile
        Bytes that a block reads.
    instructions
        That each of its warps executes.
    warps
        Of a block.
    latency
        Seconds until what it reads begins to arrive: of memory or of L2.
    """

    tile: float
    instructions: float
    warps: int
    latency: float


def block_time(gpu: Gpu, blocks: Blocks, at_once: int = 1) -> float:
    """Return the seconds that so many blocks take which have a multiprocessor to themselves."""
    copied = at_once * blocks.tile / (gpu.sm_bytes * gpu.clock)
    turns = max(1.0, at_once * blocks.warps / gpu.issue_slots)
    return blocks.latency + copied + blocks.instructions * turns / gpu.clock + REDUCTIONS


def grid_time(gpu: Gpu, blocks: Blocks, grid: int, blocks_per_sm: int) -> float:
    """Return the seconds that the multiprocessor with most blocks of a grid takes."""
    most = ceil(grid / gpu.sm_count)
    return ceil(most / blocks_per_sm) * block_time(gpu, blocks, min(most, blocks_per_sm))


def launch_time(gpu: Gpu, moved: float, prediction: float, blocks: Blocks) -> float:
    """Return the seconds of a launch among others on its stream, which moves so many bytes.

    It begins with the latency of its first blocks and ends with what its last ones compute.
    """
    ends = block_time(gpu, blocks._replace(tile=0.0))
    return LAUNCH + moved / gpu.copy / prediction + ends


def overlap_share(gpu: Gpu, traffic: Traffic, row_bytes: float, period: float) -> float:
    """Return the share of copy speed at which blocks read that do one thing after another.

    Not a part of the prediction: it says where few blocks have nothing to overlap with.

    Parameters
    ----------
    gpu, traffic
        As in `shares`.
    row_bytes
        What the blocks of a multiprocessor read for a row each.
    period
        Seconds from a row of a block to its next: the latencies that it waits for and the time in
        which it issues its own instructions, or what is left of those where copies go on meanwhile.
    """
    needed = gpu.copy / gpu.sm_count * traffic.reads / traffic.total
    return row_bytes / period / needed


def call_prediction(
    gpu: Gpu, traffic: Traffic, prediction: float, param_grad: ParamGrad | None
) -> float:
    """Return the share of copy speed of a backward with param_grad, for an x of `ELEMENTS`."""
    ideal = ELEMENTS * traffic.total / gpu.copy
    return ideal / (ideal / prediction + param_grad_time(gpu, param_grad))


def param_grad_time(gpu: Gpu, param_grad: ParamGrad | None) -> float:
    """Return the seconds that param_grad adds to a backward, if it follows.

    The main kernel writes the partial sums at copy speed; param_grad reads them at copy speed or,
    if that takes longer, at the latency of L2 for each of a thread's serial loads.
    """
    if param_grad is None:
        return 0.0
    moved = param_grad.partial_bytes / gpu.copy
    return moved + LAUNCH + max(moved, param_grad.serial_loads * gpu.l2_latency)
