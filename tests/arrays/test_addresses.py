# SPDX-License-Identifier: MIT
"""The address of a NumPy array, however it was created."""

import pickle
import sys

import numpy as np

from tests.support.internals import numpy_arrays
from tests.support.operands import at


class Sub(np.ndarray):
    """An array with its own fields after NumPy's."""

    def __array_finalize__(self, other):
        self.more = (1, 2, 3)


def resized():
    array = np.zeros(3)
    array.resize((500, 20), refcheck=False)
    return array


def test_the_address_of_an_array_is_where_numpy_says(tmp_path):
    base = np.zeros((6, 8))
    record = np.zeros(5, [("name", "S3"), ("x", "f4"), ("y", "f8", (2, 3))])
    mapped = np.memmap(tmp_path / "numbers", np.float32, "w+", offset=20, shape=(4, 5))
    kinds = {
        "reversed": base[::-1, ::-1],
        "expanded, read-only": np.broadcast_to(base[0], (3, 8)),
        "no axes": np.array(1.0),
        "no axes, of a view": base[2, 3, ...],
        "no elements, at the end": base[6:],
        "subclass": base.view(Sub)[1:],
        "record array": np.rec.array(record).x,
        "field of a subarray": record["y"][:, 1],
        "memory map": mapped[3:],
        "from a buffer": np.frombuffer(b"0123456789abcdef", np.uint8, offset=5),
        "unaligned": np.zeros(65, np.uint8)[1:].view(np.float64),
        "resized": resized(),
        "of objects": np.array([None, 1, "x"]),
        "through DLPack": np.from_dlpack(base[2:]),
        "through pickle": pickle.loads(pickle.dumps(base)),
    }
    for kind, array in kinds.items():
        address, _ = array.__array_interface__["data"]
        with at(kind):
            assert numpy_arrays.data_pointer(array) == address
            assert numpy_arrays._pointer_by_ctypes(array) == address
            if sys.implementation.name == "cpython":
                assert numpy_arrays._pointer_by_object(array) == address
