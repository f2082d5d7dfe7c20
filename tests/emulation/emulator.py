# SPDX-License-Identifier: MIT
"""Runs a CUDA kernel with its GPU launch plan on a CPU, one fiber per CUDA thread.

`include/device.h` says what that proves and what it does not.

    x, y = guarded(values), guarded(values, role="output")
    kernel = compile_emulated(source_text, "twice", (("THREADS", "64"),))
    arguments = struct.pack("qqq", x.pointer, y.pointer, values.size)
    moved = kernel.run(3, 64, arguments, order="reverse", ranges={"x": x, "y": y})
    y.array, moved.bytes["x"]
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np

from .build import CompileError, compile_kernel, compile_scheduler, unavailable
from .errors import EmulationError, Report, raise_for_disturbance, raise_for_report
from .guarded import GuardedArray, guarded

__all__ = [
    "ORDERS",
    "CompileError",
    "EmulatedKernel",
    "EmulationError",
    "EmulationResult",
    "GuardedArray",
    "compile_emulated",
    "guarded",
    "unavailable",
]

ORDERS = ("forward", "reverse", "random")  # as launch.h counts them
_MAX_GRID, _MAX_BLOCK, _WARP = 2**31 - 1, 1024, 32
_MAX_CLUSTER, _MAX_CLUSTER_THREADS = 16, 16 * 512
_one_launch_at_a_time = threading.Lock()

Order = Literal["forward", "reverse", "random"]


@dataclass(frozen=True)
class EmulationResult:
    """What a launch moved, in bytes for each of the named ranges.

    Attributes
    ----------
    loaded, stored : dict of str to int
        Every access counts.
    distinct : dict of str to int
        Every byte counts once, however often it was loaded and stored.
    """

    loaded: dict[str, int]
    stored: dict[str, int]
    distinct: dict[str, int]

    @property
    def bytes(self) -> dict[str, int]:
        """Loaded and stored together, every access counted."""
        return {name: self.loaded[name] + self.stored[name] for name in self.loaded}


class _Range(ctypes.Structure):
    _fields_ = (
        ("begin", ctypes.c_longlong),
        ("bytes", ctypes.c_longlong),
        ("touched", ctypes.c_void_p),
        ("loaded", ctypes.c_longlong),
        ("stored", ctypes.c_longlong),
    )


class _Launch(ctypes.Structure):
    _fields_ = (
        ("kernel", ctypes.c_void_p),
        ("arguments", ctypes.c_void_p),
        ("grid", ctypes.c_longlong),
        ("block", ctypes.c_longlong),
        ("cluster", ctypes.c_longlong),
        ("order", ctypes.c_longlong),
        ("seed", ctypes.c_ulonglong),
        ("ranges", ctypes.c_void_p),
        ("range_count", ctypes.c_longlong),
        ("report", Report),
    )


class _Kernel(ctypes.Structure):
    _fields_ = (("run_thread", ctypes.c_void_p), ("argument_bytes", ctypes.c_longlong))


class EmulatedKernel:
    """A kernel compiled for emulation; made by `compile_emulated`."""

    def __init__(self, name: str, library: Path, scheduler: Path) -> None:
        self.name = name
        self._library = ctypes.CDLL(str(library))
        self._kernel = _Kernel.in_dll(self._library, "emulation_kernel")
        self._run = ctypes.CDLL(str(scheduler)).emulation_run
        self._run.restype = None

    def run(
        self,
        grid: int,
        block: int,
        arguments: bytes,
        *,
        cluster: int = 1,
        order: Order = "forward",
        seed: int = 0,
        ranges: Mapping[str, GuardedArray] | None = None,
    ) -> EmulationResult:
        """Launch the kernel.

        Parameters
        ----------
        grid, block : int
            Blocks, and threads per block: whole warps.
        arguments : bytes
            The kernel's one parameter.
        cluster : int
            How many blocks, each with shared memory of its own, form a cluster and run together.
        order : {"forward", "reverse", "random"}
            In which order blocks, warps and lanes run; random order, drawn from `seed`, is drawn
            anew whenever a warp continues. The blocks of a cluster run up to the next cluster
            barrier one after the other; in random order they take turns with each step of a warp.
        ranges : mapping of str to GuardedArray
            The arrays that the kernel may access, by operand. Outputs are poisoned first. Without
            any, accesses are neither counted nor held against them.

        Raises
        ------
        EmulationError
            Threads part ways at a barrier or shuffle; an access outside the ranges, misaligned, or
            where there is no memory; a load from a block that does not run; an asynchronous copy
            that is never waited for. The arrays hold what was stored until then.
        """
        ranges = dict(ranges or {})
        self._check(grid, block, cluster, arguments, order, ranges)
        for array in ranges.values():
            if array.role == "output":
                array.poison()
        touched = [np.zeros(array.nbytes, np.uint8) for array in ranges.values()]
        counted = (_Range * len(ranges))(
            *(
                _Range(array.begin, array.nbytes, flags.ctypes.data)
                for array, flags in zip(ranges.values(), touched, strict=True)
            )
        )
        launch = _Launch(
            kernel=ctypes.addressof(self._kernel),
            arguments=ctypes.addressof(text := ctypes.create_string_buffer(arguments)),
            grid=grid,
            block=block,
            cluster=cluster,
            order=ORDERS.index(order),
            seed=seed,
            ranges=ctypes.addressof(counted),
            range_count=len(ranges),
        )
        with _one_launch_at_a_time:
            self._run(ctypes.byref(launch))
        del text
        clusters = f" in clusters of {cluster}" if cluster > 1 else ""
        where = f"{self.name}<<<{grid}, {block}>>>{clusters} in {order} order: "
        raise_for_report(where, launch.report, ranges)
        raise_for_disturbance(where, ranges)
        return EmulationResult(
            loaded={name: c.loaded for name, c in zip(ranges, counted, strict=True)},
            stored={name: c.stored for name, c in zip(ranges, counted, strict=True)},
            distinct={n: int(np.count_nonzero(t)) for n, t in zip(ranges, touched, strict=True)},
        )

    def _check(
        self,
        grid: int,
        block: int,
        cluster: int,
        arguments: bytes,
        order: str,
        ranges: dict[str, GuardedArray],
    ) -> None:
        if not 1 <= grid <= _MAX_GRID:
            raise ValueError(f"{self.name}: grid is {grid}, expected 1 to {_MAX_GRID}")
        if block % _WARP != 0 or not _WARP <= block <= _MAX_BLOCK:
            raise ValueError(
                f"{self.name}: block is {block}, expected a multiple of {_WARP} up to {_MAX_BLOCK}"
            )
        if not 1 <= cluster <= _MAX_CLUSTER or grid % cluster != 0:
            raise ValueError(
                f"{self.name}: cluster is {cluster}, expected 1 to {_MAX_CLUSTER} blocks "
                f"and a divisor of the grid's {grid}"
            )
        if cluster * block > _MAX_CLUSTER_THREADS:
            raise ValueError(
                f"{self.name}: a cluster of {cluster} blocks of {block} threads, "
                f"expected up to {_MAX_CLUSTER_THREADS} threads"
            )
        if len(arguments) != self._kernel.argument_bytes:
            raise ValueError(
                f"{self.name}: {len(arguments)} bytes of arguments, "
                f"expected {self._kernel.argument_bytes}"
            )
        if order not in ORDERS:
            raise ValueError(f"{self.name}: order is {order!r}, expected one of {ORDERS}")
        spans = sorted((a.begin, a.begin + a.nbytes, name) for name, a in ranges.items())
        for (_, end, first), (begin, _, second) in pairwise(spans):
            if begin < end:
                raise ValueError(f"{self.name}: the ranges {first!r} and {second!r} overlap")


@cache
def compile_emulated(
    source_text: str,
    kernel: str,
    macros: tuple[tuple[str, str], ...] = (),
    *,
    scheduler_options: tuple[str, ...] = (),
) -> EmulatedKernel:
    """Compile a kernel for emulation.

    Parameters
    ----------
    source_text : str
        The source with its local includes in place, the headers of `include/` among them.
    kernel : str
        The name of its entry, ``extern "C" __global__ void name(const Arguments arguments)``.
    macros : tuple of (name, value)
        What is defined before the source.
    scheduler_options : tuple of str
        Options for compiling the scheduler: ``("-DEMULATION_UCONTEXT",)`` for its portable switch
        between fibers.

    Raises
    ------
    CompileError
        The compiler refuses the source.
    """
    scheduler = compile_scheduler(scheduler_options)
    library = compile_kernel(source_text, kernel, macros, scheduler)
    return EmulatedKernel(kernel, library, scheduler)
