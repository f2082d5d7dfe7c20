# SPDX-License-Identifier: MIT
"""A DLPack object whose data begins some bytes after its address is read from there."""

import numpy as np

import cunorm
from cunorm._arrays._dlpack import read_capsule
from tests.support.operands import draw


class Offset:
    """An array, as an object whose capsule has an offset."""

    def __init__(self, array, offset):
        self.array, self.offset = array, offset

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **told):
        capsule = self.array.__dlpack__(**told)
        tensor, _ = read_capsule(capsule)
        tensor.data, tensor.byte_offset = tensor.data - self.offset, self.offset
        return capsule


def test_a_foreign_objects_offset_in_bytes_counts():
    x = draw("x", (3, 40), "float32")
    np.testing.assert_array_equal(cunorm.rms_norm(Offset(x, 64)), cunorm.rms_norm(x))
