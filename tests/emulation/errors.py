# SPDX-License-Identifier: MIT
"""What can go wrong in a launch under emulation, in words."""

from __future__ import annotations

import ctypes
import signal

from .guarded import GuardedArray

# As launch.h counts them.
_PROBLEMS = (
    "none",
    "lanes diverge",
    "warps diverge",
    "blocks diverge",
    "partial mask",
    "bad distance",
    "bad rank",
    "not running",
    "misaligned",
    "outside",
    "outside shared",
    "source changed",
    "never waited for",
    "stack overflow",
    "signal",
    "no memory",
)
_STATES = (
    "has not started",
    "waits at a shuffle",
    "waits at __syncwarp",
    "waits at __syncthreads",
    "waits at a cluster barrier",
    "has ended",
)
_ACCESSES = (
    "loads {} bytes at {}",
    "stores {} bytes at {}",
    "loads {} bytes of another block's shared memory, at {} in its own",
    "copies {} bytes to {}",
)


class EmulationError(RuntimeError):
    """A launch that a GPU could have answered with anything.

    Attributes
    ----------
    kind : str
        "lanes diverge", "warps diverge", "blocks diverge", "partial mask", "bad distance",
        "bad rank", "not running", "misaligned", "outside", "outside shared", "source changed",
        "never waited for", "stack overflow", "signal" or "no memory".
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Report(ctypes.Structure):
    """The scheduler's account of a launch."""

    _fields_ = (
        ("problem", ctypes.c_longlong),
        ("block", ctypes.c_longlong),
        ("thread", ctypes.c_longlong),
        ("other_block", ctypes.c_longlong),
        ("other_thread", ctypes.c_longlong),
        ("state", ctypes.c_longlong),
        ("other_state", ctypes.c_longlong),
        ("access", ctypes.c_longlong),
        ("address", ctypes.c_ulonglong),
        ("bytes", ctypes.c_longlong),
        ("rank", ctypes.c_longlong),
        ("signal", ctypes.c_longlong),
    )


def raise_for_report(where: str, report: Report, ranges: dict[str, GuardedArray]) -> None:
    """Raise EmulationError unless the launch went well."""
    kind = _PROBLEMS[report.problem]
    if kind == "none":
        return
    thread = f"thread {report.thread} of block {report.block}"
    place = _place(report.address, ranges)
    access = _ACCESSES[report.access].format(report.bytes, place)
    if kind.endswith("diverge"):
        text = f"{kind}: {_divergence(report, thread)}"
    elif kind == "signal":
        text = f"{signal.Signals(report.signal).name}: {thread}, at {place}"
    else:
        text = {
            "partial mask": f"{thread} calls with a mask that is not 0xffffffff",
            "bad distance": f"{thread} shuffles over a distance that is not 0 to 31",
            "bad rank": f"{thread} loads from rank {report.rank}, which its cluster does not have",
            "not running": f"{thread} loads from the shared memory of block {report.other_block}, "
            f"which {_STATES[report.other_state]}",
            "misaligned": f"misaligned: {thread} {access}",
            "outside": f"outside every array: {thread} {access}",
            "outside shared": f"outside the __shared__ arrays: {thread} {access}",
            "source changed": f"{thread} waits for a copy whose source was written in the "
            f"meantime, {report.bytes} bytes at {place}",
            "never waited for": f"{thread} has ended and never waited for its copy of "
            f"{report.bytes} bytes at {place}",
            "stack overflow": f"stack overflow: {thread}",
            "no memory": "no memory for the stacks of the threads",
        }[kind]
    raise EmulationError(kind, where + text)


def _divergence(report: Report, thread: str) -> str:
    """Return what the threads wait for that part ways."""
    other = f"thread {report.other_thread}"
    if report.other_block != report.block:
        other += f" of block {report.other_block}"
    state, other_state = _STATES[report.state], _STATES[report.other_state]
    if state == other_state:
        other_state += " of another type or distance"
    return f"{thread} {state}, {other} {other_state}"


def raise_for_disturbance(where: str, ranges: dict[str, GuardedArray]) -> None:
    """Raise EmulationError if bytes around an array were overwritten."""
    for array in ranges.values():
        if array.role != "input" and (disturbed := array.disturbed()).size > 0:
            place = _place(array.begin + int(disturbed[0]), ranges)
            raise EmulationError("outside", f"{where}outside every array: a store at {place}")


def _place(address: int, ranges: dict[str, GuardedArray]) -> str:
    """Return an address in words, from the array that is nearest."""
    text = f"{address:#x}"
    distances = {
        name: max(array.begin - address, address - (array.begin + array.nbytes - 1), 0)
        for name, array in ranges.items()
    }
    name = min(distances, key=distances.__getitem__, default=None)
    if name is None or distances[name] > 1 << 20:
        return text
    array = ranges[name]
    size = f"{name} ({array.nbytes} bytes, {array.role})"
    if address < array.begin:
        return f"{text}, {array.begin - address} bytes before {size}"
    if address >= array.begin + array.nbytes:
        return f"{text}, {address - array.begin - array.nbytes} bytes past the end of {size}"
    return f"{text}, byte {address - array.begin} of {size}"
