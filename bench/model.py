# SPDX-License-Identifier: MIT
"""A model of a GPU that predicts, from a kernel's SASS, what share of copy speed it can reach.

Nothing here was measured with these kernels. Three ceilings bound a row norm, and a launch of a
group norm. Each is a share of the speed of a device-to-device copy of the same bytes; a share above
1 is no bound:

- issue: a multiprocessor starts a limited number of warp instructions in a clock, and of special
  functions in a group norm;
- latency: loads in flight arrive one loaded memory latency later (Little's law); only reads count,
  which are a part of the traffic;
- traffic: a row that is read twice, and not from L2, moves more than the operator's bytes.

A group norm's block copies all of its tile at once, and then computes without reading. So its tile
counts as bytes in flight for the share of the block's time (`block_time`) that is latency. If a
group norm takes several launches, each has its own bytes. These are in memory, or in L2 if the
launch before left them there. The call takes the sum of their times (`launch_time`).

The model ignores what a row norm's blocks wait for besides row operands (barriers, clusters, weight
from L2, the latency of arithmetic), that their phases follow one another (`overlap_share` has
that), a last wave of blocks, partial sums that a streamed backward adds to in memory, that blocks
of a cluster wait for each other, and how well copies coalesce. So a prediction is a ceiling: one
that misses a goal tells more than one that meets it.
"""

from __future__ import annotations

from math import ceil, inf
from typing import NamedTuple


class Gpu(NamedTuple):
    """The model's constants of a GPU, in seconds, bytes and hertz."""

    sm_count: int
    clock: float
    copy: float  # bytes that a copy reads and writes in a second
    latency: float = 0.85e-6  # of a load from busy memory
    l2_latency: float = 0.15e-6  # of a load from L2
    issue_slots: int = 4  # warp instructions that a multiprocessor starts in a clock
    special: int = 16  # threads' roots, powers, reciprocals and the like that it starts in a clock
    sm_bytes: int = 64  # bytes that it gets from L2 in a clock


# By compute capability. Others have no prediction.
# - sm_count, clock (boost) and peak bandwidth: NVIDIA's data sheets and white papers of A100
#   80GB SXM (2.04 TB/s), H200 SXM (4.8 TB/s) and B200 SXM (8 TB/s).
# - copy: the goals state H200's, 0.9 of its peak. For the others it is the peak times a share: 0.83
#   for an A100, about what device-to-device copies reach there, and 0.88 for a B200, somewhat less
#   than H200's.
# - latency: a load takes 0.3 to 0.45 µs on an idle H100 or A100 (published pointer chases: 470 to
#   660 clocks). With memory near its peak it takes about twice that: 0.85 µs, by which a copy needs
#   14 KB of reads in flight on a multiprocessor of an H200. The others have no better figure.
# - l2_latency: about 260 clocks (published pointer chases on A100 and H100).
# - issue_slots: four schedulers, since Volta. special: the CUDA C++ Programming Guide, "Arithmetic
#   Instructions", results a clock and multiprocessor.
# - sm_bytes: the port of a multiprocessor's L1 (published microbenchmarks since Volta).
GPUS = {
    "80": Gpu(sm_count=108, clock=1.410e9, copy=1.7e12),
    "90": Gpu(sm_count=132, clock=1.755e9, copy=4.3e12),
    "100": Gpu(sm_count=148, clock=1.850e9, copy=7.0e12),
}
LAUNCH = 3e-6  # seconds from the end of a kernel to the start of the next on its stream
# Seconds that a block of a group norm waits for its sums: in the SASS of a forward some 6 barriers,
# 25 shuffles and 15 loads from shared memory follow one another, each about 30 clocks (published
# microbenchmarks), with two divisions, a root and 100 additions of 4 clocks between them.
REDUCTIONS = 1e-6
ELEMENTS = 1 << 26  # of x, in all predictions


class Traffic(NamedTuple):
    """The necessary bytes of an operator, for each element of x."""

    reads: int
    writes: int

    @property
    def total(self) -> int:
        """Reads and writes."""
        return self.reads + self.writes


