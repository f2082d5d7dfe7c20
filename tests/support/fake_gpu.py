# SPDX-License-Identifier: MIT
"""As much of CuPy as the timings use of it, on NumPy arrays, so that they run without a GPU."""

from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np


class Event:
    def record(self):
        self.time = time.perf_counter()

    def synchronize(self):
        pass


def fake_cupy(free_bytes=1 << 30):
    copied = []

    def empty(shape, dtype):
        if isinstance(shape, int):  # for a copy, which needs but a pointer
            return SimpleNamespace(data=SimpleNamespace(ptr=shape))
        return np.empty(shape, dtype)

    runtime = SimpleNamespace(
        memcpyDeviceToDevice=3,
        memcpyAsync=lambda target, source, size, kind, stream: copied.append(size),
        deviceSynchronize=lambda: None,
        memGetInfo=lambda: (free_bytes, 2 * free_bytes),
        driverGetVersion=lambda: 13010,
        getDeviceProperties=lambda device: {"name": b"a GPU"},
    )
    cuda = SimpleNamespace(
        runtime=runtime,
        Event=Event,
        get_elapsed_time=lambda before, after: 1e3 * (after.time - before.time),
    )
    return SimpleNamespace(
        __version__="14.2",
        RawKernel=lambda *_: lambda *_: None,
        asarray=np.array,  # a copy, as of the host's arrays there
        empty=empty,
        cuda=cuda,
        get_default_memory_pool=lambda: SimpleNamespace(free_all_blocks=lambda: None),
        copied=copied,
    )
