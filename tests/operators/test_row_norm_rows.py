# SPDX-License-Identifier: MIT
"""Rows that are hard to normalise: a large mean, all alike, large, zero, not finite."""

import numpy as np
import pytest

import cunorm
from cunorm import reference
from tests.support.bounds import assert_within, check_backward, check_forward, dx_bound, y_bound
from tests.support.operands import DTYPES, WIDTHS, assert_same_bits, at, draw, optional, row_count

all_dtypes = pytest.mark.parametrize("dtype", DTYPES)
centered = pytest.mark.parametrize("center", [False, True], ids=["raw", "centered"])


# --- a mean far from zero -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rows_of_mean_1e4_and_deviation_1_keep_their_bounds(dtype):
    for width in WIDTHS:
        shape = (row_count(width), width)
        x, dy = draw("x", shape, dtype, mean=1e4), draw("dy", shape, dtype)
        weight, bias = (optional(name, width, dtype) for name in ("weight", "bias"))
        forward = cunorm.layer_norm_forward(x, weight, bias)
        grads = cunorm.layer_norm_backward(
            dy, x, weight, bias, rstd=forward.rstd, mean=forward.mean
        )
        with at(f"width {width}"):
            check_forward(forward, x, weight, bias, center=True, eps=1e-5)
            check_backward(grads, dy, x, weight, bias, center=True, eps=1e-5)


SHAPES_OF_ROWS = {
    "ramp": lambda at, width: 1e4 * at / width,
    "step in the middle": lambda at, width: 1e4 * (at > width / 2),
    "last element": lambda at, width: 1e5 * (at == width - 1),
    "waves": lambda at, width: 1e3 * np.sin(at / 9),
    "mean of 1e6": lambda at, width: 1e6,
}


@pytest.mark.parametrize("kind", SHAPES_OF_ROWS)
def test_rows_whose_parts_have_other_means_keep_their_bounds(kind):
    for width in (2, 33, 128, 1003, 16384, 65536):
        shape = (row_count(width), width)
        drift = SHAPES_OF_ROWS[kind](np.arange(width), width)
        x = (draw("x", shape, "float64") + drift).astype(np.float32)
        dy = draw("dy", shape, "float32")
        weight, bias = (optional(name, width, "float32") for name in ("weight", "bias"))
        forward = cunorm.layer_norm_forward(x, weight, bias)
        statistics = {"rstd": forward.rstd, "mean": forward.mean}
        grads = cunorm.layer_norm_backward(dy, x, weight, bias, **statistics)
        with at(f"width {width}"):
            check_forward(forward, x, weight, bias, center=True, eps=1e-5)
            check_backward(grads, dy, x, weight, bias, center=True, eps=1e-5)


def test_a_16_bit_branch_on_a_stream_of_mean_1e4_keeps_its_bounds():
    shape = (20, 1000)
    x, stream = draw("x", shape, "bfloat16"), draw("residual", shape, "float32", mean=1e4)
    forward = cunorm.layer_norm_forward(x, residual=stream)
    check_forward(forward, x, None, None, stream, center=True, eps=1e-5)


# --- constant rows --------------------------------------------------------------------------------


@all_dtypes
def test_a_constant_row_under_center_gives_exactly_bias(dtype):
    for width in (*WIDTHS, 65537):
        weight, bias = (optional(name, width, dtype) for name in ("weight", "bias"))
        for value in (0.1, -1 / 3, 1e4 + 0.3, 2e-3):
            x = np.full((3, width), value, DTYPES[dtype])
            result = cunorm.layer_norm_forward(x, weight, bias)
            with at(f"width {width}", f"value {value}"):
                np.testing.assert_array_equal(result.y, np.broadcast_to(bias, x.shape))
                np.testing.assert_array_equal(result.mean, x[:, 0].astype(result.mean.dtype))


@pytest.mark.parametrize("y_dtype", ["float16", "bfloat16"])
def test_a_constant_row_gives_bias_rounded_to_ys_dtype(y_dtype):
    x = np.full((2, 1003), 1e4 + 0.3, np.float32)
    weight, bias = (optional(name, 1003, "float32") for name in ("weight", "bias"))
    y = cunorm.layer_norm(x, weight, bias, dtype=y_dtype)
    np.testing.assert_array_equal(y, np.broadcast_to(bias, x.shape).astype(DTYPES[y_dtype]))


@all_dtypes
def test_gradients_of_a_constant_row_keep_their_bounds(dtype):
    for width in (1, 2, 33, 1000):
        x = np.full((3, width), 0.1, DTYPES[dtype])
        dy = draw("dy", x.shape, dtype)
        weight, bias = (optional(name, width, dtype) for name in ("weight", "bias"))
        forward = cunorm.layer_norm_forward(x, weight, bias)
        grads = cunorm.layer_norm_backward(
            dy, x, weight, bias, rstd=forward.rstd, mean=forward.mean
        )
        with at(f"width {width}"):
            check_backward(grads, dy, x, weight, bias, center=True, eps=1e-5)


# --- c and eps ------------------------------------------------------------------------------------


@centered
@pytest.mark.parametrize("c", [1.0, -2.5, 0.0, 1e-3, np.float32(0.1), 7])
def test_c_is_the_length_of_a_row_without_parameters(c, center):
    x, dy = (draw(name, (12, 500), "float32") for name in ("x", "dy"))
    forward = cunorm.normalize_forward(x, c=c, center=center, eps=0.0)
    lengths = np.linalg.norm(forward.y.astype(np.float64), axis=-1)
    np.testing.assert_allclose(lengths, abs(float(c)), rtol=1e-6)
    check_forward(forward, x, None, None, c=float(c), center=center, eps=0.0)
    statistics = {"rstd": forward.rstd, "mean": forward.mean}
    grads = cunorm.normalize_backward(dy, x, **statistics, c=c, center=center)
    check_backward(grads, dy, x, None, None, c=float(c), center=center, eps=0.0)


