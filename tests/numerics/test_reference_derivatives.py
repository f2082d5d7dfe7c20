# SPDX-License-Identifier: MIT
"""The oracle's backwards are derivatives of its forwards, and what the source documents say.

By quotients of differences, which share nothing with a formula of a gradient.
"""

from __future__ import annotations

import numpy as np
import pytest

from cunorm import reference
from cunorm.reference.activations import ACTIVATIONS
from tests.support.operands import at
from tests.support.reference_cases import group_norm, operands, row_norm


def quotient(loss, arrays, name, h=1e-3):
    """Differentiate loss(**arrays) by one array: five points, with an error of order h**4."""
    gradient = np.empty(arrays[name].shape)
    for index in np.ndindex(gradient.shape):

        def of(step, index=index):
            moved = arrays[name].copy()
            moved[index] += step
            return loss(**arrays | {name: moved})

        gradient[index] = (8 * (of(h) - of(-h)) - (of(2 * h) - of(-2 * h))) / (12 * h)
    return gradient


def check(grads, loss, arrays):
    for name in arrays:
        with at(name):
            got, expected = getattr(grads, f"d{name}"), quotient(loss, arrays, name)
            np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("c", [None, 2.5])
@pytest.mark.parametrize(
    ("shape", "axis"), [((3, 1), -1), ((3, 2), -1), ((2, 2, 5), -1), ((3, 2, 3), -2), ((2, 3), 0)]
)
def test_a_row_norms_backward_is_the_derivative_of_its_forward(shape, axis, c, center):
    a, told = operands(shape, shape[axis:]), {"c": c, "center": center, "axis": axis, "eps": 0.3}

    def loss(x, residual=None, **parameters):
        f = reference.normalize_forward(x, residual=residual, **parameters, **told)
        return np.sum(f.y * a.dy) + (0 if residual is None else np.sum(f.residual * a.d_residual))

    for given in ((), ("residual",), ("weight", "bias"), ("residual", "weight", "bias")):
        arrays = {name: getattr(a, name) for name in ("x", *given)}
        check(row_norm(a, given, **told)[1], loss, arrays)


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm", "l2_norm"])
def test_named_backwards_are_derivatives_too_with_eps_and_a_stream(name):
    a, forward = operands((3, 5)), getattr(reference, f"{name}_forward")
    above = 0.0 if name == "l2_norm" else a.d_residual  # which its backward does not take

    def loss(x):
        f = forward(x, residual=a.residual, eps=0.3)
        return np.sum(f.y * a.dy) + np.sum(f.residual * above)

    f = forward(a.x, residual=a.residual, eps=0.3)
    saved = {"rstd": f.rstd} | ({"mean": f.mean} if name == "layer_norm" else {})
    saved |= {} if name == "l2_norm" else {"d_residual": above}
    check(getattr(reference, f"{name}_backward")(a.dy, f.residual, **saved), loss, {"x": a.x})


@pytest.mark.parametrize("channel_axis", [-1, 1])
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_a_group_norms_backward_is_the_derivative_of_its_forward(activation, channel_axis):
    a = operands((2, 3, 4) if channel_axis == -1 else (2, 4, 3), (4,), seed=1)
    told = {"eps": 0.3, "channel_axis": channel_axis}
    n = reference.group_norm(a.x, 2, a.weight, a.bias, **told)
    assert np.abs(n).min() > 0.01  # no step of the quotient crosses the corner of relu
    told |= {"activation": activation}

    def loss(x, weight, bias):
        return np.sum(a.dy * reference.group_norm(x, 2, weight, bias, **told))

    arrays = {name: getattr(a, name) for name in ("x", "weight", "bias")}
    check(group_norm(a, 2, **told)[1], loss, arrays)


