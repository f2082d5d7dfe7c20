# SPDX-License-Identifier: MIT
"""Corners: rows that add up roundings or deceive the shift, no rows, results in odd places."""

import pickle
import sys

import ml_dtypes
import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import cunorm
from cunorm import AddNorm, NormForward, _cpu
from cunorm._arrays import _numpy
from tests.support.bounds import check_backward, check_forward
from tests.support.operands import at, draw
from tests.support.scales import (
    check_backward_rounds_what_the_forward_rounded,
    check_scales_are_rounded_once,
    check_scales_beyond_float32,
)


@pytest.mark.parametrize("width", [4096, 16384, 65536, 262144])
def test_equal_elements_do_not_add_up_their_roundings(width):
    rng = np.random.default_rng(width)
    for value in rng.uniform(1, 2, 8).astype(np.float32):
        x = np.full((1, width), value)
        check_forward(cunorm.rms_norm_forward(x, eps=0), x, None, None, eps=0)
        x = np.where(rng.random((1, width)) < 0.5, value, -value)
        check_forward(cunorm.layer_norm_forward(x), x, None, None, center=True, eps=1e-5)


def test_rstd_and_what_multiplies_a_row_are_rounded_once():
    check_scales_are_rounded_once(lambda x, c: cunorm.normalize_forward(x, c=c, eps=0), rows=2047)


@pytest.mark.skipif(_cpu.compiler() is None, reason="without a compiler NumPy takes float64")
def test_a_length_beyond_float32_is_infinite_or_zero():
    check_scales_beyond_float32(lambda x, c: cunorm.normalize_forward(x, c=c, eps=0))


def test_the_backward_rounds_before_weight_what_the_forward_rounded():
    check_backward_rounds_what_the_forward_rounded(
        cunorm.normalize_forward, cunorm.normalize_backward, rows=2000
    )


@pytest.mark.parametrize(("rows", "width"), [(4096, 8), (131072, 2)])
def test_equal_gradients_do_not_add_up_their_roundings(rows, width):
    x, ones = draw("x", (rows, width), "float32"), np.ones(width, np.float32)
    dy = np.full((rows, width), np.float32(1.3))
    saved = cunorm.layer_norm_forward(x, ones, ones)
    grads = cunorm.layer_norm_backward(dy, x, ones, ones, rstd=saved.rstd, mean=saved.mean)
    check_backward(grads, dy, x, ones, ones, center=True, eps=1e-5)


@pytest.mark.parametrize("width", [257, 1000, 16384])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_row_whose_beginning_is_unlike_the_rest_is_within_its_bound(dtype, width):
    far = draw("x", (5, width), dtype, mean=1e4)
    far[:, :64] = draw("beginning", (5, 64), dtype, mean=-1e4)
    outlier = draw("x", (5, width), dtype)
    outlier[:, 0] = 1e6
    for x in (far, outlier):
        weight, dy = draw("weight", width, dtype), draw("dy", x.shape, dtype)
        result = cunorm.layer_norm_forward(x, weight)
        check_forward(result, x, weight, None, center=True, eps=1e-5)
        saved = {"rstd": result.rstd, "mean": result.mean}
        grads = cunorm.layer_norm_backward(dy, x, weight, **saved)
        check_backward(grads, dy, x, weight, None, center=True, eps=1e-5)


@pytest.mark.parametrize(
    "place", [np.s_[::2], np.s_[::-1], np.s_[3::-1]], ids=["strided", "reversed", "reversed part"]
)
def test_statistics_are_only_written_to_contiguous_arrays(place):
    memory = np.full(8, 7, np.float32)
    there = memory[place]
    x = draw("x", (len(there), 8), "float32")
    with pytest.raises(ValueError, match=r"rms_norm_forward: out\.rstd has strides"):
        cunorm.rms_norm_forward(x, out=NormForward(rstd=there))
    assert (memory == 7).all()


def test_the_stream_may_not_be_written_over_a_parameter_that_is_still_to_be_read():
    x, residual, weight = (draw(name, 8, "float32") for name in ("x", "residual", "weight"))
    with pytest.raises(ValueError, match=r"add_rms_norm: out\.residual overlaps weight"):
        cunorm.add_rms_norm(x, residual, weight, out=AddNorm(residual=weight))


