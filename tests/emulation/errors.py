# SPDX-License-Identifier: MIT
"""What can go wrong in a launch under emulation, in words."""

from __future__ import annotations

import ctypes
import signal

from .guarded import GuardedArray

# As scheduler.cpp counts them.
_PROBLEMS = (
    "none",
    "lanes diverge",
    "warps diverge",
    "partial mask",
    "bad distance",
    "misaligned",
    "outside",
    "stack overflow",
    "signal",
    "no memory",
)
_STATES = (
    "has not started",
    "waits at a shuffle",
    "waits at __syncwarp",
    "waits at __syncthreads",
    "has ended",
)


class EmulationError(RuntimeError):
    """A launch that a GPU could have answered with anything.

    Attributes
    ----------
    kind : str
        "lanes diverge", "warps diverge", "partial mask", "bad distance", "misaligned", "outside",
        "stack overflow", "signal" or "no memory".
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
        ("other_thread", ctypes.c_longlong),
        ("state", ctypes.c_longlong),
        ("other_state", ctypes.c_longlong),
        ("address", ctypes.c_ulonglong),
        ("bytes", ctypes.c_longlong),
        ("is_store", ctypes.c_longlong),
        ("signal", ctypes.c_longlong),
    )


def raise_for_report(where: str, report: Report, ranges: dict[str, GuardedArray]) -> None:
    """Raise EmulationError unless the launch went well."""
    kind = _PROBLEMS[report.problem]
    thread = f"thread {report.thread} of block {report.block}"
    place = _place(report.address, ranges)
    access = f"{'stores' if report.is_store else 'loads'} {report.bytes} bytes at {place}"
    if kind == "none":
        return
    if kind in ("lanes diverge", "warps diverge"):
        state, other_state = _STATES[report.state], _STATES[report.other_state]
        if state == other_state:
            other_state += " of another type or distance"
        text = f"{kind}: {thread} {state}, thread {report.other_thread} {other_state}"
    elif kind == "partial mask":
        text = f"{thread} calls with a mask that is not 0xffffffff"
    elif kind == "bad distance":
        text = f"{thread} shuffles over a distance that is not 0 to 31"
    elif kind == "misaligned":
        text = f"misaligned: {thread} {access}"
    elif kind == "outside":
        text = f"outside every array: {thread} {access}"
    elif kind == "signal":
        text = f"{signal.Signals(report.signal).name}: {thread}, at {place}"
    elif kind == "stack overflow":
        text = f"stack overflow: {thread}"
    else:
        text = "no memory for the stacks of the threads"
    raise EmulationError(kind, where + text)


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
