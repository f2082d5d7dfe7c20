# SPDX-License-Identifier: MIT
"""The oracle's group norm against parties that share nothing with it.

These are PyTorch's norms and autograd in float64, finite differences, 60-digit decimal arithmetic,
the equations of the source written out, and the layer norm where a group norm is one.
"""

from __future__ import annotations

import math
from decimal import Decimal, localcontext
from types import SimpleNamespace

import numpy as np
import pytest

from cunorm import reference
from cunorm.reference.activations import ACTIVATIONS
from tests.support.bounds import (
    assert_within,
    dx_bound,
    dx_terms,
    mean_bound,
    param_grad_bound,
    rstd_bound,
    y_bound,
)

# N, channels, positions, number of groups
SHAPES = {
    "no_positions": (3, 6, (), 2),
    "one_position": (3, 6, (1, 1), 3),
    "one_group": (2, 3, (5,), 1),
    "groups_of_one": (2, 3, (2, 3), 3),
    "primes": (3, 35, (7, 11), 5),
    "volumes": (2, 6, (3, 1, 2), 2),
    "one_element": (2, 3, (), 3),
}
EPS = 0.3


def operands(samples, channels, positions, channel_axis, *, mean=0.0, seed=0) -> SimpleNamespace:
    rng = np.random.default_rng(seed)
    shape = (samples, channels, *positions)
    drawn = {name: rng.standard_normal(shape) for name in ("x", "dy")}
    drawn["x"] += mean
    arrays = {name: np.moveaxis(values, 1, channel_axis) for name, values in drawn.items()}
    arrays |= {name: rng.standard_normal(channels) for name in ("weight", "bias")}
    for array in arrays.values():
        array.flags.writeable = False
    return SimpleNamespace(**arrays)


def forward_and_backward(a, groups, given=("weight", "bias"), *, eps=EPS, **told):
    parameters = {name: getattr(a, name) for name in given}
    f = reference.group_norm_forward(a.x, groups, **parameters, eps=eps, **told)
    statistics = {"mean": f.mean, "rstd": f.rstd}
    return f, reference.group_norm_backward(a.dy, a.x, groups, **parameters, **statistics, **told)


# --- PyTorch --------------------------------------------------------------------------------------


def torch_activation(torch, name):
    functions = torch.nn.functional
    if name in (None, "identity"):
        return lambda z: z
    if name == "gelu_tanh":
        return lambda z: functions.gelu(z, approximate="tanh")
    return getattr(functions, {"swish": "silu"}.get(name, name))


