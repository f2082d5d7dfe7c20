# SPDX-License-Identifier: MIT
"""A guarded array is a faithful copy, placed as asked, and what is around it is watched."""

import ctypes
import mmap

import ml_dtypes
import numpy as np
import pytest

from .guarded import guarded

BASE = np.arange(7 * 30, dtype=np.float32).reshape(7, 30)
LAYOUTS = {
    "contiguous": BASE,
    "slice": BASE[:, 3:14],
    "every other row": BASE[::2],
    "reversed": BASE[::-1],
    "transposed": BASE.reshape(7, 5, 6).transpose(1, 0, 2),
    "expanded": np.broadcast_to(BASE[2], (4, 30)),
    "empty": BASE[:0],
    "scalar": BASE[1, 2],
    "bfloat16": BASE.astype(ml_dtypes.bfloat16)[:, :5],
}


@pytest.mark.parametrize("at", ["end", "start"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_copy_has_the_values_strides_and_pointer_of_the_array(layout, at):
    array = np.asarray(LAYOUTS[layout])
    copy = guarded(array, at=at)
    np.testing.assert_array_equal(copy.array, array)
    assert copy.array.strides == array.strides
    assert copy.array.dtype == array.dtype
    assert copy.pointer == copy.array.ctypes.data
    assert not np.shares_memory(copy.array, array)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "empty"])
def test_an_array_is_flush_with_its_guard_page(layout):
    at_end, at_start = (guarded(LAYOUTS[layout], at=at) for at in ("end", "start"))
    assert (at_end.begin + at_end.nbytes) % mmap.PAGESIZE == 0
    assert at_start.begin % mmap.PAGESIZE == 0
    indices = np.indices(at_end.array.shape)
    steps = sum(i * s for i, s in zip(indices, at_end.array.strides, strict=True))
    addresses = at_end.pointer + np.asarray(steps)
    assert addresses.min() == at_end.begin
    assert addresses.max() + at_end.array.itemsize == at_end.begin + at_end.nbytes


@pytest.mark.parametrize("at", ["end", "start"])
@pytest.mark.parametrize("alignment", [4, 16, 64])
@pytest.mark.parametrize("offset", [0, 4, 12])
def test_the_pointer_is_aligned_as_asked_and_the_guard_page_near(at, alignment, offset):
    if offset >= alignment:
        with pytest.raises(ValueError, match="do not fit"):
            guarded(BASE, at=at, alignment=alignment, offset=offset)
        return
    for array in (BASE[:, :13], BASE[::-1]):
        copy = guarded(array, at=at, alignment=alignment, offset=offset)
        assert copy.pointer % alignment == offset
        end = copy.begin + copy.nbytes
        slack = -end % mmap.PAGESIZE if at == "end" else copy.begin % mmap.PAGESIZE
        assert slack < alignment


def test_an_input_is_read_only_and_an_output_is_poison():
    assert not guarded(BASE).array.flags.writeable
    assert np.isnan(guarded(BASE, role="output").array).all()
    np.testing.assert_array_equal(guarded(BASE, role="inout").array, BASE)


def test_writes_to_the_array_do_not_disturb_and_those_around_it_do():
    copy = guarded(BASE[:, 3:14], role="inout", alignment=64)
    copy.array[...] = 0
    assert copy.disturbed().size == 0
    ctypes.memset(copy.begin + 2 * 120 + 11 * 4, 0, 3)  # after the third row
    ctypes.memset(copy.begin + copy.nbytes, 1, 1)
    np.testing.assert_array_equal(copy.disturbed(), [284, 285, 286, copy.nbytes])
