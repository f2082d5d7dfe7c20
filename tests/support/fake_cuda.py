# SPDX-License-Identifier: MIT
"""Tensors and CuPy arrays that say they are on a GPU, and lie in the CPU's memory.

They are real ones, of the libraries' own types; what would need a driver is replaced. Launches are
written down instead of made.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from cunorm import _cuda
from cunorm._arrays import Operand
from cunorm._arrays._cupy import CUPY
from cunorm._arrays._torch import TORCH
from cunorm._features import Features
from cunorm._loaded import Loaded


class Launched(NamedTuple):
    """One launch: the kernel, what it was given, and where."""

    kernel: str
    macros: tuple[tuple[str, str], ...]
    grid: int
    block: int
    words: tuple[int, ...]  # of its argument
    stream: int
    device: int  # that was current


class FakeCuda:
    """A machine with some GPUs, whose current device and whose streams are set by hand."""

    def __init__(self) -> None:
        self.current = 0
        self.streams: dict[int, int] = {}  # of each device; others have 0
        self.launches: list[Launched] = []
        self.entered: list[tuple[str, int]] = []  # by which library, and the device
        self.allocated: list[Operand] = []  # kept, so that addresses differ

    def taken(self) -> list[Launched]:
        """Return the launches since this was asked last."""
        launches, self.launches = self.launches, []
        return launches

    def stream(self, index: int = -1) -> int:
        return self.streams.get(index, 0)

    def scope(self, index: int, library: str = "cupy") -> Any:
        return _Scope(self, index, library)

    def raw_kernel(self, source: str, name: str, options: Any) -> Any:
        def start(grid, block, arguments, *, stream):
            (argument,) = arguments
            assert argument.size == 1  # all that CuPy passes by value
            words = tuple(np.frombuffer(argument.tobytes(), np.uint64).tolist())
            where = (stream.ptr, self.current)
            self.launches.append(Launched(name, options, *grid, *block, words, *where))

        members = {"compile": lambda self: None, "__call__": staticmethod(start)}
        return type("Kernel", (), members)()


class _Scope:
    compute_capability = "90"

    def __init__(self, fake: FakeCuda, index: int, library: str) -> None:
        self.fake, self.index, self.library = fake, index, library

    def __enter__(self) -> None:
        self.fake.entered.append((self.library, self.index))
        self.before, self.fake.current = self.fake.current, self.index

    def __exit__(self, *_: object) -> None:
        self.fake.current = self.before


def install(patch: pytest.MonkeyPatch) -> FakeCuda:
    """Let CuPy and PyTorch, where it is installed, take the CPU's memory for that of GPUs."""
    fake = FakeCuda()
    _fake_cupy(patch, fake)
    if "torch" in sys.modules:
        _fake_torch(patch, fake)
    for framework in (CUPY, TORCH):
        _note_allocations(patch, fake, type(framework))
    limits = _cuda.DeviceLimits(132, "90", 2048, 48 << 10, Features())
    patch.setattr(_cuda, "device_limits", lambda device: limits)
    patch.setattr(_cuda, "_loaded", Loaded())
    return fake


def _note_allocations(patch: pytest.MonkeyPatch, fake: FakeCuda, kind: type) -> None:
    allocate = kind.allocate

    def noted(self: Any, form: Any) -> Operand:
        fake.allocated.append(allocate(self, form))
        return fake.allocated[-1]

    patch.setattr(kind, "allocate", noted)


def _fake_cupy(patch: pytest.MonkeyPatch, fake: FakeCuda) -> None:
    import cupy

    def get_current_stream(index: int = -1) -> Any:
        return SimpleNamespace(ptr=fake.stream(index))

    def empty(shape: Any, dtype: Any) -> Any:
        return on_cupy(np.empty(shape, dtype), fake.current)

    patch.setattr(cupy, "empty", empty)
    patch.setattr(cupy, "RawKernel", fake.raw_kernel)
    patch.setattr(cupy.cuda, "Device", fake.scope)
    patch.setattr(cupy.cuda, "get_current_stream", get_current_stream)
    patch.setattr(cupy.cuda.runtime, "getDevice", lambda: fake.current)
    patch.setattr(_cuda, "compile_options", lambda build: build.macros)


def _fake_torch(patch: pytest.MonkeyPatch, fake: FakeCuda) -> None:
    import torch

    patch.setattr(torch.Tensor, "is_cpu", False, raising=False)
    patch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    patch.setattr(torch.Tensor, "get_device", lambda self: getattr(self, "gpu", 0), raising=False)
    patch.setitem(vars(TORCH), "_torch_device", lambda device: torch.device("cpu"))
    patch.setitem(vars(TORCH), "_raw_stream", fake.stream)
    patch.setattr(
        type(TORCH), "device_scope", lambda self, device: fake.scope(device.index, "torch")
    )


def on_cupy(array: np.ndarray, gpu: int = 0) -> Any:
    """Return a CuPy array over an array's memory."""
    import cupy

    address = array.__array_interface__["data"][0]
    memory = cupy.cuda.UnownedMemory(address, max(array.nbytes, 1), array, gpu)
    pointer = cupy.cuda.MemoryPointer(memory, 0)
    return cupy.ndarray(array.shape, array.dtype, pointer, array.strides)