class Shares(NamedTuple):
    """The ceilings as shares of copy speed; the prediction is the least of them, at most 1."""

    issue: float
    latency: float
    traffic: float

    @property
    def prediction(self) -> float:
        """The predicted share of copy speed."""
        return min(1.0, *self)

    @property
    def limit(self) -> str:
        """The name of what bounds the prediction."""
        name, share = min(self._asdict().items(), key=lambda item: item[1])
        return name if share < 1.0 else "copy"


class ParamGrad(NamedTuple):
    """The launch of param_grad after a backward.

    Attributes
    ----------
    partial_bytes
        Bytes of all partial sums: the backward writes them, param_grad reads them.
    serial_loads
        Batches of loads that a thread makes one after another; loads of a batch are in flight
        together.
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
        The GPU.
    traffic
        The operator's necessary bytes.
    instructions
        Warp instructions times 32 for each element of x.
    bytes_in_flight
        Bytes of reads in flight on a multiprocessor.
    reads
        Bytes that the kernel reads for each element of x; more than `traffic.reads` if it reads
        rows twice.
    special
        Special functions among the instructions; 0 leaves them out.

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
        Instructions that each of its warps runs.
    warps
        Warps of a block.
    latency
        Seconds until its reads begin to arrive, from memory or from L2.
    """

    tile: float
    instructions: float
    warps: int
    latency: float


def block_time(gpu: Gpu, blocks: Blocks, at_once: int = 1) -> float:
    """Return the seconds of `at_once` blocks that have a multiprocessor to themselves."""
    copied = at_once * blocks.tile / (gpu.sm_bytes * gpu.clock)
    turns = max(1.0, at_once * blocks.warps / gpu.issue_slots)
    return blocks.latency + copied + blocks.instructions * turns / gpu.clock + REDUCTIONS


def grid_time(gpu: Gpu, blocks: Blocks, grid: int, blocks_per_sm: int) -> float:
    """Return the seconds of the multiprocessor that has most blocks of a grid."""
    most = ceil(grid / gpu.sm_count)
    return ceil(most / blocks_per_sm) * block_time(gpu, blocks, min(most, blocks_per_sm))


def launch_time(gpu: Gpu, moved: float, prediction: float, blocks: Blocks) -> float:
    """Return the seconds of a launch that moves so many bytes, in a sequence of launches.

    It begins with the latency of its first blocks and ends with the arithmetic of its last ones.
    """
    ends = block_time(gpu, blocks._replace(tile=0.0))
    return LAUNCH + moved / gpu.copy / prediction + ends


def overlap_share(gpu: Gpu, traffic: Traffic, row_bytes: float, period: float) -> float:
    """Return the share of copy speed of blocks that do one thing after another.

    Not a part of the prediction: it shows plans whose few blocks have nothing to overlap with.

    Parameters
    ----------
    gpu, traffic
        As in `shares`.
    row_bytes
        Bytes that the blocks of a multiprocessor read for one row each.
    period
        Seconds from a row of a block to its next: the latencies that it waits for, and the time to
        issue its own instructions; less of both if copies go on meanwhile.
    """
    needed = gpu.copy / gpu.sm_count * traffic.reads / traffic.total
    return row_bytes / period / needed


def call_prediction(
    gpu: Gpu, traffic: Traffic, prediction: float, param_grad: ParamGrad | None
) -> float:
    """Return the share of copy speed of a backward and param_grad, for an x of `ELEMENTS`."""
    ideal = ELEMENTS * traffic.total / gpu.copy
    return ideal / (ideal / prediction + param_grad_time(gpu, param_grad))


def param_grad_time(gpu: Gpu, param_grad: ParamGrad | None) -> float:
    """Return the seconds that param_grad adds to a backward; 0 without it.

    The main kernel writes the partial sums at copy speed. param_grad reads them at copy speed, or
    takes the latency of L2 for each of a thread's serial loads, whichever is longer.
    """
    if param_grad is None:
        return 0.0
    moved = param_grad.partial_bytes / gpu.copy
    return moved + LAUNCH + max(moved, param_grad.serial_loads * gpu.l2_latency)
