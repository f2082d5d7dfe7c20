# SPDX-License-Identifier: MIT
"""What the oracle promises besides its formulas: rounding of the stream, layouts, special rows."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from cunorm import reference

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(np.float16), BFLOAT16, np.dtype(np.float32), np.dtype(np.float64)]
PAIRS = list(itertools.product(DTYPES, repeat=2))


def operands(shape=(5, 8), dtype=np.float64) -> SimpleNamespace:
    rng = np.random.default_rng(0)
    names = ("x", "residual", "dy", "d_residual")
    arrays = {name: rng.standard_normal(shape).astype(dtype) for name in names}
    arrays |= {name: rng.standard_normal(shape[-1]).astype(dtype) for name in ("weight", "bias")}
    for array in arrays.values():
        array.flags.writeable = False
    return SimpleNamespace(**arrays)


def nearest_bfloat16(values: np.ndarray) -> np.ndarray:
    """Round float64 to nearest even by looking the neighbours up in the list of all bfloat16."""
    bits = np.arange(0x7F80, dtype=np.uint16)  # zero and the positive finite numbers, in order
    numbers = bits.view(BFLOAT16).astype(np.float64)
    above = np.clip(np.searchsorted(numbers, np.abs(values)), 1, len(numbers) - 1)
    low, high = numbers[above - 1], numbers[above]
    middle = (low + high) / 2
    tie_goes_up = bits[above] % 2 == 0
    up = (np.abs(values) > middle) | ((np.abs(values) == middle) & tie_goes_up)
    return np.copysign(np.where(up, high, low), values)


# --- the residual stream --------------------------------------------------------------------------


def test_float64_is_rounded_once_to_bfloat16():
    rng = np.random.default_rng(0)
    numbers = np.arange(0x7F00, dtype=np.uint16).view(BFLOAT16).astype(np.float64)
    middles = (numbers[1:] + numbers[:-1]) / 2
    near_ties = [middles, middles * (1 + 2.0**-40), middles * (1 - 2.0**-40), numbers]
    values = np.concatenate([*near_ties, rng.standard_normal(1000), [5e-324, 1e-60]])
    values = np.concatenate([values, -values])
    got = reference.round_to(values, BFLOAT16)
    assert got.dtype == BFLOAT16
    np.testing.assert_array_equal(got.astype(np.float64), nearest_bfloat16(values))
    special = reference.round_to(np.array([np.inf, -np.inf, np.nan, 1e39, -1e300]), BFLOAT16)
    np.testing.assert_array_equal(
        special.astype(np.float64), [np.inf, -np.inf, np.nan, np.inf, -np.inf]
    )


@pytest.mark.parametrize(("x_dtype", "residual_dtype"), PAIRS, ids=str)
def test_sum_is_rounded_to_the_residuals_dtype_as_torch_does(x_dtype, residual_dtype):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((50, 8)).astype(x_dtype)
    residual = (100 * rng.standard_normal((50, 8))).astype(residual_dtype)
    compute = torch.float64 if np.float64 in (x_dtype, residual_dtype) else torch.float32
    exact = [torch.tensor(v.astype(np.float64)).to(compute) for v in (x, residual)]
    expected = sum(exact).to(getattr(torch, residual_dtype.name)).double().numpy()

    result = reference.normalize_forward(x, residual=residual)
    assert result.residual.dtype == residual_dtype
    np.testing.assert_array_equal(result.residual.astype(np.float64), expected)


@pytest.mark.parametrize(("x_dtype", "expected"), [(np.float32, 1.0), (np.float64, 1 + 2.0**-10)])
def test_sum_is_float32_unless_an_operand_is_float64(x_dtype, expected):
    # A little more than a tie of float16, by less than float32 can tell.
    x = np.array([[2.0**-11 + 2.0**-34]], x_dtype)
    result = reference.normalize_forward(x, residual=np.ones((1, 1), np.float16))
    assert result.residual.astype(np.float64) == expected


@pytest.mark.parametrize(("x_dtype", "residual_dtype"), PAIRS, ids=str)
@pytest.mark.parametrize("name", ["normalize", "rms_norm", "layer_norm"])
def test_add_is_sum_then_norm(name, x_dtype, residual_dtype):
    x, residual = operands().x.astype(x_dtype), operands().residual.astype(residual_dtype)
    parameters = [operands().weight, operands().bias][: 1 if name == "rms_norm" else 2]
    result = getattr(reference, f"add_{name}")(x, residual, *parameters)
    again = getattr(reference, name)(result.residual, *parameters)
    np.testing.assert_array_equal(result.y, again)
    unrounded = x.astype(np.float64) + residual.astype(np.float64)
    if residual_dtype.itemsize == 2:
        assert np.any(result.residual.astype(np.float64) != unrounded)


@pytest.mark.parametrize(("x_dtype", "residual_dtype"), PAIRS, ids=str)
def test_without_a_residual_the_new_stream_is_x_in_residual_dtype(x_dtype, residual_dtype):
    x = operands().x.astype(x_dtype)
    result = reference.add_rms_norm(x, None, residual_dtype=residual_dtype)
    assert result.residual.dtype == residual_dtype
    if residual_dtype == BFLOAT16:
        expected = nearest_bfloat16(x.astype(np.float64))
    else:
        expected = x.astype(residual_dtype).astype(np.float64)
    np.testing.assert_array_equal(result.residual.astype(np.float64), expected)
    np.testing.assert_array_equal(result.y, reference.rms_norm(result.residual))


def test_a_stream_is_returned_only_where_one_was_asked_for():
    x = operands(dtype=np.float16).x
    assert reference.normalize_forward(x).residual is None
    stream = reference.add_normalize(x, None).residual
    assert stream.dtype == np.float16
    np.testing.assert_array_equal(stream, x)
    assert not np.shares_memory(stream, x)


# --- arguments ------------------------------------------------------------------------------------


def test_l2_norm_adds_eps_to_the_sum_of_squares():
    x = operands().x
    total = np.sum(x * x, axis=-1, keepdims=True) + 0.7
    result = reference.l2_norm_forward(x, eps=0.7)
    np.testing.assert_allclose(result.y, x / np.sqrt(total), rtol=1e-14)
    np.testing.assert_allclose(result.rstd, np.sqrt(8 / total[:, 0]), rtol=1e-14)


@pytest.mark.parametrize(
    ("name", "eps"),
    [("normalize", 1e-6), ("rms_norm", 1e-6), ("layer_norm", 1e-5), ("l2_norm", 1e-12 / 8)],
)
def test_default_eps(name, eps):
    rstd = getattr(reference, f"{name}_forward")(np.zeros((2, 8))).rstd
    np.testing.assert_allclose(rstd, np.full(2, eps**-0.5), rtol=1e-14)


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2, -3])
def test_statistics_have_the_leading_axes_and_parameters_the_others(axis):
    x = np.random.default_rng(0).standard_normal((2, 3, 4))
    weight = np.random.default_rng(1).standard_normal(x.shape[axis:])
    f = reference.layer_norm_forward(x, weight, weight, axis=axis)
    grads = reference.layer_norm_backward(x, x, weight, weight, rstd=f.rstd, mean=f.mean, axis=axis)
    assert f.mean.shape == f.rstd.shape == x.shape[:axis]
    assert grads.dweight.shape == grads.dbias.shape == weight.shape
    assert f.y.shape == grads.dx.shape == x.shape
    np.testing.assert_allclose(f.mean, x.mean(axis=tuple(range(axis % 3, 3))), rtol=1e-13)


@pytest.mark.parametrize("needs", list(itertools.product((False, True), repeat=3)))
def test_backward_gives_the_gradients_asked_for(needs):
    a = operands()
    names = tuple(itertools.compress(("x", "weight", "bias"), needs))
    rstd = reference.rms_norm_forward(a.x).rstd
    grads = reference.normalize_backward(a.dy, a.x, a.weight, a.bias, rstd=rstd, needs=names)
    given = (grads.dx is not None, grads.dweight is not None, grads.dbias is not None)
    assert given == needs
    assert grads.dgate is None
    assert grads.dresidual is grads.dx
    named = reference.rms_norm_backward(a.dy, a.x, a.weight, rstd=rstd, needs=names)
    assert (named.dx is not None, named.dweight is not None) == needs[:2]
    named = reference.layer_norm_backward(
        a.dy, a.x, a.weight, a.bias, rstd=rstd, mean=rstd, needs=names
    )
    assert tuple(grad is not None for grad in named[:3]) == needs


def test_center_without_mean_is_an_error_in_backward():
    a = operands()
    with pytest.raises(ValueError, match="mean"):
        reference.normalize_backward(a.dy, a.x, rstd=np.ones(5), center=True)


def test_parameter_gradients_of_many_rows_keep_their_digits():
    x = np.full((200_000, 2), 0.1)
    rstd = np.ones(len(x))
    grads = reference.normalize_backward(x, x, np.ones(2), np.ones(2), rstd=rstd)
    np.testing.assert_allclose(grads.dbias, math.fsum(x[:, 0]), rtol=4 * 2.0**-53)
    np.testing.assert_allclose(grads.dweight, math.fsum(x[:, 0] ** 2), rtol=4 * 2.0**-53)


def test_backward_takes_the_rounding_of_the_mean_out():
    a = operands((5, 64))
    x = a.x + 1e4
    f = reference.layer_norm_forward(x)
    rounded = f.mean.astype(np.float32)
    assert np.max(np.abs(rounded - f.mean)) > 1e-5
    common = {"rstd": f.rstd, "weight": a.weight}
    exact = reference.layer_norm_backward(a.dy, x, mean=f.mean, **common)
    got = reference.layer_norm_backward(a.dy, x, mean=rounded, **common)
    np.testing.assert_allclose(got.dx, exact.dx, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(got.dweight, exact.dweight, rtol=1e-11, atol=1e-12)


# --- arrays ---------------------------------------------------------------------------------------

LAYOUTS = {
    "every_other_row": lambda a: np.repeat(a, 2, axis=0)[::2],
    "reversed": lambda a: a[::-1, ::-1].copy()[::-1, ::-1],
    "transposed": lambda a: a.T.copy().T,
    "expanded": lambda a: np.broadcast_to(a[0], a.shape),
    "fortran": np.asfortranarray,
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides_do_not_matter(layout, dtype):
    a = operands(dtype=dtype)
    views = [layout(v) for v in (a.x, a.residual, a.dy, a.d_residual)]
    results = []
    for x, residual, dy, d_residual in (views, [np.ascontiguousarray(v) for v in views]):
        f = reference.layer_norm_forward(x, a.weight, a.bias, residual=residual)
        given = {"rstd": f.rstd, "mean": f.mean, "d_residual": d_residual}
        results.append((*f, *reference.layer_norm_backward(dy, x, a.weight, a.bias, **given)))
    for strided, contiguous in zip(*results, strict=True):
        np.testing.assert_array_equal(strided, contiguous)


def test_zero_rows_give_empty_rows_and_zero_parameter_gradients():
    x, weight = np.zeros((2, 0, 8), np.float16), np.ones(8)
    f = reference.layer_norm_forward(x, weight, weight, residual=x)
    grads = reference.layer_norm_backward(x, x, weight, weight, rstd=f.rstd, mean=f.mean)
    assert f.y.shape == f.residual.shape == grads.dx.shape == x.shape
    assert f.mean.shape == f.rstd.shape == (2, 0)
    np.testing.assert_array_equal(grads.dweight, np.zeros(8))
    np.testing.assert_array_equal(grads.dbias, np.zeros(8))


# --- special rows ---------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [1 / 3, 1e4 + 0.1, -1e-9])
@pytest.mark.parametrize("width", [1, 3, 7, 1000])
def test_a_constant_row_under_center_is_exactly_bias(width, value):
    bias = np.random.default_rng(0).standard_normal(width)
    y = reference.layer_norm(np.full((2, width), value), np.full(width, 2.0), bias)
    np.testing.assert_array_equal(y, np.broadcast_to(bias, y.shape))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("center", [False, True])
def test_a_value_that_is_not_finite_poisons_its_own_row_only(center, value):
    a = operands()
    x = a.x.copy()
    x[2, 3] = value
    f = reference.normalize_forward(x, a.weight, a.bias, center=center)
    clean = reference.normalize_forward(a.x, a.weight, a.bias, center=center)
    others = np.arange(5) != 2
    np.testing.assert_array_equal(f.y[others], clean.y[others])
    assert np.isnan(f.y[2, 3])
    if center or np.isnan(value):
        assert np.isnan(f.y[2]).all()
    grads = reference.normalize_backward(a.dy, x, a.weight, rstd=f.rstd, mean=f.mean, center=center)
    assert np.isfinite(grads.dx[others]).all()
    assert np.isnan(grads.dx[2]).all()
    assert np.isnan(grads.dweight[3])


def test_large_float16_rows_do_not_overflow():
    x = np.full((1, 4096), 65504, np.float16)
    x[0, ::2] = -65504
    np.testing.assert_allclose(np.abs(reference.rms_norm(x)), 1.0, rtol=1e-12)