def assert_as_torch(norm, a, groups, given, activation, channel_axis):
    """Hold y and every gradient to torch's, for a `norm` of torch with channels first."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    arrays = {name: getattr(a, name) for name in ("x", *given)}
    t = {name: torch.tensor(values, requires_grad=True) for name, values in arrays.items()}
    n = norm(torch.movedim(t["x"], channel_axis, 1), t.get("weight"), t.get("bias"))
    y = torch.movedim(torch_activation(torch, activation)(n), 1, channel_axis)
    (y * torch.tensor(a.dy)).sum().backward()

    told = {"activation": activation, "channel_axis": channel_axis}
    f, grads = forward_and_backward(a, groups, given, **told)
    np.testing.assert_allclose(f.y, y.detach().numpy(), rtol=1e-11, atol=1e-13)
    for name in ("x", "weight", "bias"):
        got = getattr(grads, f"d{name}")
        if name in t:
            expected = t[name].grad.numpy()
            np.testing.assert_allclose(got, expected, rtol=1e-10, atol=1e-12, err_msg=name)
        else:
            assert got is None


@pytest.mark.parametrize("channel_axis", [-1, 1])
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_group_norm_and_its_gradients_are_those_of_torch(shape, activation, channel_axis):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    *sizes, groups = shape

    def norm(x, weight, bias):
        if bias is not None and weight is None:  # of which torch 2.13 cannot take the gradient
            weight = torch.ones_like(bias)
        return torch.nn.functional.group_norm(x, groups, weight, bias, eps=EPS)

    for given in ((), ("weight",), ("bias",), ("weight", "bias")):
        a = operands(*sizes, channel_axis)
        assert_as_torch(norm, a, groups, given, activation, channel_axis)


@pytest.mark.parametrize("channel_axis", [-1, 1])
@pytest.mark.parametrize("given", [(), ("weight", "bias")], ids=["plain", "affine"])
def test_instance_norm_and_its_gradients_are_those_of_torch(given, channel_axis):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")

    def norm(x, weight, bias):
        return torch.nn.functional.instance_norm(x, weight=weight, bias=bias, eps=EPS)

    for positions in ((7,), (2, 3), (3, 2, 2)):
        a = operands(2, 5, positions, channel_axis)
        assert_as_torch(norm, a, 5, given, "silu", channel_axis)
        parameters = {name: getattr(a, name) for name in given}
        told = {"eps": EPS, "activation": "silu", "channel_axis": channel_axis}
        y = reference.instance_norm(a.x, **parameters, **told)
        np.testing.assert_array_equal(y, reference.group_norm(a.x, 5, **parameters, **told))


# --- finite differences ---------------------------------------------------------------------------


def difference_quotient(loss, arrays: dict, name: str, h: float = 1e-3) -> np.ndarray:
    """Differentiate loss(**arrays) by one array: five points, with an error of order h**4."""
    gradient = np.empty(arrays[name].shape)
    for index in np.ndindex(gradient.shape):

        def at(step, index=index):
            moved = arrays[name].copy()
            moved[index] += step
            return loss(**{**arrays, name: moved})

        gradient[index] = (8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h)
    return gradient


@pytest.mark.parametrize("channel_axis", [-1, 1])
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_group_norm_backward_is_the_derivative_of_forward(activation, channel_axis):
    a = operands(2, 4, (3,), channel_axis, seed=1)
    told = {"channel_axis": channel_axis}
    n = reference.group_norm(a.x, 2, a.weight, a.bias, eps=EPS, **told)
    assert np.abs(n).min() > 0.02  # no step of the quotient crosses the corner of relu
    told |= {"activation": activation}

    def loss(x, weight, bias):
        return np.sum(a.dy * reference.group_norm(x, 2, weight, bias, eps=EPS, **told))

    grads = forward_and_backward(a, 2, **told)[1]
    arrays = {name: getattr(a, name) for name in ("x", "weight", "bias")}
    for name in arrays:
        expected = difference_quotient(loss, arrays, name)
        np.testing.assert_allclose(getattr(grads, f"d{name}"), expected, rtol=1e-9, atol=1e-9)


# --- the layer norm -------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [1, 2, 6])
def test_group_norm_of_one_position_is_a_layer_norm_with_groups(groups):
    a = operands(5, 6, (), 1)
    f, grads = forward_and_backward(a, groups)
    like = reference.layer_norm_forward(a.x, a.weight, a.bias, eps=EPS, groups=groups)
    np.testing.assert_array_equal(f.y, like.y)
    np.testing.assert_array_equal(f.mean, like.mean.reshape(5, groups))
    np.testing.assert_array_equal(f.rstd, like.rstd.reshape(5, groups))
    expected = reference.layer_norm_backward(
        a.dy, a.x, a.weight, a.bias, rstd=like.rstd, mean=like.mean, groups=groups
    )
    for name in grads._fields:
        got = getattr(grads, name)
        np.testing.assert_allclose(got, getattr(expected, name), rtol=1e-13, atol=1e-14)


def test_group_norm_of_one_group_is_a_layer_norm_of_samples():
    a = operands(3, 4, (2, 5), 1)
    f, grads = forward_and_backward(a, 1, (), channel_axis=1)
    like = reference.layer_norm_forward(a.x, eps=EPS, axis=1)
    np.testing.assert_array_equal(f.y, like.y)
    expected = reference.layer_norm_backward(a.dy, a.x, rstd=like.rstd, mean=like.mean, axis=1)
    np.testing.assert_allclose(grads.dx, expected.dx, rtol=1e-13, atol=1e-14)


# --- the equations of the source ------------------------------------------------------------------


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
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_gradients_are_those_of_the_source_where_the_mean_is_small(shape, activation):
    *sizes, groups = shape
    a = operands(*sizes, -1, mean=0.5)
    f, grads = forward_and_backward(a, groups, activation=activation)
    for got, expected in zip(grads, by_equations(a, f, groups, activation), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-11, atol=1e-12)


# --- exact arithmetic -----------------------------------------------------------------------------


def in_decimals(x, weight, bias, dy, eps):
    """One group of channels by positions, 60 digits: all results, and what scales their bounds."""
    with localcontext() as context:
        context.prec = 60
        positions = x.shape[1]
        x, dy = ([Decimal(float(v)) for v in values.flat] for values in (x, dy))
        weight, bias = (
            [Decimal(float(v)) for v in np.repeat(values, positions)] for values in (weight, bias)
        )
        mean = sum(x) / len(x)
        rstd = 1 / (sum((v - mean) ** 2 for v in x) / len(x) + Decimal(eps)).sqrt()
        r = [(v - mean) * rstd for v in x]
        dr = [v * w for v, w in zip(dy, weight, strict=True)]
        a = sum(dr) / len(x)
        b = sum(v * w for v, w in zip(dr, r, strict=True)) / len(x)
        exact = {
            "y": [v * w + shift for v, w, shift in zip(r, weight, bias, strict=True)],
            "dx": [rstd * (v - a - w * b) for v, w in zip(dr, r, strict=True)],
            "terms": [v * w for v, w in zip(r, weight, strict=True)],
            "dy_r": [v * w for v, w in zip(dy, r, strict=True)],
        }
        exact |= {"mean": [mean], "rstd": [rstd], "r": r, "dr": dr}
        return SimpleNamespace(
            **{name: np.array([[float(v) for v in row]]) for name, row in exact.items()}
        )


def check_group(exact, y, dx, mean, rstd):
    """Hold a group to half of each bound: the other half is for a kernel in float64."""
    bound = y_bound(exact.y, "float64", "float64", terms=exact.terms)
    assert_within(y.reshape(1, -1), exact.y, bound / 2, "y")
    terms = dx_terms(exact.dr, exact.r, exact.rstd, center=True)
    bound = dx_bound(exact.dx, terms, "float64", "float64")
    assert_within(dx.reshape(1, -1), exact.dx, bound / 2, "dx")
    bound = rstd_bound(exact.rstd[0], "float64", width=y.size)
    assert_within(rstd, exact.rstd[0], bound / 2, "rstd")
    bound = mean_bound(exact.mean[0], exact.rstd[0], "float64", width=y.size)
    assert_within(mean, exact.mean[0], bound / 2, "mean")


def check_parameter_gradient(got, summands):
    """Hold a channel's gradient to half its bound; the summands are each rounded to float64."""
    exact, magnitude = math.fsum(summands), math.fsum(np.abs(summands))
    bound = param_grad_bound(np.array([exact]), np.array([magnitude]), "float64", "float64")
    assert_within(np.array([got]), np.array([exact]), bound / 2)


@pytest.mark.parametrize("mean", [0.0, 1e4])
@pytest.mark.parametrize(("depth", "positions"), [(1, 1), (2, 1), (1, 3), (5, 7), (3, 331)])
def test_group_norm_is_exact_to_its_own_ulps(depth, positions, mean):
    for seed in range(5):
        a = operands(2, 3 * depth, (positions,), 1, mean=mean, seed=seed)
        f, grads = forward_and_backward(a, 3, eps=1e-5, channel_axis=1)
        dy_r = np.empty(a.x.shape)
        for sample, group in np.ndindex(2, 3):
            part = sample, slice(group * depth, (group + 1) * depth)
            parameters = a.weight[part[1]], a.bias[part[1]]
            exact = in_decimals(a.x[part], *parameters, a.dy[part], 1e-5)
            statistics = (s[sample, group : group + 1] for s in (f.mean, f.rstd))
            check_group(exact, f.y[part], grads.dx[part], *statistics)
            dy_r[part] = exact.dy_r.reshape(depth, positions)
        for channel in range(3 * depth):
            check_parameter_gradient(grads.dweight[channel], dy_r[:, channel].ravel())
            check_parameter_gradient(grads.dbias[channel], a.dy[:, channel].ravel())
