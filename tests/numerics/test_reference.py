# SPDX-License-Identifier: MIT
"""The oracle against parties that share nothing with it.

These are PyTorch's norms and autograd in float64, finite differences, 60-digit decimal arithmetic,
and the formulas written out.
"""

from __future__ import annotations

import itertools
from decimal import Decimal, localcontext
from types import SimpleNamespace

import numpy as np
import pytest

from cunorm import reference
from tests.support.bounds import assert_within, dx_bound, dx_terms, mean_bound, rstd_bound, y_bound

SHAPES = {"width1": ((3, 1), -1), "width2": ((3, 2), -1), "width6": ((2, 2, 6), -1)}
SHAPES |= {"row_of_two_axes": ((3, 2, 3), -2), "row_of_all_axes": ((2, 3), 0)}


def operands(shape: tuple[int, ...], axis: int, seed: int = 0) -> SimpleNamespace:
    rng = np.random.default_rng(seed)
    names = ("x", "residual", "dy", "d_residual")
    arrays = {name: rng.standard_normal(shape) for name in names}
    arrays |= {name: rng.standard_normal(shape[axis:]) for name in ("weight", "bias")}
    for array in arrays.values():
        array.flags.writeable = False
    return SimpleNamespace(**arrays)


# --- PyTorch --------------------------------------------------------------------------------------


