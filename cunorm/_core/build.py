# SPDX-License-Identifier: MIT
"""The builds of kernels (KernelBuild), their launches (Launch) and their arguments (KernelArgs)."""

import math
import struct
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from cunorm._core.caps import CpuCaps
from cunorm._core.dtypes import FLOAT64, DType

Macros = tuple[tuple[str, str], ...]

# Stores that bypass a CPU's caches are faster if rows are whole cache lines, and if a call moves
# _LARGE bytes, or _LARGE_SHARE of the last cache (measured on 2 cores with 32 MiB of cache).
_LARGE_SHARE, _LARGE, _CACHE_LINE = 0.75, 64 << 20, 64


@dataclass(frozen=True, slots=True)
class KernelBuild:
    """A kernel and its macros; `kernel` is the name of its source file and of its entry point."""

    kernel: str
    macros: Macros

    @property
    def cluster(self) -> int:
        return int(dict(self.macros).get("CLUSTER", 1))  # the blocks of a cluster; 1: no cluster

    def __str__(self) -> str:
        return " ".join((self.kernel, *(f"{name}={value}" for name, value in self.macros)))


@dataclass(frozen=True, slots=True)
class Launch:
    """A build, the number of blocks to start, and the number of threads of a block."""

    build: KernelBuild
    grid: int
    block: int
    parts: int = 0  # rows of partial sums for each parameter, in row_norm_backward
    sums_pitch: int = 0  # elements from one of these rows to the next
    shared: int = 0  # bytes of shared memory of a block, besides what its kernel declares
    dependent: bool = False  # may begin before the previous launch ends; its kernel then waits

    @property
    def sums_size(self) -> int:
        return self.parts * self.sums_pitch  # the elements for one parameter


class KernelArgs(NamedTuple):
    """The bytes of a kernel's argument struct, for arrays at address 0."""

    data: bytes
    relocations: tuple[tuple[int, int], ...]  # a word; the slot of the array whose address is added
    sized: tuple[int, ...] = ()  # the words that depend on the number of rows


class ArgsWriter:
    """A writer of an argument struct in which every field has eight bytes."""

    def __init__(self, slots: dict[str, int]) -> None:
        self._slots = slots  # the keys are the names of the arrays that are present
        self._words: list[int] = []
        self._relocations: list[tuple[int, int]] = []
        self._sized: list[int] = []

    def pointer(self, name: str) -> None:
        """Write the address of an array, or null if the array is absent."""
        if name in self._slots:
            self._relocations.append((len(self._words), self._slots[name]))
        self._words.append(0)

    def pointers_into_workspace(self, offsets: Iterable[int | None]) -> None:
        """Write the address at each byte offset in the workspace, or null for None."""
        for offset in offsets:
            if offset is not None:
                self._relocations.append((len(self._words), self._slots["workspace"]))
                self._sized.append(len(self._words))
            self._words.append(offset or 0)

    def integers(self, *values: int) -> None:
        self._words += values

    def sized(self, value: int) -> None:
        """Write an integer that depends on the number of rows."""
        self._sized.append(len(self._words))
        self._words.append(value)

    def finish(self, numbers: bytes = b"") -> KernelArgs:
        data = struct.pack(f"<{len(self._words)}q", *self._words)
        return KernelArgs(data + numbers, tuple(self._relocations), tuple(self._sized))


def numbers_of(compute: DType, numbers: Iterable[float]) -> bytes:
    """Return each number as a `Number` of types.cuh; a number that is too large becomes inf."""
    if compute is FLOAT64:
        return array("d", numbers).tobytes()
    return array("f", [half for number in numbers for half in (number, 0.0)]).tobytes()


def cuda_type(dtype: DType | None) -> str:
    """Return the name of a dtype in the sources, "absent" for None."""
    return "absent" if dtype is None else dtype.cuda


def cuda_bool(value: bool) -> str:
    return "true" if value else "false"


def streaming_stores(
    moved: Iterable[DType | None],
    results: Iterable[DType | None],
    line: int,
    compute: DType,
    caps: CpuCaps,
) -> tuple[float, Macros]:
    """Return the least number of elements of x at which stores bypass the caches, and the macro.

    `moved` has the dtypes of all arrays as large as x that the kernel reads or writes, `results`
    the dtypes of those that may bypass the caches.
    """
    written = [dtype for dtype in results if dtype is not None]
    element_bytes = sum(dtype.itemsize for dtype in moved if dtype is not None)
    are_whole = all(line * dtype.itemsize % _CACHE_LINE == 0 for dtype in written)
    if not written or not are_whole or FLOAT64 in (*written, compute):
        return math.inf, ()
    least_bytes = min(_LARGE, _LARGE_SHARE * caps.last_cache_bytes)
    return least_bytes / element_bytes, (("NON_TEMPORAL", str(len(written))),)
