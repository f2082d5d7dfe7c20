# SPDX-License-Identifier: MIT
"""Devices, memory, streams, events and graphs."""

from __future__ import annotations

import ctypes
import threading
from collections import defaultdict
from types import SimpleNamespace

from .. import _driver
from .._driver import CUDADriverError, CUDARuntimeError, call, query
from . import nvrtc as nvrtc
from . import runtime

compiler = SimpleNamespace(CompileException=type("CompileException", (Exception,), {}))
driver = SimpleNamespace(
    CUDADriverError=CUDADriverError,
    funcSetAttribute=lambda f, name, value: call(
        "cuFuncSetAttribute", ctypes.c_void_p(f), name, value
    ),
)


def get_cuda_path():
    return None


_ATTRIBUTES = {
    "MaxSharedMemoryPerBlock": 8,
    "MultiProcessorCount": 16,
    "L2CacheSize": 38,
    "MaxThreadsPerMultiProcessor": 39,
    "MaxSharedMemoryPerMultiprocessor": 81,
    "MaxSharedMemoryPerBlockOptin": 97,
}


class Device:
    def __init__(self, device=None):
        self.id = runtime.getDevice() if device is None else int(device)
        self._before = []

    @property
    def attributes(self):
        query = runtime.deviceGetAttribute
        return {name: query(number, self.id) for name, number in _ATTRIBUTES.items()}

    @property
    def compute_capability(self):
        major, minor = (runtime.deviceGetAttribute(number, self.id) for number in (75, 76))
        return f"{major}{minor}"

    def synchronize(self):
        with self:
            runtime.deviceSynchronize()

    def __enter__(self):
        self._before.append(runtime.getDevice())
        if self.id != self._before[-1]:  # CuPy creates no context for the current device
            runtime.setDevice(self.id)
        return self

    def use(self):
        runtime.setDevice(self.id)
        return self

    def __exit__(self, *error):
        runtime.setDevice(self._before.pop())


class _Current(threading.local):
    def __init__(self):
        self.streams = defaultdict(lambda: [Stream.null])  # by device; the last stream is current


class ExternalStream:
    """A stream that other code created."""

    def __init__(self, ptr, device_id=-1):
        self.ptr, self.device_id = ptr, runtime.getDevice() if device_id < 0 else device_id

    def __eq__(self, other):
        return isinstance(other, ExternalStream) and self.ptr == other.ptr

    __hash__ = None

    def __enter__(self):
        _current.streams[runtime.getDevice()].append(self)
        return self

    def __exit__(self, *error):
        _current.streams[runtime.getDevice()].pop()

    @property
    def done(self):
        return _done("cuStreamQuery", self.ptr)

    def synchronize(self):
        call("cuStreamSynchronize", self.ptr)

    def wait_event(self, event):
        runtime.streamWaitEvent(self.ptr, event.ptr)

    def record(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def is_capturing(self):
        return _driver.is_capturing(self.ptr)

    def begin_capture(self, mode=0):
        call("cuStreamBeginCapture_v2", self.ptr, mode)

    def end_capture(self):
        graph = ctypes.c_void_p()
        call("cuStreamEndCapture", self.ptr, ctypes.byref(graph))
        return Graph(graph)


class Stream(ExternalStream):
    def __init__(self, null=False, non_blocking=False):
        self._mine = not null
        flags = int(non_blocking)
        super().__init__(0 if null else query("cuStreamCreate", flags, kind=ctypes.c_uint64))

    def __del__(self, destroy=_driver.library.cuStreamDestroy_v2):
        if getattr(self, "_mine", False):
            destroy(ctypes.c_uint64(self.ptr))


Stream.null = Stream(null=True)


def get_current_stream(device_id=-1):
    return _current.streams[runtime.getDevice() if device_id < 0 else device_id][-1]


def _done(name, handle):
    code = getattr(_driver.library, name)(ctypes.c_void_p(handle))
    if code not in (0, 600):
        call(name, handle)
    return code == 0


class Event:
    def __init__(self, block=False, disable_timing=False, interprocess=False):
        self.ptr = query("cuEventCreate", 0, kind=ctypes.c_uint64)

    def __del__(self, destroy=_driver.library.cuEventDestroy_v2):
        destroy(ctypes.c_uint64(self.ptr))

    @property
    def done(self):
        return _done("cuEventQuery", self.ptr)

    def record(self, stream=None):
        runtime.eventRecord(self.ptr, (stream or get_current_stream()).ptr)

    def synchronize(self):
        call("cuEventSynchronize", self.ptr)


class Graph:
    """A captured graph. The graph, and the arrays that it assigns to or from, are never freed."""

    def __init__(self, graph):
        self.graph = graph

    def launch(self, stream=None):
        call("cuGraphLaunch", self.graph, (stream or get_current_stream()).ptr)


_freed = set()  # (device, stream, size in units of 512 bytes)


class Memory:
    """Memory of exactly the given size, freed when the stream that allocated it reaches the free.

    A capture cannot allocate memory. CuPy reuses memory that was freed on the same stream, so here
    a capture gets memory if memory of this size was freed before on the captured stream.
    """

    def __init__(self, size):
        self.size, self.device_id, self.ptr = size, runtime.getDevice(), 0
        self._stream = get_current_stream()
        self._kind = (self.device_id, self._stream.ptr, -(-size // 512))
        if self._stream.is_capturing() and self._kind not in _freed:
            raise CUDARuntimeError("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED: memory is allocated")
        if size:
            self.ptr = query("cuMemAlloc_v2", size, kind=ctypes.c_uint64)

    def __del__(self, free=_driver.library.cuMemFreeAsync):
        if self.ptr:
            _freed.add(self._kind)
            free(ctypes.c_uint64(self.ptr), ctypes.c_uint64(self._stream.ptr))


class UnownedMemory:
    def __init__(self, ptr, size, owner, device_id=-1):
        self.ptr, self.size, self._owner, self.device_id = ptr, size, owner, device_id


class MemoryPointer:
    def __init__(self, mem, offset):
        self.mem, self.ptr, self.device_id = mem, mem.ptr + offset, mem.device_id


def alloc(size):
    return MemoryPointer(Memory(size), 0)


_current = _Current()
