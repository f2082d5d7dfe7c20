# SPDX-License-Identifier: MIT
"""The oracle with gates, groups, an offset and rounding before weight, against PyTorch's autograd.

What is differentiated is the forward as MATH.md has it, written out in torch in float64.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from cunorm import reference
from cunorm.reference.activations import ACTIVATIONS

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
SHAPE = (2, 3, 12)
EPS, C = 0.3, 2.5


def operands(shape=SHAPE, axis=-1) -> SimpleNamespace:
    rng = np.random.default_rng(0)
    names = ("x", "residual", "dy", "d_residual", "gate")
    arrays = {name: rng.standard_normal(shape) for name in names}
    arrays |= {name: rng.standard_normal(shape[axis:]) for name in ("weight", "bias")}
    arrays["gate"] *= 2
    for array in arrays.values():
        array.flags.writeable = False
    return SimpleNamespace(**arrays)


def torch_activation(torch, name):
    functions = torch.nn.functional
    if name == "identity":
        return lambda z: z
    if name == "gelu_tanh":
        return lambda z: functions.gelu(z, approximate="tanh")
    return getattr(functions, {"swish": "silu"}.get(name, name))


def torch_norm(torch, t, *, shape, center, groups=1, offset=0.0, g=None, position=None, low=None):
    """Return s and y; k * r is rounded to the dtype `low`, through which gradients go unchanged."""
    s = t["x"] + t["residual"] if "residual" in t else t["x"]
    rows = (*s.shape[: s.ndim - len(shape)], groups, -1)
    p = s.reshape(rows)
    gate = g(t["gate"]).reshape(rows) if g is not None else None
    if position == "pre":
        p = p * gate
    q = p - p.mean(-1, keepdim=True) if center else p
    kr = C / q.shape[-1] ** 0.5 * q / ((q * q).mean(-1, keepdim=True) + EPS).sqrt()
    if low is not None:
        rounded = reference.round_to(kr.detach().numpy(), low).astype(np.float64)
        kr = kr + (torch.tensor(rounded) - kr).detach()
    n = kr
    if "weight" in t:
        n = n * (t["weight"] + offset).reshape(groups, -1)
    if "bias" in t:
        n = n + t["bias"].reshape(groups, -1)
    return s, (n * gate if position == "post" else n).reshape(s.shape)


def assert_as_torch(given, *, axis=-1, low=None, **told):
    """Hold y and every gradient to torch's, for the operands `given` and options of both."""
    torch = pytest.importorskip("torch")
    a = operands(axis=axis)
    x = a.x if low is None else reference.round_to(a.x, low)
    arrays = {"x": x} | {name: getattr(a, name) for name in given}
    t = {n: torch.tensor(v.astype(np.float64), requires_grad=True) for n, v in arrays.items()}
    activation, position = told.get("activation"), told.get("position")
    g = None if activation is None else torch_activation(torch, activation)
    like = {name: told[name] for name in ("center", "groups", "offset") if name in told}
    s, y = torch_norm(torch, t, shape=a.weight.shape, g=g, position=position, low=low, **like)
    loss = (y * torch.tensor(a.dy)).sum()
    if "residual" in t:
        loss = loss + (s * torch.tensor(a.d_residual)).sum()
    loss.backward()

    options = {"c": C, "axis": axis, "center": told["center"], "groups": told.get("groups", 1)}
    options |= {"weight_offset": told.get("offset", 0.0), "round_before_weight": low is not None}
    if activation is not None:
        options |= {"gate": a.gate, "gate_activation": activation, "gate_position": position}
    parameters = arrays.get("weight"), arrays.get("bias")
    f = reference.normalize_forward(
        x, *parameters, residual=arrays.get("residual"), eps=EPS, **options
    )
    grads = reference.normalize_backward(
        a.dy,
        x if f.residual is None else f.residual,
        *parameters,
        rstd=f.rstd,
        mean=f.mean,
        d_residual=None if f.residual is None else a.d_residual,
        x_dtype=None if low is None else x.dtype,
        **options,
    )
    np.testing.assert_allclose(f.y, y.detach().numpy(), rtol=1e-11, atol=1e-13)
    for name, tensor in t.items():
        got = getattr(grads, f"d{name}")
        np.testing.assert_allclose(got, tensor.grad.numpy(), rtol=1e-10, atol=1e-12, err_msg=name)
    for name in {"weight", "bias", "gate"} - set(t):
        assert getattr(grads, f"d{name}") is None


OPTIONAL = ("residual", "weight", "bias")
SUBSETS = [
    tuple(itertools.compress(OPTIONAL, mask)) for mask in itertools.product((False, True), repeat=3)
]


@pytest.mark.parametrize("position", ["pre", "post"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_gated_norm_and_its_gradients_are_those_of_torch(activation, position):
    for given, center, groups in itertools.product(SUBSETS, (False, True), (1, 3)):
        for offset in (0.0, 1.0) if "weight" in given else (0.0,):
            told = {"center": center, "groups": groups, "offset": offset}
            assert_as_torch((*given, "gate"), activation=activation, position=position, **told)


@pytest.mark.parametrize("groups", [1, 2, 12])
@pytest.mark.parametrize("center", [False, True])
def test_groups_and_an_offset_without_a_gate_are_those_of_torch(center, groups):
    for given in SUBSETS:
        assert_as_torch(given, center=center, groups=groups, offset=0.7)


@pytest.mark.parametrize("position", ["pre", "post"])
@pytest.mark.parametrize("axis", [-2, -3])
def test_a_gate_of_rows_of_several_axes_is_that_of_torch(axis, position):
    given = ("weight", "bias", "gate")
    assert_as_torch(given, axis=axis, center=True, activation="silu", position=position)


@pytest.mark.parametrize("low", [BFLOAT16, np.dtype(np.float16)], ids=str)
@pytest.mark.parametrize("position", [None, "pre", "post"])
@pytest.mark.parametrize("center", [False, True])
def test_gradients_pass_straight_through_the_rounding_before_weight(center, position, low):
    activation = None if position is None else "silu"
    gate = () if position is None else ("gate",)
    for given, groups in itertools.product(SUBSETS, (1, 3)):
        told = {"activation": activation, "position": position, "groups": groups}
        assert_as_torch((*given, *gate), center=center, offset=0.5, low=low, **told)
