# SPDX-License-Identifier: MIT
"""Arrays that are not what their memory says, or no arrays: refused, with the fix named.

Each is given to `rms_norm` twice, as what is known of the first call must not help the second.
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


def of(name):
    return getattr(ml_dtypes, name, name)


def of_dtype(name):
    return np.zeros((3, 4), of(name))


def read_only():
    array = X.copy()
    array.flags.writeable = False
    return array


def consumed():
    class Again(Foreign):
        def __dlpack_device__(self):
            return (1, 0)

        def __dlpack__(self, **options):
            return self.array

    again = Again(X.__dlpack__())
    np.from_dlpack(again)
    return again


class OnRocm(Foreign):
    def __dlpack_device__(self):
        return (10, 0)


# Of each: how to make it, the error, and what it says.
REFUSED = {
    "a mask": (
        lambda: np.ma.masked_array(X, X > 0),
        TypeError,
        r"a masked array.*x\.filled\(value\)$",
    ),
    "other bytes' order": (
        lambda: X.astype(X.dtype.newbyteorder()),
        TypeError,
        r"dtype [<>]f4 in foreign byte.*x\.astype\('float32'\)",
    ),
    **{
        name: (
            lambda name=name: of_dtype(name),
            TypeError,
            f"{of_dtype(name).dtype.name}, {ALLOWED}",
        )
        for name in ("int32", "complex64", "bool", "float8_e4m3fn", "longdouble")
    },
    "a list": (lambda: [1.0], TypeError, f"is of type list, {NO_ARRAY}"),
    "a number": (lambda: 1.0, TypeError, f"is of type float, {NO_ARRAY}"),
    "None": (lambda: None, TypeError, f"is None, {NO_ARRAY}"),
    "a scalar": (lambda: np.float32(1), TypeError, f"is of type float32, {NO_ARRAY}"),
    "a dtype": (lambda: X.dtype, TypeError, f"is of type Float32DType, {NO_ARRAY}"),
    **{
        f"foreign {name}": (lambda name=name: Foreign(of_dtype(name)), TypeError, f"dtype {name}, ")
        for name in ("int32", "complex64", "uint16")
    },
    "a consumed capsule": (consumed, ValueError, "not give .* expected an unconsumed DLPack"),
    # which the older protocol has no word for
    "no export": (lambda: ForeignBefore1(read_only()), ValueError, "through DLPack: .*only"),
    "another device": (
        lambda: OnRocm(X),
        ValueError,
        "DLPack device type 10, expected CPU",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_plain_memory_of_a_known_dtype_is_refused(name):
    make, error, message = REFUSED[name]
    for _ in range(2):
        with pytest.raises(error, match=f"^rms_norm: x .*{message}"):
            cunorm.rms_norm(make())


def test_a_read_only_foreign_object_is_read_and_not_written():
    np.testing.assert_array_equal(cunorm.rms_norm(Foreign(read_only())), cunorm.rms_norm(X))
    for kind in (Foreign, lambda array: array):
        with pytest.raises(ValueError, match=r"^rms_norm: out "):
            cunorm.rms_norm(X, out=kind(read_only()))
    assert (read_only() == 1).all()


@pytest.mark.gpu
def test_cupy_arrays_of_another_dtype_or_unaligned_are_refused():
    gpu = OnCupy()
    with pytest.raises(TypeError, match=rf"^rms_norm: x has dtype int32, {ALLOWED}"):
        cunorm.rms_norm(gpu.put(np.zeros((3, 4), np.int32)))
    bytes_there, cuda = gpu.put(np.zeros(64, np.uint8)), gpu.cupy.cuda
    memory = cuda.UnownedMemory(bytes_there.data.ptr, 64, bytes_there, 0)
    array = gpu.cupy.ndarray((3, 4), np.float32, cuda.MemoryPointer(memory, 2))
    with pytest.raises(ValueError, match=r"^rms_norm: x has elements .*no multiples.*x\.copy\(\)$"):
        cunorm.rms_norm(array)


# --- dtypes by name -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
def test_a_dtype_may_be_any_frameworks_own(name):
    own = np.dtype(of(name))
    specs = [name, own, own.type]
    for module in ("torch", "jax.numpy"):
        specs.append(getattr(pytest.importorskip(module), name))
    for spec in specs * 2:
        assert cunorm.rms_norm(X, dtype=spec).dtype == own


@pytest.mark.parametrize(
    ("spec", "got"),
    [
        ("int32", "'int32'"),
        ("f4", "'f4'"),
        (np.int32, "int32"),
        (np.dtype(np.complex64), "complex64"),
        (np.dtype(">f4"), ">f4"),
        (ml_dtypes.float8_e4m3fn, "float8_e4m3fn"),
        (float, "<class 'float'>"),  # float64 to NumPy, float32 to the others
        (32, "32"),
        ([], r"\[\]"),
        (np.zeros(2, np.float32), "array"),
    ],
)
def test_another_dtype_is_refused_by_name(spec, got):
    with pytest.raises(TypeError, match=f"^rms_norm: dtype is {got}.*, {ALLOWED}"):
        cunorm.rms_norm(X, dtype=spec)
