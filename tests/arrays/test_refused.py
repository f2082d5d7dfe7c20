# SPDX-License-Identifier: MIT
"""Arrays that are not plain memory of a known dtype, and other objects: errors name the fix.

Each array is passed to `rms_norm` twice, because a cached call might accept it. Further objects
and dtypes are in tests/arguments/wrong_input.py.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import cunorm
from tests.support.gpu_arrays import OnCupy
from tests.support.kinds import Foreign, ForeignBefore1

X = np.ones((3, 4), np.float32)
ALLOWED = "expected float16, bfloat16, float32 or float64$"
NO_ARRAY = "expected a NumPy, CuPy, PyTorch or JAX array or another object with __dlpack__$"


def read_only():
    array = X.copy()
    array.flags.writeable = False
    return array


class On(Foreign):
    """An object that names a given DLPack device and returns the same capsule each time."""

    def __init__(self, array, device):
        super().__init__(array)
        self.device, self.capsule = device, array.__dlpack__()

    def __dlpack_device__(self):
        return (self.device, 0)

    def __dlpack__(self, **options):
        return self.capsule


def consumed():
    refused = On(X, 1)
    np.from_dlpack(refused)
    return refused


# For each case: how to create the object, the error, and its message.
REFUSED = {
    "a mask": (
        lambda: np.ma.masked_array(X, X > 0),
        TypeError,
        r"a masked array.*x\.filled\(value\)$",
    ),
    "another byte order": (
        lambda: X.astype(X.dtype.newbyteorder()),
        TypeError,
        r"dtype [<>]f4 in foreign byte.*x\.astype\('float32'\)",
    ),
    "longdouble": (lambda: X.astype("g"), TypeError, f"{np.dtype('g')}, {ALLOWED}"),
    "a scalar": (lambda: np.float32(1), TypeError, f"is of type numpy.float32, {NO_ARRAY}"),
    "a dtype": (lambda: X.dtype, TypeError, f"is of type Float32DType, {NO_ARRAY}"),
    "foreign integers": (lambda: Foreign(X.astype("u2")), TypeError, "dtype uint16, "),
    "a consumed capsule": (consumed, ValueError, "not give .* expected an unconsumed DLPack"),
    # The older protocol has no read-only flag.
    "no export": (lambda: ForeignBefore1(read_only()), ValueError, "through DLPack: .*only"),
    "another device": (lambda: On(X, 10), ValueError, "DLPack device type 10, expected CPU"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_objects_that_are_not_plain_memory_of_a_known_dtype_are_refused(name):
    make, error, message = REFUSED[name]
    for _ in range(2):
        with pytest.raises(error, match=f"^rms_norm: x .*{message}"):
            cunorm.rms_norm(make())


def test_a_read_only_foreign_object_is_read_and_not_written():
    np.testing.assert_array_equal(cunorm.rms_norm(Foreign(read_only())), cunorm.rms_norm(X))
    out = read_only()
    with pytest.raises(ValueError, match=r"^rms_norm: out "):
        cunorm.rms_norm(X, out=Foreign(out))
    assert (out == 1).all()


@pytest.mark.gpu
def test_cupy_arrays_of_another_dtype_or_unaligned_are_refused():
    gpu = OnCupy()
    with pytest.raises(TypeError, match=r"x has dtype int32, .*: pass x\.astype\('float32'\)$"):
        cunorm.rms_norm(gpu.put(np.zeros((3, 4), np.int32)))
    bytes_there, cuda = gpu.put(np.zeros(64, np.uint8)), gpu.cupy.cuda
    memory = cuda.UnownedMemory(bytes_there.data.ptr, 64, bytes_there, 0)
    array = gpu.cupy.ndarray((3, 4), np.float32, cuda.MemoryPointer(memory, 2))
    with pytest.raises(ValueError, match=r"^rms_norm: x has elements .*no multiples.*x\.copy\(\)$"):
        cunorm.rms_norm(array)


def test_a_dtype_may_be_any_frameworks_own():
    modules = [
        pytest.importorskip(name, reason=f"{name} is not installed")
        for name in ("torch", "jax.numpy")
    ]
    for name in ("float16", "bfloat16", "float32", "float64"):
        own = np.dtype(getattr(ml_dtypes, name, name))
        for spec in [name, own, own.type, *(getattr(module, name) for module in modules)] * 2:
            assert cunorm.rms_norm(X, dtype=spec).dtype == own