def by_equations(a, f, groups, activation):
    """Return dx, dweight and dbias by equations 64 to 72; 52 to 60 where there is no activation."""
    samples, channels = a.x.shape[0], a.x.shape[-1]
    x, dy = (v.reshape(samples, -1, groups, channels // groups) for v in (a.x, a.dy))
    gamma, beta = a.weight.reshape(groups, -1), a.bias.reshape(groups, -1)
    mu, sigma = f.mean, 1 / f.rstd
    xhat = (x - mu[:, None, :, None]) / sigma[:, None, :, None]
    if activation is not None:
        dy = dy * ACTIVATIONS[activation].slope(gamma * xhat + beta)
    rd = x.shape[1] * x.shape[3]
    s_y, s_xy = dy.sum(axis=1), (dy * x).sum(axis=1)
    s_yg, s_xyg = (gamma * s_y).sum(axis=-1), (gamma * s_xy).sum(axis=-1)
    dgamma = ((s_xy - mu[..., None] * s_y) / sigma[..., None]).sum(axis=0)
    c1 = (mu * s_yg - s_xyg) / (rd * sigma**3)
    c2 = -mu * c1 - s_yg / (rd * sigma)
    c1, c2 = (c[:, None, :, None] for c in (c1, c2))
    dx = gamma * dy / sigma[:, None, :, None] + c1 * x + c2
    return dx.reshape(a.x.shape), dgamma.reshape(-1), s_y.sum(axis=0).reshape(-1)


@pytest.mark.parametrize("activation", [None, "relu", "silu", "gelu"])
@pytest.mark.parametrize(("shape", "groups"), [((3, 6), 2), ((3, 77, 35), 5), ((2, 6, 3), 3)])
def test_gradients_are_those_of_the_source_where_the_mean_is_small(shape, groups, activation):
    a = operands(shape)
    a.x = a.x + 0.5
    f, grads = group_norm(a, groups, eps=0.3, activation=activation)
    for got, expected in zip(grads, by_equations(a, f, groups, activation), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-11, atol=1e-12)


# --- a stack of layers ----------------------------------------------------------------------------


@pytest.mark.parametrize("center", [False, True])
def test_a_fused_stack_is_the_naive_one_and_its_backward_the_derivative(center):
    """x_k = tanh(factor * norm(x_{k-1})) + x_{k-1}."""
    a, factors = operands((3, 4)), [0.5, -1.0, 2.0]
    weights, told = 1 + operands((3, 4), seed=1).x, {"center": center, "eps": 0.3}

    def naive(x, weights):
        for weight, factor in zip(weights, factors, strict=True):
            x = np.tanh(factor * reference.normalize(x, weight, **told)) + x
        return x

    p, stream, saved = a.x, None, []
    for weight, factor in zip(weights, factors, strict=True):
        dtype = p.dtype if stream is None else None
        f = reference.normalize_forward(p, weight, residual=stream, residual_dtype=dtype, **told)
        added = reference.add_normalize(p, stream, weight, **told)
        np.testing.assert_array_equal(added.y, f.y)
        np.testing.assert_array_equal(added.residual, f.residual)
        p, stream = np.tanh(factor * f.y), f.residual
        saved.append((f, factor * (1 - p * p)))
    np.testing.assert_array_equal(p + stream, naive(a.x, weights))

    dp, above, dweights = a.dy, a.dy, []
    for weight, (f, slope) in zip(weights[::-1], saved[::-1], strict=True):
        more = {"rstd": f.rstd, "mean": f.mean, "center": center, "d_residual": above}
        grads = reference.normalize_backward(dp * slope, f.residual, weight, **more)
        dp, above = grads.dx, grads.dresidual
        dweights.insert(0, grads.dweight)
    arrays = {"x": a.x, "weights": weights}
    for name, got in {"x": dp, "weights": np.array(dweights)}.items():
        expected = quotient(lambda **moved: np.sum(a.dy * naive(**moved)), arrays, name)
        np.testing.assert_allclose(got, expected, rtol=1e-8, atol=1e-8)


# --- a norm that is another -----------------------------------------------------------------------


@pytest.mark.parametrize("groups", [1, 2, 6])
def test_a_group_norm_of_one_position_is_a_layer_norm_of_groups(groups):
    a = operands((5, 6))
    f, grads = group_norm(a, groups, eps=0.3)
    like, expected = row_norm(a, eps=0.3, center=True, groups=groups)
    for field in ("y", "mean", "rstd"):
        got, right = getattr(f, field), getattr(like, field)
        np.testing.assert_array_equal(got, right.reshape(got.shape))
    for field in grads._fields:
        got, right = getattr(grads, field), getattr(expected, field)
        np.testing.assert_allclose(got, right, rtol=1e-13, atol=1e-14)


def test_a_group_norm_of_one_group_is_a_layer_norm_of_samples():
    a = operands((3, 4, 2, 5))
    f, grads = group_norm(a, 1, (), channel_axis=1)
    like, expected = row_norm(a, (), eps=1e-5, center=True, axis=1)
    np.testing.assert_array_equal(f.y, like.y)
    np.testing.assert_allclose(grads.dx, expected.dx, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("position", ["pre", "post"])
@pytest.mark.parametrize("center", [False, True])
def test_groups_are_norms_of_slices_side_by_side(center, position):
    told = {"c": 2.0, "center": center, "gate_position": position, "weight_offset": 1.0}
    a, given = operands((2, 3, 12)), ("weight", "bias", "gate")
    f, grads = row_norm(a, given, groups=3, **told)
    assert f.rstd.shape == (2, 3, 3)
    for group in range(3):
        own = np.s_[..., 4 * group : 4 * group + 4]
        part = type(a)(**{name: array[own] for name, array in vars(a).items()})
        alone, alone_grads = row_norm(part, given, **told)
        np.testing.assert_array_equal(f.y[own], alone.y)
        np.testing.assert_array_equal(f.rstd[..., group], alone.rstd)
        for field in ("dx", "dweight", "dbias", "dgate"):
            np.testing.assert_array_equal(getattr(grads, field)[own], getattr(alone_grads, field))
