# SPDX-License-Identifier: MIT
"""Where a NumPy array lies, however it came about."""

import pickle
import sys

import ml_dtypes
import numpy as np
from numpy.lib.stride_tricks import as_strided

from tests.support.internals import numpy_arrays
from tests.support.operands import at


class Sub(np.ndarray):
    """With fields of its own, after NumPy's."""

    def __array_finalize__(self, other):
        self.more = (1, 2, 3)


def resized():
    array = np.zeros(3)
    array.resize((500, 20), refcheck=False)
    return array


def kinds(folder):
    """Return arrays of every kind, by what is odd about them."""
    base = np.zeros((6, 8))
    record = np.zeros(5, [("name", "S3"), ("x", "f4"), ("y", "f8", (2, 3))])
    mapped = np.memmap(folder / "numbers", np.float32, "w+", offset=20, shape=(4, 5))
    return {
        "new": np.empty(3),
        "reversed": base[::-1, ::-1],
        "transposed": base.T[3:],
        "expanded, read-only": np.broadcast_to(base[0], (3, 8)),
        "strided": as_strided(base, (3, 3), (16, 8)),
        "no axes": np.array(1.0),
        "no axes, of a view": base[2, 3, ...],
        "no elements": np.zeros((0, 5)),
        "no elements, at the end": base[6:],
        "subclass": base.view(Sub)[1:],
        "record array": np.rec.array(record).x,
        "field of a subarray": record["y"][:, 1],
        "memory map": mapped,
        "memory map, from 3": mapped[3:],
        "from a buffer": np.frombuffer(b"0123456789abcdef", np.uint8, offset=5),
        "unaligned": np.zeros(65, np.uint8)[1:].view(np.float64),
        "resized": resized(),
        "of objects": np.array([None, 1, "x"]),
        "of bfloat16": np.zeros(7, ml_dtypes.bfloat16)[2:],
        "through DLPack": np.from_dlpack(base[2:]),
        "through pickle": pickle.loads(pickle.dumps(base)),
        "over a memoryview": np.asarray(memoryview(bytearray(8))[2:]),
    }


def test_the_address_of_an_array_is_where_numpy_says(tmp_path):
    for kind, array in kinds(tmp_path).items():
        address, _ = array.__array_interface__["data"]
        with at(kind):
            assert numpy_arrays.data_pointer(array) == address
            assert numpy_arrays._pointer_by_interface(array) == address
            if sys.implementation.name == "cpython":
                assert numpy_arrays._pointer_by_object(array) == address
