# SPDX-License-Identifier: MIT
"""The oracle's norms and gradients are those of PyTorch and its autograd, in float64.

Autograd differentiates PyTorch's own norms, and the forward of docs/operators/normalize.md.
"""

from __future__ import annotations

from itertools import compress, product

import numpy as np
import pytest

from cunorm import reference
from cunorm.reference.activations import ACTIVATIONS
from tests.support.operands import DTYPES, at
from tests.support.reference_cases import group_norm, operands, row_norm

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
functions = torch.nn.functional

EPS, C = 0.3, 2.5
NARROW = [DTYPES["bfloat16"], DTYPES["float16"], DTYPES["float32"]]


def subsets(*names):
    masks = product((False, True), repeat=len(names))
    return [tuple(compress(names, mask)) for mask in masks]


def torch_activation(name):
    if name in (None, "identity"):
        return lambda z: 1 * z
    if name == "gelu_tanh":
        return lambda z: functions.gelu(z, approximate="tanh")
    return getattr(functions, {"swish": "silu"}.get(name, name))


def assert_as_torch(f, grads, y, t):
    """Check y and the gradients of the named leaves against torch; other gradients are None."""
    np.testing.assert_allclose(f.y, y.detach().numpy(), rtol=1e-11, atol=1e-13)
    for name, leaf in t.items():
        got = getattr(grads, f"d{name}")
        np.testing.assert_allclose(got, leaf.grad.numpy(), rtol=1e-10, atol=1e-12, err_msg=name)
    for field in {"dweight", "dbias", "dgate"} & set(grads._fields) - {f"d{name}" for name in t}:
        assert getattr(grads, field) is None


def leaves(a, *names):
    arrays64 = {name: getattr(a, name).astype(np.float64) for name in names}
    return {name: torch.tensor(array, requires_grad=True) for name, array in arrays64.items()}


# --- row norms ------------------------------------------------------------------------------------

SHAPES = [((3, 1), -1), ((3, 2), -1), ((2, 2, 6), -1), ((3, 2, 3), -2), ((2, 3), 0)]
PARAMETERS = {"rms_norm": ["weight"], "layer_norm": ["weight", "bias"], "l2_norm": []}


def torch_named(name, x, weight, bias, shape):
    if name == "rms_norm":
        return functions.rms_norm(x, shape, weight, eps=EPS)
    if name == "layer_norm":
        return functions.layer_norm(x, shape, weight, bias, eps=EPS)
    return functions.normalize(x.flatten(-len(shape)), dim=-1, eps=0.0).reshape(x.shape)


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("name", PARAMETERS)
def test_named_norms_are_those_of_torch(name, affine):
    names = PARAMETERS[name] if affine else []
    kwargs = {"eps": 0.0 if name == "l2_norm" else EPS}
    for shape, axis in SHAPES:
        a = operands(shape, shape[axis:])
        parameters, t = {n: getattr(a, n) for n in names}, leaves(a, "x", *names)
        y = torch_named(name, t["x"], t.get("weight"), t.get("bias"), shape[axis:])
        (y * torch.tensor(a.dy)).sum().backward()
        f = getattr(reference, f"{name}_forward")(a.x, **parameters, **kwargs, axis=axis)
        saved = {"rstd": f.rstd} | ({"mean": f.mean} if name == "layer_norm" else {})
        backward = getattr(reference, f"{name}_backward")
        with at(shape):
            assert_as_torch(f, backward(a.dy, a.x, **parameters, **saved, axis=axis), y, t)


def torch_norm(t, shape, center, groups=1, offset=0.0, activation=None, position=None, low=None):
    """Return the stream and y; `low` is the dtype to which values are rounded before weight."""
    gate = torch_activation(activation)(t["gate"]) if activation else 1.0
    s = t["x"] * gate if position == "branch" else t["x"]
    s = s + t["residual"] if "residual" in t else s
    p = s * gate if position == "pre" else s
    p = p.reshape(*s.shape[: s.ndim - len(shape)], groups, -1)
    q = p - p.mean(-1, keepdim=True) if center else p
    kr = C / q.shape[-1] ** 0.5 * q / ((q * q).mean(-1, keepdim=True) + EPS).sqrt()
    if low is not None:
        rounded = reference.round_to(kr.detach().numpy(), low).astype(np.float64)
        kr = kr + (torch.tensor(rounded) - kr).detach()
    n = kr.reshape(s.shape)
    n = n * (t["weight"] + offset) if "weight" in t else n
    n = n + t["bias"] if "bias" in t else n
    return s, n * gate if position == "post" else n


