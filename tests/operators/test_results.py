# SPDX-License-Identifier: MIT
"""The axes of a row, the dtypes of results, and which results are returned."""

import numpy as np
import pytest

import cunorm
from cunorm import AddNorm, GroupNormGrads, NormForward, NormGrads
from tests.support.bounds import check_backward, check_forward
from tests.support.cases import call_of
from tests.support.gpu_arrays import OnNumpy, get_all
from tests.support.norm_checks import check_norm
from tests.support.operands import DTYPES, assert_same_bits, draw, optional

SHAPE = (2, 3, 4, 5)

# --- axes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", range(-4, 4))
def test_a_row_is_all_axes_from_axis_to_the_last(axis):
    x, parameters = draw("x", SHAPE, "float32"), draw("parameters", (2, *SHAPE[axis:]), "float32")
    f, grads = check_norm(OnNumpy(), x, parameters=parameters, center=True, axis=axis)
    assert f.y.shape == SHAPE
    assert f.mean.shape == f.rstd.shape == SHAPE[:axis]
    assert grads.dweight.shape == grads.dbias.shape == SHAPE[axis:]


@pytest.mark.parametrize("axis", [-1, 1])
def test_groups_divide_the_last_axis_counted_from_either_end(axis):
    x, weight = draw("x", (5, 8), "float32"), draw("weight", 8, "float32")
    result = cunorm.layer_norm_forward(x, weight, groups=2, axis=axis)
    check_forward(result, x, weight, None, center=True, eps=1e-5, groups=2)
    assert cunorm.rms_norm(x[0], groups=4, axis=0).shape == (8,)
    size = cunorm.workspace_size("rms_norm_backward", x, weight, groups=2, axis=axis)
    assert size == cunorm.workspace_size("rms_norm_backward", x, weight)


# --- empty arrays ---------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8), (0, 0, 0, 0, 8)], ids=str)
def test_zero_rows_give_empty_results_and_zero_parameter_gradients(device, shape):
    x, parameter = device.put(np.empty(shape, np.float32)), device.put(np.ones(8, np.float16))
    f = cunorm.layer_norm_forward(x, parameter, parameter, residual=x)
    assert f.y.shape == f.residual.shape == shape
    assert f.mean.shape == f.rstd.shape == shape[:-1]
    out = NormGrads(dbias=device.put(np.full(8, np.nan, np.float16)))
    saved = {"rstd": f.rstd, "mean": f.mean, "out": out}
    grads = cunorm.layer_norm_backward(x, x, parameter, parameter, **saved)
    assert grads.dbias is out.dbias
    check_empty(device, grads, shape)
    if not device.is_gpu:
        y = np.zeros(shape[::-1], np.float32).T  # of any strides
        assert cunorm.rms_norm(x, out=y) is y


@pytest.mark.parametrize(("shape", "axis"), [((0, 8), -1), ((0, 5, 3, 8), -1), ((0, 8, 7), 1)])
def test_no_samples_give_empty_results_and_zero_parameter_gradients(device, shape, axis):
    x, weight = device.put(np.empty(shape, np.float32)), device.put(np.ones(8, np.float16))
    options = {"activation": "silu", "channel_axis": axis}
    f = cunorm.group_norm_forward(x, 4, weight, **options)
    assert f.y.shape == cunorm.instance_norm(x, channel_axis=axis).shape == shape
    y = device.put(np.empty(shape, np.float32))  # an empty array's strides may all be 0
    assert cunorm.group_norm(x, 4, weight, **options, out=y) is y
    assert f.mean.shape == f.rstd.shape == (0, 4)
    options |= {"mean": f.mean, "rstd": f.rstd}
    check_empty(device, cunorm.group_norm_backward(x, x, 4, weight, weight, **options), shape)
    before = np.float32([np.inf, -np.inf, np.nan, 0, 1, 2, 3, 4])
    out = GroupNormGrads(dweight=device.put(before.copy()))
    cunorm.group_norm_backward(x, x, 4, weight, **options, out=out, accumulate=True)
    assert_same_bits(device.get(out.dweight), before)


def check_empty(device, grads, shape):
    assert grads.dx.shape == shape
    for gradient in (grads.dweight, grads.dbias):
        assert_same_bits(device.get(gradient), np.zeros(8, np.float16))


# --- dtypes of results ----------------------------------------------------------------------------


@pytest.mark.parametrize("y_dtype", ["float16", "float64"])
def test_dtype_is_the_dtype_of_y_and_of_no_other_result(y_dtype):
    x, weight = draw("x", (5, 40), "bfloat16"), optional("weight", 40, "float64")
    result = cunorm.rms_norm_forward(x, weight, dtype=y_dtype)
    assert result.y.dtype == DTYPES[y_dtype]
    assert result.rstd.dtype == np.float32
    check_forward(result, x, weight, None, eps=1e-6)
    assert_same_bits(cunorm.rms_norm(x, weight, dtype=DTYPES[y_dtype]), result.y)
    y = cunorm.instance_norm(x.reshape(5, 8, 5), dtype=y_dtype)
    assert_same_bits(y, cunorm.group_norm(x.reshape(5, 8, 5), 5, dtype=DTYPES[y_dtype]))


