# SPDX-License-Identifier: MIT
"""Which axes make a row, which dtypes results have, and which results there are."""

import math

import ml_dtypes
import numpy as np
import pytest

import cunorm
from cunorm import NormForward, NormGrads
from tests.support.bounds import check_backward, check_forward
from tests.support.operands import (
    DTYPES,
    NORMS,
    assert_same_bits,
    draw,
    optional,
    parameters,
    saved,
)

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
SHAPE = (2, 3, 4, 5)


# --- axes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", range(-4, 4))
def test_a_row_is_all_axes_from_axis_to_the_last(axis):
    x, dy = draw("x", SHAPE, "float32"), draw("dy", SHAPE, "float32")
    weight, bias = (draw(name, SHAPE[axis:], "float32") for name in ("weight", "bias"))
    forward = cunorm.layer_norm_forward(x, weight, bias, axis=axis)
    assert forward.y.shape == SHAPE
    assert forward.mean.shape == forward.rstd.shape == SHAPE[:axis]
    if axis < 0:
        check_forward(forward, x, weight, bias, center=True, eps=1e-5, axis=axis)

    statistics = {"rstd": forward.rstd, "mean": forward.mean}
    grads = cunorm.layer_norm_backward(dy, x, weight, bias, **statistics, axis=axis)
    assert grads.dweight.shape == grads.dbias.shape == SHAPE[axis:]
    if axis < 0:
        check_backward(grads, dy, x, weight, bias, center=True, eps=1e-5, axis=axis)
    if axis >= 0:
        same = cunorm.layer_norm_forward(x, weight, bias, axis=axis - 4)
        assert_same_bits(forward.y, same.y)


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("shape", [(7,), (1, 7), (3, 1, 7), (2, 2, 2, 2, 2, 7)], ids=str)
def test_any_number_of_axes_is_the_same_as_rows_one_after_another(name, shape):
    norm = NORMS[name]
    x, dy, given = draw("x", shape, "float32"), draw("dy", shape, "float32"), {}
    given = parameters(norm, shape[-1], "float32")
    forward = getattr(cunorm, f"{name}_forward")
    backward = getattr(cunorm, f"{name}_backward")
    told = {key: value for key, value in norm.asked().items() if key != "eps"}
    result = forward(x, **given, **norm.asked())
    grads = backward(dy, x, **given, **told, **saved(norm, result))
    assert result.rstd.shape == shape[:-1]
    flat_x, flat_dy = x.reshape(-1, 7), dy.reshape(-1, 7)
    flat = forward(flat_x, **given, **norm.asked())
    flat_grads = backward(flat_dy, flat_x, **given, **told, **saved(norm, flat))
    assert_same_bits(result.y, flat.y.reshape(shape))
    assert_same_bits(grads.dx, flat_grads.dx.reshape(shape))


def test_weight_and_bias_of_any_strides_are_read_by_their_elements():
    x, weight = draw("x", (6, 3, 8), "float32"), draw("weight", (8, 3), "float32").T
    assert not weight.flags.c_contiguous
    y = cunorm.rms_norm(x, weight, axis=-2)
    assert_same_bits(y, cunorm.rms_norm(x, weight.copy(), axis=-2))
    reversed_ = np.arange(8, dtype=np.float32)[::-1]
    assert_same_bits(cunorm.rms_norm(x, reversed_), cunorm.rms_norm(x, reversed_.copy()))
    one = np.broadcast_to(np.float32(3), 8)
    assert_same_bits(cunorm.rms_norm(x, one), cunorm.rms_norm(x, one.copy()))


# --- zero rows ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8)], ids=str)
def test_zero_rows_give_empty_results_and_zero_parameter_gradients(shape):
    x, parameter = np.empty(shape, np.float32), np.ones(8, np.float16)
    forward = cunorm.layer_norm_forward(x, parameter, parameter, residual=x)
    assert forward.y.shape == forward.residual.shape == shape
    assert forward.mean.shape == forward.rstd.shape == shape[:-1]
    statistics = {"rstd": forward.rstd, "mean": forward.mean}
    out = NormGrads(dbias=np.full(8, np.nan, np.float16))
    grads = cunorm.layer_norm_backward(x, x, parameter, parameter, **statistics, out=out)
    assert grads.dx.shape == shape
    assert_same_bits(grads.dweight, np.zeros(8, np.float16))
    assert_same_bits(grads.dbias, np.zeros(8, np.float16))
    assert grads.dbias is out.dbias


# --- dtypes of results ----------------------------------------------------------------------------