@centered
@pytest.mark.parametrize("eps", [0, 1e-12, 0.5, 1e6, np.float32(1e-3)])
def test_eps_is_added_to_the_mean_square(eps, center):
    x, weight = draw("x", (12, 500), "float32"), optional("weight", 500, "float32")
    result = cunorm.normalize_forward(x, weight, center=center, eps=eps)
    check_forward(result, x, weight, None, center=center, eps=float(eps))


def test_a_row_of_zeros_gives_zeros_with_eps_and_nan_without():
    x = np.zeros((2, 100), np.float32)
    np.testing.assert_array_equal(cunorm.rms_norm(x), x)
    assert np.isnan(cunorm.rms_norm(x, eps=0.0)).all()


# --- l2_norm --------------------------------------------------------------------------------------


@all_dtypes
@pytest.mark.parametrize("eps", [1e-12, 0.0, 300.0])
def test_l2_norm_divides_by_the_root_of_the_sum_of_squares_and_eps(dtype, eps):
    compute = "float64" if dtype == "float64" else "float32"
    for width in (1, 33, 1000, 16384):
        shape = (row_count(width), width)
        x, dy = (draw(name, shape, dtype) for name in ("x", "dy"))
        exact_x, exact_dy = x.astype(np.float64), dy.astype(np.float64)
        length = np.sqrt((exact_x**2).sum(axis=-1, keepdims=True) + eps)
        y = exact_x / length
        along = y * (y * exact_dy).sum(axis=-1, keepdims=True)
        dx, terms = (exact_dy - along) / length, np.maximum(abs(exact_dy), abs(along)) / length

        forward = cunorm.l2_norm_forward(x, eps=eps)
        got = cunorm.l2_norm_backward(dy, x, rstd=forward.rstd).dx
        with at(f"width {width}"):
            assert_within(forward.y, y, y_bound(y, dtype, compute), "y")
            assert_within(got, dx, dx_bound(dx, terms, dtype, compute), "dx")
            np.testing.assert_allclose(
                forward.rstd, np.sqrt(width) / length[:, 0], rtol=1e-6, err_msg="rstd"
            )


# --- large and not finite -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm", "l2_norm"])
def test_float16_rows_of_large_values_do_not_overflow(name):
    rng = np.random.default_rng(0)
    for width in (33, 65536):
        x = (60000 * rng.choice([-1, 1, 0.5], (3, width))).astype(np.float16)
        result = getattr(cunorm, f"{name}_forward")(x)
        exact = getattr(reference, f"{name}_forward")(x)
        assert np.isfinite(result.y).all()
        assert np.isfinite(result.rstd).all()
        assert (result.rstd > 0).all()
        assert_within(result.y, exact.y, y_bound(exact.y, "float16"), f"{name}, width {width}")


@pytest.mark.parametrize("width", [8, 512, 4096])
@pytest.mark.parametrize("large", [slice(None), slice(1), slice(-1, None)], ids=str)
def test_float32_rows_whose_squares_overflow_give_what_ieee_gives(width, large):
    x = np.ones((1, width), np.float32)
    x[:, large] = 1e30
    result = cunorm.rms_norm_forward(x)
    np.testing.assert_array_equal(result.rstd, [0.0])
    np.testing.assert_array_equal(result.y, np.zeros_like(x))


@centered
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("width", [1, 33, 128, 1000])
def test_a_value_that_is_not_finite_stays_in_its_row_of_y(width, value, center):
    x, weight = draw("x", (9, width), "float32"), optional("weight", width, "float32")
    clean = cunorm.normalize_forward(x, weight, center=center)
    for column in {0, width // 2, width - 1}:
        poisoned = x.copy()
        poisoned[4, column] = value
        result = cunorm.normalize_forward(poisoned, weight, center=center)
        # What the mean of infinities and corrections is, is up to the order of the sums.
        check_forward(result._replace(mean=None), poisoned, weight, None, center=center, eps=1e-6)
        assert np.isnan(result.y[4, column])
        assert not (center and np.isfinite(result.mean[4]))
        for name in ("y", "rstd", "mean")[: 2 + center]:
            others = (np.delete(getattr(r, name), 4, axis=0) for r in (result, clean))
            assert_same_bits(*others, name)


@centered
@pytest.mark.parametrize("operand", ["dy", "x", "d_residual"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_value_that_is_not_finite_stays_in_its_row_of_dx(operand, value, center):
    given = {name: draw(name, (9, 100), "float32") for name in ("dy", "x", "d_residual")}
    clean = _dx(given, center)
    given[operand][4, 50] = value
    poisoned = _dx(given, center)
    assert not np.isfinite(poisoned[4, 50])
    assert_same_bits(np.delete(poisoned, 4, axis=0), np.delete(clean, 4, axis=0), "dx")


def _dx(given, center):
    forward = cunorm.normalize_forward(given["x"], center=center)
    statistics = {"rstd": forward.rstd, "mean": forward.mean}
    weight = optional("weight", 100, "float32")
    return cunorm.normalize_backward(weight=weight, center=center, **given, **statistics).dx
