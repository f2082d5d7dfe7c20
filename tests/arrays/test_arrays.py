# SPDX-License-Identifier: MIT
"""Operands of NumPy arrays, of foreign DLPack objects and of CuPy arrays; what is no array."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import ml_dtypes
import numpy as np
import pytest

from cunorm._arrays import CPU, contiguous_form, describe, numpy_view
from cunorm._arrays._dlpack import read_capsule
from cunorm._dtypes import BFLOAT16, DTYPES, FLOAT32

DTYPE_NAMES = ["float16", "bfloat16", "float32", "float64"]


def address(array):
    return array.__array_interface__["data"][0]


def some_array(dtype="float32", shape=(3, 4)):
    return np.arange(np.prod(shape)).reshape(shape).astype(np.dtype(dtype))


class Foreign:
    """An array of nobody's framework, that speaks DLPack 1.0."""

    def __init__(self, array):
        self.array = array

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)


class ForeignBefore1(Foreign):
    """The same before there was max_version."""

    def __dlpack__(self, *, stream=None):
        return self.array.__dlpack__(stream=stream)


# --- NumPy


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_a_numpy_array_is_described_without_a_copy(dtype):
    array = some_array(dtype)
    operand = describe("f", "x", array)
    assert operand.owner is array
    assert operand.pointer == address(array)
    assert (operand.shape, operand.strides) == ((3, 4), (4, 1))
    assert operand.dtype is DTYPES[dtype]
    assert (operand.device, operand.framework.name, operand.writable) == (CPU, "numpy", True)


@pytest.mark.parametrize(
    ("view", "strides"),
    [
        (lambda a: a.T, (1, 4)),
        (lambda a: a[::-1, 1:], (-4, 1)),
        (lambda a: a[:, ::2], (4, 2)),
        (lambda a: a[1, 2, ...], ()),
        (lambda a: a[:0], (4, 1)),
        (lambda a: a[:, None, :], (4, 0, 1)),
    ],
    ids=["transposed", "reversed", "stepped", "0-d", "empty", "new axis"],
)
def test_numpy_views_keep_their_first_element_and_their_strides(view, strides):
    array = view(some_array())
    operand = describe("f", "x", array)
    assert (operand.pointer, operand.shape) == (address(array), array.shape)
    assert operand.strides == strides
    assert operand.owner is array


def test_an_expanded_numpy_array_has_stride_0_and_is_not_writable():
    operand = describe("f", "x", np.broadcast_to(some_array(shape=(4,)), (3, 4)))
    assert operand.strides == (0, 1)
    assert not operand.writable


def test_a_memmap_is_a_numpy_array(tmp_path):
    array = np.memmap(tmp_path / "x", np.float32, "w+", shape=(3, 4))
    operand = describe("f", "x", array)
    assert (operand.pointer, operand.owner is array) == (address(array), True)
    assert (operand.framework.name, operand.writable) == ("numpy", True)


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
def test_a_matrix_is_taken_as_the_plain_memory_it_is():
    array = np.matrix([[1.0, 2.0]])
    assert describe("f", "x", array).pointer == address(array)


@pytest.mark.parametrize(
    "array",
    [
        np.frombuffer(b"\0" * 49, np.uint8)[1:].view(np.float32).reshape(3, 4),
        np.zeros((3, 4), [("value", np.float32), ("tag", np.int8)])["value"],
    ],
    ids=["odd address", "odd strides"],
)
def test_unaligned_numpy_data_is_copied_once_and_the_owner_shows_it(array):
    operand = describe("f", "x", array)
    assert operand.owner is not array
    assert (operand.pointer, operand.pointer % 4) == (address(operand.owner), 0)
    assert (operand.shape, operand.strides) == ((3, 4), (4, 1))
    assert np.array_equal(operand.owner, array)


def test_an_aligned_field_of_a_structured_array_is_not_copied():
    array = np.zeros((3, 4), [("tag", np.int16), ("value", np.float16)])["value"]
    operand = describe("f", "x", array)
    assert (operand.pointer, operand.strides) == (address(array), (8, 2))


def test_a_masked_array_is_refused_and_the_error_names_filled():
    with pytest.raises(TypeError, match=r"^rms_norm: x is a masked array.*x\.filled\(value\)$"):
        describe("rms_norm", "x", np.ma.masked_array([1.0, 2.0], [True, False]))


def test_a_byte_swapped_array_is_refused_and_the_error_names_astype():
    array = some_array().astype(np.dtype(np.float32).newbyteorder())
    with pytest.raises(TypeError, match=r"^rms_norm: x has dtype .f4 in foreign.*x\.astype"):
        describe("rms_norm", "x", array)