STREAMS = [
    *(("bfloat16", "bfloat16", "float32"), ("float32", "float16", "bfloat16")),
    *(("float16", "float32", "float64"), ("bfloat16", "float64", "float32")),
]


@pytest.mark.parametrize(("x", "residual", "stream"), STREAMS)
def test_a_stream_goes_on_in_residual_dtype(device, x, residual, stream):
    """The sum is rounded once from the compute type, which follows from x and the new stream."""
    case = {"shape": (1, 1, 9, 100), "x": x, "stream": f"+ {residual} as {stream}", "given": ()}
    found = call_of("row_norm_forward", case, device).check()
    assert (found.y.dtype, found.residual.dtype) == (DTYPES[x], DTYPES[stream])
    assert found.rstd.dtype == (np.float64 if stream == "float64" else np.float32)


def test_an_offset_without_a_weight_changes_nothing(device):
    x, dy = (device.put(draw(name, (5, 40), "float32")) for name in ("x", "dy"))
    found = []
    for options in ({}, {"weight_offset": 1.0}):
        f = cunorm.rms_norm_forward(x, **options)
        found.append((f.y, cunorm.rms_norm_backward(dy, x, rstd=f.rstd, **options).dx))
    for plain, offset in zip(*found, strict=True):
        assert_same_bits(device.get(offset), device.get(plain))


PROMOTED = {
    frozenset(("float16", "bfloat16")): "float32",
    **{frozenset((dtype, "float32")): "float32" for dtype in ("float16", "bfloat16", "float32")},
    **{frozenset((dtype, "float64")): "float64" for dtype in DTYPES},
}


@pytest.mark.parametrize("weight", DTYPES)
@pytest.mark.parametrize("x", DTYPES)
def test_y_has_xs_dtype_and_with_rounding_the_dtype_promoted_from_x_and_weight(x, weight):
    given = draw("x", (0, 8), x), draw("weight", 8, weight)
    promoted = PROMOTED.get(frozenset((x, weight)), x)
    rounds = {"round_before_weight": True}
    assert cunorm.rms_norm(*given, **rounds).dtype == DTYPES[promoted]
    assert cunorm.rms_norm(given[0], **rounds).dtype == DTYPES[x]
    assert cunorm.rms_norm(*given).dtype == DTYPES[x]
    assert cunorm.rms_norm(*given, dtype="float16", **rounds).dtype == np.float16
    stream = draw("residual", (0, 8), "float64")
    assert cunorm.add_rms_norm(given[0], stream, given[1], **rounds).y.dtype == DTYPES[promoted]


# --- the stream -----------------------------------------------------------------------------------


def test_without_a_residual_x_itself_is_the_stream():
    x = draw("x", (5, 40), "bfloat16")
    assert cunorm.add_rms_norm(x, None).residual is x
    assert cunorm.add_rms_norm(x, None, residual_dtype="bfloat16").residual is x
    assert cunorm.rms_norm_forward(x, residual_dtype="bfloat16").residual is x
    assert cunorm.rms_norm_forward(x).residual is None
    out = AddNorm(residual=np.empty_like(x))
    result = cunorm.add_rms_norm(x, None, out=out)
    assert result.residual is out.residual
    assert_same_bits(result.residual, x)
    assert_same_bits(result.y, cunorm.rms_norm(x))


def test_without_a_residual_the_stream_is_x_in_residual_dtype(device):
    x, options = draw("x", (5, 40), "bfloat16"), {"residual_dtype": "float32"}
    added = cunorm.add_layer_norm(device.put(x), None, **options)
    for result in (NormForward(*added), cunorm.layer_norm_forward(device.put(x), **options)):
        result = get_all(device, result)
        assert result.residual.dtype == np.float32
        assert result.y.dtype == DTYPES["bfloat16"]
        check_forward(result, x, None, None, residual_dtype=np.float32, center=True, eps=1e-5)


def test_a_bfloat16_branch_of_a_float32_stream_gets_both_gradients(device):
    shape = (30, 257)
    stream, dy = draw("residual", shape, "float32", mean=1e3), draw("dy", shape, "bfloat16")
    above, weight = draw("d_residual", shape, "float32"), optional("weight", 257, "bfloat16")
    options = {"x_dtype": "bfloat16", "d_residual": device.put(above)}
    there = [device.put(array) for array in (stream, weight)]
    options["rstd"] = cunorm.rms_norm_forward(*there).rstd
    grads = get_all(device, cunorm.rms_norm_backward(device.put(dy), *there, **options))
    assert grads.dx.dtype == DTYPES["bfloat16"]
    assert grads.dresidual.dtype == np.float32
    check_backward(grads, dy, stream, weight, None, above, eps=1e-6, x_dtype=dy.dtype)
    rounded = grads.dresidual.astype(dy.dtype)
    assert_same_bits(grads.dx, rounded, "dx, rounded once from dresidual")
    options["x_dtype"] = np.float32
    grads = cunorm.rms_norm_backward(device.put(dy), *there, **options)
    assert grads.dx is grads.dresidual
