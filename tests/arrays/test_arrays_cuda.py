# SPDX-License-Identifier: MIT
"""CuPy arrays, and the order of streams; all but the `gpu` tests run where there is no GPU."""

from __future__ import annotations

import gc
import sys
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from cunorm._arrays import Device, Form, Operand, contiguous_form, describe, joined
from cunorm._arrays._cupy import CUPY
from cunorm._arrays._dlpack import DLPACK, Hold, Tensor, read_capsule
from cunorm._arrays._jax import _Exporter
from cunorm._dtypes import BFLOAT16, DTYPES, FLOAT32

cupy = pytest.importorskip("cupy")

CUDA = Device("cuda", 0)


@pytest.fixture
def on_host():
    """Make CuPy arrays over host memory: enough for whatever reads their attributes."""

    def make(dtype, shape=(3, 4), offset=0):
        host = np.zeros(256, np.uint8)
        address = host.__array_interface__["data"][0]
        memory = cupy.cuda.UnownedMemory(address, host.nbytes, host, 0)
        return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, offset))

    return make


@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16, "float32", "float64"])
def test_a_cupy_array_is_described_without_a_copy(on_host, dtype):
    array = on_host(dtype)
    operand = describe("f", "x", array)
    assert (operand.pointer, operand.owner is array) == (array.data.ptr, True)
    assert (operand.shape, operand.strides) == ((3, 4), (4, 1))
    assert operand.dtype is DTYPES[np.dtype(dtype).name]
    assert (operand.device, operand.framework.name, operand.writable) == (CUDA, "cupy", True)


def test_cupy_views_keep_their_first_element_and_their_strides(on_host):
    array = on_host("float32")
    for view, strides in ((array.T[::-1], (-1, 4)), (array[1:, ::2], (4, 2))):
        operand = describe("f", "x", view)
        assert (operand.pointer, operand.strides) == (view.data.ptr, strides)


def test_an_unaligned_cupy_array_is_refused(on_host):
    with pytest.raises(ValueError, match=r"^f: x has elements .*no multiples.*x\.copy\(\)$"):
        describe("f", "x", on_host("float32", offset=2))


def test_a_cupy_array_of_another_dtype_is_refused(on_host):
    with pytest.raises(TypeError, match=r"^f: x has dtype int32, expected float16"):
        describe("f", "x", on_host("int32"))


class FakeCuda:
    """The few calls of CuPy's that order streams, written into a log."""

    def __init__(self):
        self.log = []
        self.current = SimpleNamespace(ptr=0)
        self.done = False
        self.runtime = SimpleNamespace(
            getDevice=lambda: 0,
            eventRecord=lambda event, stream: self.log.append(("record", stream)),
            streamWaitEvent=lambda stream, event: self.log.append(("wait", stream)),
        )

    def Device(self, index):
        return nullcontext()

    def get_current_stream(self, device=-1):
        return self.current

    def Event(self, disable_timing=False):
        fake = self

        class Event:
            ptr = 7

            def record(self, stream):
                fake.log.append(("record", stream.ptr))

            @property
            def done(self):
                return fake.done

        return Event()


@pytest.fixture
def fake(monkeypatch):
    cuda = FakeCuda()
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    Hold.passing.clear()
    yield cuda
    Hold.passing.clear()


class OnCuda:
    """A foreign object whose capsule says CUDA."""

    def __init__(self):
        self.array, self.streams = np.zeros((3, 4), np.float32), []

    def __dlpack_device__(self):
        return (2, 0)

    def __dlpack__(self, *, stream, max_version=None):
        self.streams.append(stream)
        capsule = self.array.__dlpack__()
        read_capsule(capsule)[0].device_type = 2
        return capsule


@pytest.mark.parametrize(("ours", "theirs"), [(0, 1), (2, 2), (4096, 4096)])
def test_a_producer_is_asked_to_order_our_stream_after_its_work(fake, ours, theirs):
    fake.current.ptr = ours
    thing = OnCuda()
    operand = describe("f", "x", thing)
    assert thing.streams == [theirs]  # 0 is no stream to DLPack, the default one is 1
    assert operand.device == CUDA
    assert DLPACK.stream(CUDA) == ours


def test_a_cuda_capsule_is_held_until_the_stream_has_passed_the_launch(fake):
    thing = OnCuda()
    fake.current.ptr = 5
    alive = weakref.ref(thing.array)
    operand = describe("f", "x", thing)
    del thing
    assert fake.log == []
    fake.log.append("launch")
    del operand
    gc.collect()
    assert fake.log == ["launch", ("record", 5)]
    other = describe("f", "x", OnCuda())  # the first capsule's event has not come yet
    assert alive() is not None
    fake.done = True
    del other
    describe("f", "x", OnCuda())
    assert alive() is None


def operand_of(framework):
    return Operand(0, Form((), (), FLOAT32, CUDA), None, framework, True)


class OnStream:
    """A framework whose user works on the given stream."""

    def __init__(self, stream):
        self.current = stream

    def stream(self, device):
        return self.current


def test_a_launch_waits_for_the_other_frameworks_streams_and_they_for_it(fake):
    ours, theirs = OnStream(5), OnStream(6)
    with joined(ours, [operand_of(ours), operand_of(theirs)], CUDA) as stream:
        assert stream == 5
        fake.log.append("launch")
    assert fake.log == [("record", 6), ("wait", 5), "launch", ("record", 5), ("wait", 6)]


def test_frameworks_on_the_same_stream_need_no_order(fake):
    ours, theirs = OnStream(5), OnStream(5)
    with joined(ours, [operand_of(ours), operand_of(theirs)], CUDA) as stream:
        assert stream == 5
    assert fake.log == []


def test_an_exporter_passes_the_consumers_stream_on_and_corrects_only_bfloat16():
    class Buffer:
        def __init__(self):
            self.array, self.streams = np.zeros(3, np.float16), []

        def __dlpack_device__(self):
            return (2, 1)

        def __dlpack__(self, *, stream):
            self.streams.append(stream)
            return self.array.__dlpack__()

    for dtype, code in ((BFLOAT16, 4), (DTYPES["float16"], 2)):
        buffer = Buffer()
        exporter = _Exporter(Operand(0, contiguous_form((3,), dtype, CUDA), buffer, DLPACK, True))
        tensor: Tensor = read_capsule(exporter.__dlpack__(stream=9, max_version=(1, 0)))[0]
        assert exporter.__dlpack_device__() == (2, 1)
        assert (buffer.streams, tensor.code, tensor.bits) == ([9], code, 16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_cupy_outputs_are_the_arrays_that_were_written_to(dtype):
    with cupy.cuda.Stream() as stream:
        assert CUPY.stream(CUDA) == stream.ptr
        operand = CUPY.allocate(contiguous_form((2, 3), DTYPES[dtype], CUDA))
    array = CUPY.export(operand)
    assert (array.data.ptr, array.dtype.name, array.shape) == (operand.pointer, dtype, (2, 3))


@pytest.mark.gpu
def test_contiguous_copies_a_reversed_transposed_cupy_array_into_c_order():
    array = cupy.arange(12, dtype="float32").reshape(3, 4).T[::-1]
    copy = CUPY.contiguous(describe("f", "x", array))
    assert (copy.strides, copy.pointer) == ((3, 1), copy.owner.data.ptr)
    assert cupy.array_equal(copy.owner, array)
