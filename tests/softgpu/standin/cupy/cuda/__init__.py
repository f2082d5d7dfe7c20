# SPDX-License-Identifier: MIT
"""Devices, memory, streams and events."""

from __future__ import annotations

import ctypes

from .. import _driver
from . import compiler, driver, nvrtc, runtime

__all__ = [
    "Device",
    "Event",
    "ExternalStream",
    "MemoryPointer",
    "Stream",
    "UnownedMemory",
    "compiler",
    "driver",
    "nvrtc",
    "runtime",
]


def get_cuda_path():
    return None


class Memory:
    def __init__(self, size):
        self.size, self.device_id = size, runtime.getDevice()
        at = ctypes.c_uint64()
        if size:
            _driver.call("cuMemAlloc_v2", ctypes.byref(at), ctypes.c_size_t(size))
        self.ptr = at.value

    def __del__(self, free=_driver.free):
        if self.ptr:
            free(self.ptr)


class UnownedMemory:
    def __init__(self, ptr, size, owner, device_id=-1):
        self.ptr, self.size, self._owner, self.device_id = ptr, size, owner, device_id


class MemoryPointer:
    def __init__(self, mem, offset):
        self.mem, self.ptr, self.device_id = mem, mem.ptr + offset, mem.device_id


_ATTRIBUTES = {
    "MultiProcessorCount": 16,
    "MaxThreadsPerMultiProcessor": 39,
    "MaxSharedMemoryPerBlock": 8,
}


class Device:
    def __init__(self, device=None):
        self.id = runtime.getDevice() if device is None else int(device)
        self._before = []

    @property
    def attributes(self):
        return {
            name: driver.deviceGetAttribute(number, self.id) for name, number in _ATTRIBUTES.items()
        }

    @property
    def compute_capability(self):
        return f"{driver.deviceGetAttribute(75, self.id)}{driver.deviceGetAttribute(76, self.id)}"

    def use(self):
        runtime.setDevice(self.id)

    def synchronize(self):
        pass

    def __enter__(self):
        self._before.append(runtime.getDevice())
        runtime.setDevice(self.id)
        return self

    def __exit__(self, *error):
        runtime.setDevice(self._before.pop())


class Stream:
    _current = None

    def __init__(self, null=False, non_blocking=False, ptds=False):
        made = ctypes.c_void_p()
        if not null and not ptds:
            _driver.call("cuStreamCreate", ctypes.byref(made), int(non_blocking))
        self.ptr = 2 if ptds else made.value or 0
        self._before = []

    def __enter__(self):
        self._before.append(Stream._current)
        Stream._current = self
        return self

    def __exit__(self, *error):
        Stream._current = self._before.pop()

    def use(self):
        Stream._current = self
        return self

    def synchronize(self):
        pass

    def wait_event(self, event):
        pass

    def record(self, event=None):
        return event or Event()


class ExternalStream(Stream):
    def __init__(self, ptr, device_id=-1):
        self.ptr, self._before = ptr, []


Stream.null = Stream(null=True)
Stream.ptds = Stream(ptds=True)


class Event:
    def __init__(self, block=False, disable_timing=False, interprocess=False):
        pass

    def record(self, stream=None):
        pass

    def synchronize(self):
        pass


def get_current_stream(device_id=-1):
    return Stream._current or Stream.null