@pytest.mark.parametrize("dtype", ["int32", "complex64", "bool", "float8_e4m3fn"])
def test_other_dtypes_are_refused_by_name(dtype):
    array = np.zeros(3, getattr(ml_dtypes, dtype, dtype))
    expected = f"^rms_norm: x has dtype {dtype}, expected float16, bfloat16, float32 or float64$"
    with pytest.raises(TypeError, match=expected):
        describe("rms_norm", "x", array)


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_numpy_outputs_are_the_arrays_that_were_written_to(dtype):
    operand = describe("f", "x", some_array()).framework.allocate(
        contiguous_form((2, 3, 5), DTYPES[dtype], CPU)
    )
    array = operand.framework.export(operand)
    assert (array.shape, array.dtype.name, array.flags.c_contiguous) == ((2, 3, 5), dtype, True)
    assert operand.pointer == address(array)
    assert (operand.strides, operand.writable) == ((15, 5, 1), True)


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_contiguous_copies_a_reversed_transposed_array_into_c_order(dtype):
    array = some_array(dtype).T[::-1]
    operand = describe("f", "x", array)
    copy = operand.framework.contiguous(operand)
    assert copy.pointer != operand.pointer
    assert (copy.strides, copy.dtype, copy.framework) == ((3, 1), DTYPES[dtype], operand.framework)
    assert np.array_equal(numpy_view(copy), array)


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_numpy_view_shares_the_memory_and_keeps_it_alive(dtype):
    array = some_array(dtype)[::-1, ::2]
    expected = array.copy()
    view = numpy_view(describe("f", "x", array))
    assert (view.dtype, address(view), view.strides) == (array.dtype, address(array), array.strides)
    alive = weakref.ref(array)
    del array
    gc.collect()
    assert alive() is not None
    assert np.array_equal(view, expected)


def test_numpy_view_of_a_read_only_operand_is_read_only():
    assert not numpy_view(describe("f", "x", np.broadcast_to(np.float32(1), (2,)))).flags.writeable


# --- no arrays


@pytest.mark.parametrize(
    ("thing", "name"),
    [
        ([1.0], "of type list"),
        (1.0, "of type float"),
        (None, "None"),
        (np.float32(1), "of type float32"),
        (np.dtype("f4"), r"of type Float32DType|of type dtype\[float32\]"),
        (object(), "of type object"),
    ],
)
def test_what_is_no_array_is_refused_with_its_type(thing, name):
    expected = f"^add_rms_norm: residual is ({name}), expected a NumPy, CuPy, PyTorch or JAX array"
    with pytest.raises(TypeError, match=expected):
        describe("add_rms_norm", "residual", thing)


def test_describing_a_numpy_array_imports_no_framework():
    script = (
        "import sys, numpy as np\n"
        "from cunorm._arrays import describe\n"
        "describe('f', 'x', np.zeros((2, 3), np.float32))\n"
        "loaded = {'torch', 'jax', 'jaxlib', 'cupy', 'ml_dtypes'} & set(sys.modules)\n"
        "assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


# --- DLPack


@pytest.mark.parametrize("kind", [Foreign, ForeignBefore1])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_foreign_dlpack_object_is_described_without_a_copy(kind, dtype):
    array = some_array(dtype)[::-1, ::2]
    operand = describe("f", "x", kind(array))
    assert (operand.pointer, operand.shape, operand.strides) == (address(array), (3, 2), (-4, 2))
    assert (operand.dtype, operand.device) == (DTYPES[dtype], CPU)
    assert (operand.framework.name, operand.writable) == ("dlpack", True)


def test_a_foreign_bfloat16_object_is_described_without_a_copy():
    torch = pytest.importorskip("torch")
    tensor = torch.ones(3, 4, dtype=torch.bfloat16)
    operand = describe("f", "x", Foreign(tensor))
    assert (operand.pointer, operand.dtype) == (tensor.data_ptr(), BFLOAT16)


@pytest.mark.parametrize("dtype", ["int32", "complex64", "uint16"])
def test_foreign_objects_of_other_dtypes_are_refused_by_name(dtype):
    with pytest.raises(TypeError, match=f"^f: x has dtype {dtype}, expected float16, bfloat16"):
        describe("f", "x", Foreign(np.zeros(3, dtype)))


def test_a_capsule_is_looked_into_not_consumed_and_freed_with_the_operand():
    array = some_array()
    alive = weakref.ref(array)
    operand = describe("f", "x", Foreign(array))
    del array
    gc.collect()
    assert alive() is not None
    read_capsule(operand.owner)  # a consumed one would raise
    del operand
    gc.collect()
    assert alive() is None


def test_a_capsule_that_was_consumed_before_is_refused():
    class Again(Foreign):
        def __dlpack_device__(self):
            return (1, 0)

        def __dlpack__(self, **options):
            return self.array

    again = Again(some_array().__dlpack__())
    np.from_dlpack(again)
    with pytest.raises(ValueError, match=r"^f: x does not give .* expected an unconsumed DLPack"):
        describe("f", "x", again)


def test_a_read_only_foreign_object_is_not_writable():
    array = some_array()
    array.flags.writeable = False
    assert not describe("f", "x", Foreign(array)).writable


def test_a_foreign_object_that_cannot_export_says_why():
    array = some_array()
    array.flags.writeable = False  # which the older protocol has no word for
    with pytest.raises(ValueError, match=r"^f: x does not give its memory through DLPack: .*only"):
        describe("f", "x", ForeignBefore1(array))


def test_a_foreign_object_on_another_device_is_refused():
    class OnRocm(Foreign):
        def __dlpack_device__(self):
            return (10, 0)

    with pytest.raises(ValueError, match="DLPack device type 10, expected CPU or CUDA"):
        describe("f", "x", OnRocm(some_array()))


def test_foreign_objects_get_numpy_arrays_back():
    framework = describe("f", "x", Foreign(some_array())).framework
    operand = framework.allocate(contiguous_form((2, 3), FLOAT32, CPU))
    array = operand.framework.export(operand)
    assert (type(array), address(array)) == (np.ndarray, operand.pointer)


def test_contiguous_copies_a_foreign_object_into_c_order():
    array = some_array().T[::-1]
    operand = describe("f", "x", Foreign(array))
    copy = operand.framework.contiguous(operand)
    assert (copy.strides, copy.framework.name) == ((3, 1), "dlpack")
    assert np.array_equal(numpy_view(copy), array)
