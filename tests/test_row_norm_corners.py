# SPDX-License-Identifier: MIT
"""Corners: rows that add up roundings or deceive the shift, no rows, results in odd places."""

import numpy as np
import pytest
from bounds import check_backward, check_forward
from operands import draw

import cunorm
from cunorm import AddNorm, NormForward


@pytest.mark.parametrize("width", [4096, 16384, 65536, 262144])
def test_equal_elements_do_not_add_up_their_roundings(width):
    rng = np.random.default_rng(width)
    for value in rng.uniform(1, 2, 8).astype(np.float32):
        x = np.full((1, width), value)
        check_forward(cunorm.rms_norm_forward(x, eps=0), x, None, None, eps=0)
        x = np.where(rng.random((1, width)) < 0.5, value, -value)
        check_forward(cunorm.layer_norm_forward(x), x, None, None, center=True, eps=1e-5)


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


def test_a_cache_folder_that_others_may_write_to_is_not_used(tmp_path, monkeypatch):
    from cunorm._cpu import _compile

    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o777)
    monkeypatch.setenv("CUNORM_CACHE_DIR", str(folder))
    with pytest.warns(RuntimeWarning, match="for this process only"):
        assert _compile.cache_folder.__wrapped__() != folder


def test_an_equal_call_before_leaves_no_trace():
    x = np.array([[3, 4]], dtype=np.float32)
    for c in (0.0, -0.0, 0.0):
        assert (np.signbit(cunorm.normalize(x, c=c)) == np.signbit(c)).all()
    with pytest.raises(TypeError, match="axis is True, expected an int"):
        cunorm.normalize(x, axis=True)
    cunorm.normalize(x, axis=1)
    with pytest.raises(TypeError, match="axis is True, expected an int"):
        cunorm.normalize(x, axis=True)