def torch_norm(torch, name, x, weight, bias, shape):
    if name == "rms_norm":
        return torch.nn.functional.rms_norm(x, shape, weight, eps=0.3)
    if name == "layer_norm":
        return torch.nn.functional.layer_norm(x, shape, weight, bias, eps=0.3)
    return torch.nn.functional.normalize(x.flatten(-len(shape)), dim=-1, eps=0.0).reshape(x.shape)


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize(("shape", "axis"), SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", ["rms_norm", "layer_norm", "l2_norm"])
def test_named_norms_and_their_gradients_are_those_of_torch(name, shape, axis, affine):
    torch = pytest.importorskip("torch")
    a = operands(shape, axis)
    parameters = {"rms_norm": ["weight"], "layer_norm": ["weight", "bias"], "l2_norm": []}[name]
    parameters = {p: getattr(a, p) for p in parameters} if affine else {}
    eps = 0.0 if name == "l2_norm" else 0.3

    t = {p: torch.tensor(v, requires_grad=True) for p, v in {"x": a.x, **parameters}.items()}
    y = torch_norm(torch, name, t["x"], t.get("weight"), t.get("bias"), shape[axis:])
    (y * torch.tensor(a.dy)).sum().backward()

    result = getattr(reference, f"{name}_forward")(a.x, **parameters, eps=eps, axis=axis)
    statistics = {"rstd": result.rstd} | ({"mean": result.mean} if name == "layer_norm" else {})
    backward = getattr(reference, f"{name}_backward")
    grads = backward(a.dy, a.x, **parameters, **statistics, axis=axis)
    y_only = getattr(reference, name)(a.x, **parameters, eps=eps, axis=axis)

    np.testing.assert_allclose(result.y, y.detach().numpy(), rtol=1e-12, atol=1e-14)
    np.testing.assert_array_equal(y_only, result.y)
    for operand in ("x", "weight", "bias"):
        got = getattr(grads, f"d{operand}")
        if operand in t:
            np.testing.assert_allclose(got, t[operand].grad.numpy(), rtol=1e-11, atol=1e-13)
        else:
            assert got is None


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


OPTIONAL = ("weight", "bias", "residual")
COMBINATIONS = [
    tuple(itertools.compress(OPTIONAL, mask)) for mask in itertools.product((False, True), repeat=3)
]


@pytest.mark.parametrize("given", COMBINATIONS, ids=["+".join(g) or "x" for g in COMBINATIONS])
@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("c", [None, 2.5])
@pytest.mark.parametrize(("shape", "axis"), SHAPES.values(), ids=SHAPES)
def test_normalize_backward_is_the_derivative_of_forward(shape, axis, c, center, given):
    a = operands(shape, axis)
    arrays = {name: getattr(a, name) for name in ("x", *given)}
    options = {"c": c, "center": center, "axis": axis}

    def loss(x, weight=None, bias=None, residual=None):
        f = reference.normalize_forward(x, weight, bias, residual=residual, eps=0.3, **options)
        stream = 0.0 if residual is None else np.sum(f.residual * a.d_residual)
        return np.sum(f.y * a.dy) + stream

    weight, bias, residual = (arrays.get(name) for name in OPTIONAL)
    f = reference.normalize_forward(a.x, weight, bias, residual=residual, eps=0.3, **options)
    grads = reference.normalize_backward(
        a.dy,
        a.x if residual is None else f.residual,
        weight,
        bias,
        rstd=f.rstd,
        mean=f.mean,
        d_residual=None if residual is None else a.d_residual,
        **options,
    )
    for name in arrays:
        expected = difference_quotient(loss, arrays, name)
        np.testing.assert_allclose(getattr(grads, f"d{name}"), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm", "l2_norm"])
def test_named_backward_is_the_derivative_of_forward_with_eps_and_a_stream(name):
    a = operands((3, 5), -1)
    forward = getattr(reference, f"{name}_forward")
    d_residual = 0.0 if name == "l2_norm" else a.d_residual  # which its backward does not take

    def loss(x):
        f = forward(x, residual=a.residual, eps=0.3)
        return np.sum(f.y * a.dy) + np.sum(f.residual * d_residual)

    f = forward(a.x, residual=a.residual, eps=0.3)
    given = {"rstd": f.rstd}
    if name == "layer_norm":
        given["mean"] = f.mean
    if name != "l2_norm":
        given["d_residual"] = a.d_residual
    grads = getattr(reference, f"{name}_backward")(a.dy, f.residual, **given)
    expected = difference_quotient(loss, {"x": a.x}, "x")
    np.testing.assert_allclose(grads.dx, expected, rtol=1e-9, atol=1e-9)


# --- a stack of layers ----------------------------------------------------------------------------


def naive_stack(x, weights, norm, factors):
    """x_k = f_k(norm(x_{k-1})) + x_{k-1} with f_k(q) = tanh(factor q)."""
    for weight, factor in zip(weights, factors, strict=True):
        x = np.tanh(factor * norm(x, weight)) + x
    return x


def fused_stack(x, weights, center, factors):
    """Compute the same by `add_`, and keep what the backward needs of each layer."""
    p, stream, saved = x, None, []
    for weight, factor in zip(weights, factors, strict=True):
        residual_dtype = x.dtype if stream is None else None
        f = reference.normalize_forward(
            p, weight, residual=stream, residual_dtype=residual_dtype, center=center, eps=0.3
        )
        added = reference.add_normalize(p, stream, weight, center=center, eps=0.3)
        np.testing.assert_array_equal(added.y, f.y)
        np.testing.assert_array_equal(added.residual, f.residual)
        p, stream = np.tanh(factor * f.y), f.residual
        saved.append((f, factor * (1 - p * p)))
    return p + stream, saved


@pytest.mark.parametrize("center", [False, True])
def test_fused_stack_equals_the_naive_stack_forward_and_backward(center):
    x, do = operands((3, 4), -1).x, operands((3, 4), -1).dy
    weights = np.random.default_rng(1).standard_normal((3, 4)) + 1
    factors = [0.5, -1.0, 2.0]

    def norm(x, weight):
        return reference.normalize(x, weight, center=center, eps=0.3)

    output, saved = fused_stack(x, weights, center, factors)
    np.testing.assert_array_equal(output, naive_stack(x, weights, norm, factors))

    dp, stream, naive = do, do, do
    dweights = []
    for weight, (f, slope) in zip(weights[::-1], saved[::-1], strict=True):
        common = {"rstd": f.rstd, "mean": f.mean, "center": center}
        grads = reference.normalize_backward(
            dp * slope, f.residual, weight, d_residual=stream, **common
        )
        dp, stream = grads.dx, grads.dresidual
        dweights.insert(0, grads.dweight)
        alone = reference.normalize_backward(naive * slope, f.residual, weight, **common)
        naive = naive + alone.dx
    np.testing.assert_allclose(dp, naive, rtol=1e-13, atol=1e-15)

    def loss(x, weights):
        return np.sum(do * naive_stack(x, weights, norm, factors))

    arrays = {"x": x, "weights": weights}
    for name, got in {"x": dp, "weights": np.array(dweights)}.items():
        expected = difference_quotient(loss, arrays, name)
        np.testing.assert_allclose(got, expected, rtol=1e-8, atol=1e-8)


# --- exact arithmetic -----------------------------------------------------------------------------


def in_decimals(x, weight, bias, dy, d_residual, eps, center):
    """One row, 60 digits: y, dx, mean, rstd; dr and r, from which the bounds take their scale."""
    with localcontext() as context:
        context.prec = 60
        x, weight, bias, dy, d_residual = (
            [Decimal(float(v)) for v in row] for row in (x, weight, bias, dy, d_residual)
        )
        d = len(x)
        mean = sum(x) / d if center else Decimal(0)
        q = [v - mean for v in x]
        rstd = 1 / (sum(v * v for v in q) / d + Decimal(eps)).sqrt()
        r = [v * rstd for v in q]
        y = [v * w + b for v, w, b in zip(r, weight, bias, strict=True)]
        dr = [v * w for v, w in zip(dy, weight, strict=True)]
        slope = sum(a * b for a, b in zip(r, dr, strict=True)) / d
        dq = [rstd * (a - b * slope) for a, b in zip(dr, r, strict=True)]
        shift = sum(dq) / d if center else Decimal(0)
        dx = [v - shift + above for v, above in zip(dq, d_residual, strict=True)]
        rows = {"y": y, "dx": dx, "mean": [mean], "rstd": [rstd], "dr": dr, "r": r}
        return SimpleNamespace(
            **{k: np.array([[float(v) for v in row]]) for k, row in rows.items()}
        )


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("mean", [0.0, 1e4])
@pytest.mark.parametrize("width", [1, 2, 3, 31, 1000, 5003])
def test_reference_is_exact_to_its_own_ulps(width, mean, center):
    for seed in range(10 if width < 1000 else 1):
        a = operands((1, width), -1, seed)
        x = a.x + mean
        exact = in_decimals(x[0], a.weight, a.bias, a.dy[0], a.d_residual[0], 1e-6, center)
        f = reference.normalize_forward(x, a.weight, a.bias, center=center)
        grads = reference.normalize_backward(
            a.dy, x, a.weight, rstd=f.rstd, mean=f.mean, d_residual=a.d_residual, center=center
        )
        # Half of each bound: the other half is for the kernel, when both compute in float64.
        bound = y_bound(exact.y, "float64", "float64", terms=exact.r * a.weight)
        assert_within(f.y, exact.y, bound / 2, "y")
        terms = dx_terms(exact.dr, exact.r, exact.rstd, a.d_residual, center=center)
        bound = dx_bound(exact.dx, terms, "float64", "float64")
        assert_within(grads.dx, exact.dx, bound / 2, "dx")
        bound = rstd_bound(exact.rstd[0], "float64", width=width)
        assert_within(f.rstd, exact.rstd[0], bound / 2, "rstd")
        if center:
            bound = mean_bound(exact.mean[0], exact.rstd[0], "float64", width=width)
            assert_within(f.mean, exact.mean[0], bound / 2, "mean")