@pytest.mark.parametrize("y_dtype", DTYPES)
def test_dtype_is_that_of_y_alone(y_dtype):
    x, weight = draw("x", (5, 40), "bfloat16"), optional("weight", 40, "float64")
    result = cunorm.rms_norm_forward(x, weight, dtype=y_dtype)
    assert result.y.dtype == DTYPES[y_dtype]
    assert result.rstd.dtype == np.float32
    check_forward(result, x, weight, None, eps=1e-6)
    assert_same_bits(cunorm.rms_norm(x, weight, dtype=DTYPES[y_dtype]), result.y)


def test_without_a_residual_x_itself_is_the_stream():
    x = draw("x", (5, 40), "bfloat16")
    assert cunorm.add_rms_norm(x, None).residual is x
    assert cunorm.add_rms_norm(x, None, residual_dtype="bfloat16").residual is x
    assert cunorm.rms_norm_forward(x, residual_dtype="bfloat16").residual is x
    assert cunorm.rms_norm_forward(x).residual is None


@pytest.mark.parametrize("stream", ["float32", "float16"])
def test_without_a_residual_the_stream_is_x_in_residual_dtype(stream):
    x = draw("x", (5, 40), "bfloat16")
    for result in (
        NormForward(*cunorm.add_layer_norm(x, None, residual_dtype=stream)),
        cunorm.layer_norm_forward(x, residual_dtype=stream),
    ):
        assert result.residual.dtype == DTYPES[stream]
        assert result.y.dtype == BFLOAT16
        check_forward(result, x, None, None, residual_dtype=DTYPES[stream], center=True, eps=1e-5)


def test_out_residual_takes_a_copy_of_x_where_there_is_no_residual():
    x = draw("x", (5, 40), "float32")
    stream = np.empty_like(x)
    result = cunorm.add_rms_norm(x, None, out=cunorm.AddNorm(residual=stream))
    assert result.residual is stream
    assert_same_bits(stream, x)
    assert_same_bits(result.y, cunorm.rms_norm(x))


@pytest.mark.parametrize("given", [None, "float32"])
def test_a_bfloat16_branch_of_a_float32_stream_gets_both_gradients(given):
    shape = (30, 257)
    stream, dy = draw("residual", shape, "float32"), draw("dy", shape, "bfloat16")
    d_residual, weight = optional("d_residual", shape, given), optional("weight", 257, "bfloat16")
    forward = cunorm.rms_norm_forward(stream, weight)
    grads = cunorm.rms_norm_backward(
        dy, stream, weight, rstd=forward.rstd, d_residual=d_residual, x_dtype="bfloat16"
    )
    assert grads.dx.dtype == BFLOAT16
    assert grads.dresidual.dtype == np.float32
    check_backward(grads, dy, stream, weight, None, d_residual, eps=1e-6)
    assert_same_bits(grads.dx, grads.dresidual.astype(BFLOAT16), "dx, rounded once from dresidual")


@pytest.mark.parametrize("x_dtype", [None, "float32", np.float32])
def test_where_the_dtypes_agree_dx_is_dresidual(x_dtype):
    x = draw("x", (6, 20), "float32")
    rstd = cunorm.rms_norm_forward(x).rstd
    grads = cunorm.rms_norm_backward(x, x, rstd=rstd, x_dtype=x_dtype)
    assert grads.dx is grads.dresidual


# --- needs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "needs",
    [(), ("x",), ("weight",), ("bias",), ["weight", "x"], {"bias"}, ("gate",)],
    ids=str,
)
def test_only_the_gradients_in_needs_are_returned(needs):
    x, dy = draw("x", (50, 65), "float32"), draw("dy", (50, 65), "float32")
    weight, bias = (optional(name, 65, "float32") for name in ("weight", "bias"))
    forward = cunorm.layer_norm_forward(x, weight, bias)
    statistics = {"rstd": forward.rstd, "mean": forward.mean}
    everything = cunorm.layer_norm_backward(dy, x, weight, bias, **statistics)
    grads = cunorm.layer_norm_backward(dy, x, weight, bias, **statistics, needs=needs)
    wanted = {"dx": "x", "dresidual": "x", "dweight": "weight", "dbias": "bias", "dgate": None}
    for field, name in wanted.items():
        if name in needs:
            assert_same_bits(getattr(grads, field), getattr(everything, field), field)
        else:
            assert getattr(grads, field) is None


def test_a_need_whose_operand_is_absent_gives_none():
    x = draw("x", (6, 20), "float32")
    forward = cunorm.layer_norm_forward(x)
    grads = cunorm.layer_norm_backward(x, x, rstd=forward.rstd, mean=forward.mean)
    assert grads.dweight is None
    assert grads.dbias is None
    assert math.prod(grads.dx.shape) == 120
