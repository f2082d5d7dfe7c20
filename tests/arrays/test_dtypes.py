# SPDX-License-Identifier: MIT
"""The four storage types and their spellings in every framework."""

from __future__ import annotations

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from cunorm import _dtypes
from cunorm._dtypes import BFLOAT16, DTYPES, FLOAT32, FLOAT64, dtype_of, numpy_dtype, parse_dtype

NAMES = ["float16", "bfloat16", "float32", "float64"]
ALLOWED = "expected float16, bfloat16, float32 or float64"


def test_the_storage_types_are_these_four_and_print_as_their_names():
    assert list(DTYPES) == NAMES
    assert [str(dtype) for dtype in DTYPES.values()] == NAMES
    assert [dtype.cuda for dtype in DTYPES.values()] == ["fp16", "bf16", "fp32", "fp64"]


@pytest.mark.parametrize("name", NAMES)
def test_numpy_dtype_and_dtype_of_are_inverse(name):
    dtype = numpy_dtype(DTYPES[name])
    assert dtype.name == name
    assert dtype.itemsize == DTYPES[name].itemsize
    assert dtype_of("f", "x", dtype) is DTYPES[name]


@pytest.mark.parametrize("name", NAMES)
def test_parse_dtype_takes_names_and_numpy_dtypes_and_scalar_types(name):
    dtype = np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
    for spec in (name, dtype, dtype.type, DTYPES[name].name):
        assert parse_dtype("f", "dtype", spec) is DTYPES[name]
        assert parse_dtype("f", "dtype", spec) is DTYPES[name]  # as remembered


@pytest.mark.parametrize("name", NAMES)
def test_parse_dtype_takes_torch_dtypes(name):
    torch = pytest.importorskip("torch")
    assert parse_dtype("f", "dtype", getattr(torch, name)) is DTYPES[name]


@pytest.mark.parametrize("name", NAMES)
def test_parse_dtype_takes_jax_scalar_types(name):
    jnp = pytest.importorskip("jax.numpy")
    assert parse_dtype("f", "dtype", getattr(jnp, name)) is DTYPES[name]


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
        (None, "None"),  # float64 to NumPy
        (32, "32"),
        ([], r"\[\]"),
        (np.zeros(2, np.float32), "array"),
    ],
)
def test_parse_dtype_refuses_everything_else_by_name(spec, got):
    with pytest.raises(TypeError, match=f"^rms_norm: residual_dtype is {got}.*, {ALLOWED}$"):
        parse_dtype("rms_norm", "residual_dtype", spec)


def test_parse_dtype_refuses_other_torch_dtypes():
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match=f"^f: dtype is int8, {ALLOWED}$"):
        parse_dtype("f", "dtype", torch.int8)


@pytest.mark.parametrize("dtype", ["int32", "complex64", "bool", "float8_e5m2", "longdouble"])
def test_an_array_of_another_dtype_is_refused_by_name(dtype):
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    with pytest.raises(TypeError, match=f"^rms_norm: x has dtype {dtype.name}, {ALLOWED}$"):
        dtype_of("rms_norm", "x", dtype)


def test_a_byte_swapped_dtype_is_refused_and_the_error_names_the_cast():
    with pytest.raises(TypeError, match=r"dtype [<>]f4 in foreign byte.*x\.astype\('float32'\)"):
        dtype_of("rms_norm", "x", np.dtype(np.float32).newbyteorder())


def test_bfloat16_without_ml_dtypes_says_what_to_install(monkeypatch):
    monkeypatch.delitem(_dtypes._NUMPY, BFLOAT16, raising=False)
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(TypeError, match="pip install ml_dtypes"):
        numpy_dtype(BFLOAT16)
    assert numpy_dtype(FLOAT32) == np.float32


def test_other_dtypes_than_bfloat16_never_import_ml_dtypes():
    script = (
        "import sys, numpy as np; from cunorm._dtypes import *\n"
        "parse_dtype('f', 'x', np.float32); numpy_dtype(FLOAT64)\n"
        "assert 'ml_dtypes' not in sys.modules\n"
        "numpy_dtype(BFLOAT16); assert 'ml_dtypes' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    assert numpy_dtype(FLOAT64) == np.float64