@pytest.mark.parametrize("shape", [(0, 4), (0, 0, 0, 0, 4), (3, 0, 2, 0, 5, 4)])
def test_arrays_without_rows_take_any_strides(shape):
    x, weight = np.zeros(shape, np.float32), np.ones(4, np.float32)
    y = np.zeros(shape[::-1], np.float32).T
    assert cunorm.rms_norm(x, weight, out=y) is y
    saved = cunorm.rms_norm_forward(x, weight)
    grads = cunorm.rms_norm_backward(y, x, weight, rstd=saved.rstd)
    assert grads.dx.shape == shape
    assert not grads.dweight.any()


def test_a_relative_cache_folder_survives_a_change_of_directory(tmp_path, monkeypatch):
    from cunorm._cpu import _compile

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUNORM_CACHE_DIR", "kernels")
    assert _compile.cache_folder.__wrapped__() == tmp_path / "kernels"


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_cache_folder_that_others_may_write_to_is_not_used(mode, tmp_path, monkeypatch):
    from cunorm._cpu import _compile

    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(mode)
    monkeypatch.setenv("CUNORM_CACHE_DIR", str(folder))
    with pytest.warns(RuntimeWarning, match="for this process only"):
        assert _compile.cache_folder.__wrapped__() != folder


@pytest.mark.parametrize("axis", [-1, 1])
def test_groups_are_of_the_last_axis_however_it_is_counted(axis):
    x, weight = draw("x", (5, 8), "float32"), draw("weight", 8, "float32")
    result = cunorm.layer_norm_forward(x, weight, groups=2, axis=axis)
    check_forward(result, x, weight, None, center=True, eps=1e-5, groups=2)
    assert cunorm.rms_norm(x[0], groups=4, axis=0).shape == (8,)
    size = cunorm.workspace_size("rms_norm_backward", x, weight, groups=2, axis=axis)
    assert size == cunorm.workspace_size("rms_norm_backward", x, weight)


# --- where a NumPy array lies ---------------------------------------------------------------------


class Sub(np.ndarray):
    """With fields of its own, after NumPy's."""

    def __array_finalize__(self, other):
        self.more = (1, 2, 3)


def resized():
    array = np.zeros(3)
    array.resize((500, 20), refcheck=False)
    return array


def reassigned():
    array = np.zeros((4, 6))
    array.shape = (24,)
    array.dtype = np.float32
    return array


def kinds(folder):
    """Return arrays of every kind, by what is odd about them."""
    base = np.zeros((6, 8))
    record = np.zeros(5, [("name", "S3"), ("x", "f4"), ("y", "f8", (2, 3))])
    mapped = np.memmap(folder / "numbers", np.float32, "w+", offset=20, shape=(4, 5))
    np.save(folder / "saved.npy", base)
    return {
        "new": np.empty(3),
        "view": base[1:, 2:],
        "reversed": base[::-1, ::-1],
        "transposed": base.T[3:],
        "expanded": np.broadcast_to(base[0], (3, 8)),
        "strided": as_strided(base, (3, 3), (16, 8)),
        "no axes": np.array(1.0),
        "no axes, of a view": base[2, 3, ...],
        "no elements": np.zeros((0, 5)),
        "no elements, at the end": base[6:],
        "no elements, at the side": base[:, 8:],
        "subclass": base.view(Sub)[1:],
        "record array": np.rec.array(record).x,
        "field": record["x"],
        "field of a subarray": record["y"][:, 1],
        "memory map": mapped,
        "memory map, from 3": mapped[3:],
        "loaded memory map": np.load(folder / "saved.npy", mmap_mode="r"),
        "from a buffer": np.frombuffer(b"0123456789abcdef", np.uint8, offset=5),
        "from a bytearray": np.frombuffer(bytearray(64), np.float32, offset=4),
        "unaligned": np.zeros(65, np.uint8)[1:].view(np.float64),
        "read-only": np.broadcast_to(np.float16(1), (2, 2)),
        "resized": resized(),
        "reassigned": reassigned(),
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
            assert _numpy.data_pointer(array) == address
            assert _numpy._pointer_by_interface(array) == address
            if sys.implementation.name == "cpython":
                assert _numpy._pointer_by_object(array) == address
