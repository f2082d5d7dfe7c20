# SPDX-License-Identifier: MIT
"""Calls on arrays that say they are on a GPU, and what they launch. It needs torch and CuPy."""

from functools import partial

import numpy as np
import pytest

from cunorm import _backend
from cunorm._arrays import describe
from cunorm.group_norm import _run
from tests.support import fake_cuda
from tests.support.calls import (
    FUNCTIONS,
    anew,
    arrays_of,
    call_of,
    fields,
    nothing_known,
    planning_forbidden,
)

torch = pytest.importorskip("torch", reason="its tensors stand in for those of a GPU")
pytest.importorskip("cupy", reason="its arrays are given memory of the host")

names = pytest.mark.parametrize("name", FUNCTIONS)
kinds = pytest.mark.parametrize("kind", ["cupy", "torch"])

OTHER_STREAM, OTHER_GPU = 0x5000, 1


@pytest.fixture
def gpu(monkeypatch):
    return fake_cuda.install(monkeypatch)


@pytest.fixture(autouse=True)
def known(monkeypatch, gpu):
    """Let no call be known before a test on faked GPUs, and nothing planned remain after it."""
    describe("test", "array", fake_cuda.on_cupy(np.empty(1, np.float32)))
    yield nothing_known(monkeypatch)
    _backend.forget()  # what was planned for GPUs that there are not
    _run.forget()


# --- arrays, and what is launched -----------------------------------------------------------------


def moved(kind, array, gpu=0):
    """Return an array on a GPU, of a tensor."""
    if kind == "cupy":
        return fake_cuda.on_cupy(array.numpy(), gpu)
    array.gpu = gpu
    return array


def on_gpu(name, kind, gpu=0):
    """Return a call of any function with all of its arrays on a GPU."""
    call = call_of(name, kind="torch")
    for named in (call.arrays, call.out, vars(call)):
        named |= {key: moved(kind, array, gpu) for key, array in tensors_of(named).items()}
    return call


def tensors_of(named):
    return {key: value for key, value in named.items() if isinstance(value, torch.Tensor)}


def host(array):
    """Return a NumPy array over the memory of an array of either kind."""
    if isinstance(array, torch.Tensor):
        return array.numpy()
    return array.data.mem._owner


def address_of(array):
    return array.data_ptr() if isinstance(array, torch.Tensor) else array.data.ptr


def strides_of(array):
    return array.stride() if isinstance(array, torch.Tensor) else array.strides


def elsewhere(array):
    """Return an array of the same form, aligned to as many bytes."""
    if isinstance(array, torch.Tensor):
        return array.clone()
    return fake_cuda.on_cupy(host(array).copy(), array.data.device_id)


def launched(gpu, run, arrays):
    """Return what a call launches, with names for addresses."""
    gpu.taken()
    gpu.allocated.clear()
    results = fields(run())
    names = {address_of(array): name for name, array in (arrays | results).items()}

    def said(word):
        for one in gpu.allocated:
            size = int(np.prod(one.shape)) * one.dtype.itemsize
            if word not in names and one.pointer <= word < one.pointer + size:
                return "memory", word - one.pointer
        return names.get(word, word)

    return [one._replace(words=tuple(map(said, one.words))) for one in gpu.taken()]


def arrays_in(call):
    lent = {} if call.workspace is None else {"workspace": call.workspace}
    return arrays_of(call.arrays) | lent


def assert_again(gpu, run, arrays):
    """Check that a call is made again, and launches what one that is planned does."""
    expected = launched(gpu, partial(anew, run), arrays)
    with planning_forbidden():
        assert launched(gpu, run, arrays) == expected
    assert expected
    return expected


def assert_planned(gpu, run, arrays):
    """Check that a call launches what one does that is planned, and then is made again."""
    expected = launched(gpu, partial(anew, run), arrays)
    assert launched(gpu, run, arrays) == expected
    assert assert_again(gpu, run, arrays) == expected
    return expected