def check(given, *, shape=(2, 3, 12), axis=-1, low=None, shapes=None, **kwargs):
    a = operands(shape, shape[axis:], **shapes or {})
    a.x = a.x if low is None else reference.round_to(a.x, low)
    t = leaves(a, "x", *given)
    s, y = torch_norm(t, shape[axis:], low=low, **kwargs)
    loss = (y * torch.tensor(a.dy)).sum()
    if "residual" in t or kwargs.get("position") == "branch":
        loss = loss + (s * torch.tensor(a.d_residual)).sum()
    loss.backward()
    options = {"c": C, "axis": axis, "center": kwargs["center"], "groups": kwargs.get("groups", 1)}
    options |= {"weight_offset": kwargs.get("offset", 0.0), "round_before_weight": low is not None}
    if "gate" in given:
        options |= {"gate_activation": kwargs["activation"], "gate_position": kwargs["position"]}
    f, grads = row_norm(a, given, eps=EPS, **options)
    with at(given, shapes, kwargs):
        assert_as_torch(f, grads, y, t)
        if f.residual is not None:
            np.testing.assert_allclose(f.residual, s.detach().numpy(), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("low", [None, *NARROW], ids=str)
@pytest.mark.parametrize("position", [None, "pre", "post"])
def test_norms_of_any_operands_and_groups_are_those_of_torch(position, low):
    """Gradients ignore the rounding before weight, to the dtype of x and not of the stream."""
    gate, activation = ((), None) if position is None else (("gate",), "silu")
    kwargs = {"activation": activation, "position": position, "low": low}
    for given in subsets("residual", "weight", "bias"):
        for center, groups in product((False, True), (1, 3, 12)):
            offset = 0.5 if "weight" in given else 0.0
            check((*given, *gate), center=center, groups=groups, offset=offset, **kwargs)
    for axis in (-2, -3):
        check(("weight", "bias", *gate), axis=axis, center=True, **kwargs)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gates_and_activations_and_their_slopes_are_those_of_torch(activation):
    for position, center in product(("pre", "post"), (False, True)):
        kwargs = {"activation": activation, "position": position, "center": center}
        check(("residual", "weight", "bias", "gate"), groups=3, **kwargs)


OF_ROWS = [(12,), (1, 12), (2, 1, 12), (1, 3, 12), (3, 12), (2, 3, 12), (1, 1, 12)]
OF_FRAMES = [(2, 3, 1, 12), (3, 1, 12), (2, 1, 4, 12), (2, 1, 1, 12), (12,)]
OF_WIDE_ROWS = [(2, 1, 2, 6), (3, 2, 6), (2, 3, 2, 6), (1, 2, 6), (2, 6)]
OF_BRANCHES = [(2, 3, 12), (12,), (2, 1, 12), (2, 1, 1), (2, 3, 1), (1,), (1, 3, 12), (3, 1)]


@pytest.mark.parametrize("position", [None, "post"])
def test_weights_and_biases_that_vary_over_rows_and_their_gradients_are_those_of_torch(position):
    gate, activation = ((), None) if position is None else (("gate",), "silu")
    kwargs = {"activation": activation, "position": position, "offset": 1.0}
    for weight, bias in product(OF_ROWS, OF_ROWS):
        for groups, center in ((1, True), (3, False), (12, True)):
            given, shapes = ("residual", "weight", "bias", *gate), {"weight": weight, "bias": bias}
            check(given, shapes=shapes, groups=groups, center=center, **kwargs)
    for shape, axis, of_parameters in (
        ((2, 3, 4, 12), -1, OF_FRAMES),
        ((2, 3, 2, 6), -2, OF_WIDE_ROWS),
    ):
        for weight, bias in zip(of_parameters, of_parameters[1:] + of_parameters[:1], strict=True):
            shapes = {"weight": weight, "bias": bias}
            for given in (("weight",), ("bias",), ("weight", "bias")):
                here = {"shape": shape, "axis": axis, "shapes": shapes, "center": True}
                check((*given, *gate), **here, **kwargs)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_gate_of_the_branch_and_its_gradient_are_those_of_torch(activation):
    kwargs = {"position": "branch", "activation": activation}
    for gate, groups in product(OF_BRANCHES, (1, 3)):
        shapes = {"gate": gate, "weight": (2, 1, 12)}
        check(("gate",), shapes=shapes, groups=groups, center=False, **kwargs)
        given = ("residual", "weight", "bias", "gate")
        check(given, shapes=shapes, groups=groups, center=True, **kwargs)
    for gate in (*OF_WIDE_ROWS, (2, 3, 1, 1), (2, 1, 1, 1), (1, 1)):
        here = {"shape": (2, 3, 2, 6), "axis": -2, "shapes": {"gate": gate}, "center": True}
        check(("residual", "weight", "gate"), **here, **kwargs)


# --- group norms ----------------------------------------------------------------------------------

# Channels, positions along 0 to 3 axes, groups; some groups are all channels, some one channel.
GROUPED = [(6, (), 2), (6, (1, 1), 3), (3, (5,), 1), (3, (2, 3), 3), (35, (7, 11), 5)]
GROUPED += [(6, (3, 1, 2), 2), (3, (), 3)]


@pytest.mark.parametrize("channel_axis", [-1, 1])
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_group_and_instance_norms_are_those_of_torch(activation, channel_axis):
    kwargs = {"activation": activation, "channel_axis": channel_axis}
    for channels, positions, groups in GROUPED if activation in (None, "gelu") else GROUPED[2:4]:
        shape = (3, *positions, channels) if channel_axis == -1 else (3, channels, *positions)
        a = operands(shape, (channels,))
        for given in subsets("weight", "bias"):
            t = leaves(a, "x", *given)
            x, weight = torch.movedim(t["x"], channel_axis, 1), t.get("weight")
            if "bias" in t and weight is None:  # torch 2.13 then has no gradient of bias
                weight = torch.ones_like(t["bias"])
            if groups == channels and positions:
                n = functions.instance_norm(x, None, None, weight, t.get("bias"), eps=EPS)
            else:
                n = functions.group_norm(x, groups, weight, t.get("bias"), eps=EPS)
            y = torch.movedim(torch_activation(activation)(n), 1, channel_axis)
            (y * torch.tensor(a.dy)).sum().backward()
            with at(shape, groups, given):
                assert_as_torch(*group_norm(a, groups, given, eps=EPS, **kwargs), y, t)


@pytest.mark.parametrize("channel_axis", [-1, 1])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_weights_and_biases_of_samples_and_their_gradients_are_those_of_torch(
    activation, channel_axis
):
    kwargs = {"activation": activation, "channel_axis": channel_axis}
    for channels, positions, groups in GROUPED:
        shape = (3, *positions, channels) if channel_axis == -1 else (3, channels, *positions)
        of_samples = [(3, channels), (1, channels), (channels,)]
        for weight, bias in product(of_samples, of_samples):
            a = operands(shape, weight=weight, bias=bias)
            t = leaves(a, "x", "weight", "bias")
            n = functions.group_norm(torch.movedim(t["x"], channel_axis, 1), groups, eps=EPS)
            ones = [1] * len(positions)
            w, b = (t[name].reshape(*t[name].shape, *ones) for name in ("weight", "bias"))
            y = torch.movedim(torch_activation(activation)(n * w + b), 1, channel_axis)
            (y * torch.tensor(a.dy)).sum().backward()
            with at(shape, groups, weight, bias):
                assert_as_torch(*group_norm(a, groups, eps=EPS, **kwargs), y, t)


# --- the stream -----------------------------------------------------------------------------------


@pytest.mark.parametrize("residual_dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("x_dtype", DTYPES.values(), ids=str)
def test_a_sum_is_rounded_to_the_streams_dtype_as_by_torch(x_dtype, residual_dtype):
    a = operands((50, 8))
    x, residual = a.x.astype(x_dtype), (100 * a.residual).astype(residual_dtype)
    # torch rounds float64 to half precision by way of float32, which changes a few numbers.
    streams = [d for d in DTYPES.values() if x_dtype != np.float64 or d.itemsize > 2]
    for given in (None, *streams):
        stream = given or residual_dtype
        compute = torch.float64 if np.float64 in (x_dtype, stream) else torch.float32
        exact = [torch.tensor(v.astype(np.float64)).to(compute) for v in (x, residual)]
        expected = sum(exact).to(getattr(torch, stream.name)).double().numpy()
        for function in (reference.normalize_forward, reference.add_normalize):
            result = function(x, residual=residual, residual_dtype=given)
            assert result.residual.dtype == stream
            np.testing.assert_array_equal(result.residual.astype(np.float64), expected)


@pytest.mark.parametrize("residual_dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("x_dtype", DTYPES.values(), ids=str)
def test_a_gated_branch_and_its_sum_are_rounded_once_to_the_streams_dtype(x_dtype, residual_dtype):
    a = operands((50, 8), gate=(8,))
    x, residual = a.x.astype(x_dtype), (100 * a.residual).astype(residual_dtype)
    gate = {"gate": a.gate, "gate_position": "branch"}
    branch = x.astype(np.float64) * ACTIVATIONS["silu"].value(a.gate)
    for more, exact, dtype in (
        ({"residual": residual}, branch + residual.astype(np.float64), residual_dtype),
        ({"residual_dtype": residual_dtype}, branch, residual_dtype),
        ({}, branch, x_dtype),
    ):
        stream = reference.normalize_forward(x, **more, **gate).residual
        assert stream.dtype == dtype
        np.testing.assert_array_equal(stream, reference.round_to(exact, dtype))
