# SPDX-License-Identifier: MIT
"""A model of a GPU that predicts, from a kernel's SASS, what share of copy speed it can reach.

Nothing here was measured with these kernels. A row norm is bound by three things, each as a share
of the speed of a device-to-device copy of the operator's own bytes (more than 1: it is no bound):

- issue: a multiprocessor starts so many warp instructions a clock;
- latency: what is loaded at a time arrives a loaded memory latency later (Little's law), and reads
  are a part of the traffic alone;
- traffic: a row that is read twice moves more than the operator's bytes, where L2 does not hold it.

It does not see what blocks wait for beside row operands (barriers, clusters, weight from L2, the
latency of arithmetic), that a block's phases follow one another (`overlap_share` does), a last wave
of blocks, partial sums that a streamed backward adds to in memory, nor how well copies coalesce. So
a prediction is a ceiling, and one that misses a goal is worth more than one that meets it.
"""

from __future__ import annotations

from typing import NamedTuple


class Gpu(NamedTuple):
    """What the model asks of a GPU; seconds, bytes and hertz."""

    sm_count: int
    clock: float
    copy: float  # bytes a second that a copy reads and writes
    l2: int
    latency: float = 0.85e-6  # of a load from memory while memory is busy
    l2_latency: float = 0.15e-6  # of a load that L2 holds
    issue_slots: int = 4  # warp instructions a multiprocessor starts in a clock


# By compute capability. Others have no prediction.
# - sm_count, clock (boost), l2 and peak bandwidth: NVIDIA's data sheets and white papers of A100
#   80GB SXM (2.04 TB/s), H200 SXM (4.8 TB/s) and B200 SXM (8 TB/s).
# - copy: H200's is that which the goals are stated with, 0.9 of its peak. Of the others it is the
#   peak times a share: 0.83 for an A100, about what device-to-device copies reach there, and for a
#   B200 0.88, somewhat less than H200's.
# - latency: a load takes 0.3 to 0.45 µs on an idle H100 or A100 (published pointer chases: 470 to
#   660 clocks). With memory near its peak it is about twice that: 0.85 µs, which says that a copy
#   needs 14 KB of reads in flight on a multiprocessor of an H200. No better figure for the others.
# - l2_latency: about 260 clocks (published pointer chases on A100 and H100).
# - issue_slots: four schedulers, since Volta.
GPUS = {
    "80": Gpu(sm_count=108, clock=1.410e9, copy=1.7e12, l2=40 << 20),
    "90": Gpu(sm_count=132, clock=1.755e9, copy=4.3e12, l2=50 << 20),
    "100": Gpu(sm_count=148, clock=1.850e9, copy=7.0e12, l2=126 << 20),
}
LAUNCH = 3e-6  # seconds from the end of a kernel to the work of the next on its stream
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
    gpu: Gpu, traffic: Traffic, instructions: float, bytes_in_flight: float, reads: float
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
        Bytes for each element of x that the kernel reads from memory; more than `traffic.reads` if
        it reads a row twice.

    Notes
    -----
    With n elements a second on a multiprocessor:

    - copy speed:  n = copy / sm_count / (reads + writes)
    - issue:       n = issue_slots * clock * 32 / instructions
    - latency:     n = bytes_in_flight / latency / (bytes that the kernel reads)
    """
    at_copy_speed = gpu.copy / gpu.sm_count / traffic.total
    issued = gpu.issue_slots * gpu.clock * 32 / instructions
    read = bytes_in_flight / gpu.latency / reads
    return Shares(
        issued / at_copy_speed, read / at_copy_speed, traffic.total / (reads + traffic.writes)
    )


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
    """Return the share of copy speed of a backward with param_grad, for an x of `ELEMENTS`.

    The time is that of the main kernel at its own prediction, plus a launch, plus param_grad's. The
    main kernel writes the partial sums at copy speed; param_grad reads them at copy speed or, if
    that takes longer, at the latency of L2 for each of a thread's serial loads.
    """
    ideal = ELEMENTS * traffic.total / gpu.copy
    time = ideal / prediction
    if param_grad is not None:
        moved = param_grad.partial_bytes / gpu.copy
        time += moved + LAUNCH + max(moved, param_grad.serial_loads * gpu.l2_latency)
    return ideal / time
