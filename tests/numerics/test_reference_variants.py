# SPDX-License-Identifier: MIT
"""What the oracle promises of groups, offsets, rounding before weight, and gates as operands."""

from __future__ import annotations

import inspect
import itertools
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from cunorm import reference

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
EVERYTHING = {
    "groups": 2,
    "weight_offset": 1.0,
    "round_before_weight": True,
    "gate_activation": "tanh",
    "gate_position": "pre",
}


def operands(shape=(5, 8), dtype=np.float64) -> SimpleNamespace:
    rng = np.random.default_rng(0)
    names = ("x", "residual", "dy", "d_residual", "gate")
    arrays = {name: rng.standard_normal(shape).astype(dtype) for name in names}
    arrays |= {name: rng.standard_normal(shape[-1]).astype(dtype) for name in ("weight", "bias")}
    for array in arrays.values():
        array.flags.writeable = False
    return SimpleNamespace(**arrays)


def forward_and_backward(a, **options):
    given = {key: options.pop(key) for key in ("residual", "d_residual") if key in options}
    f = reference.normalize_forward(
        a.x, a.weight, a.bias, residual=given.get("residual"), **options
    )
    s = a.x if f.residual is None else f.residual
    options |= {"rstd": f.rstd, "mean": f.mean, "d_residual": given.get("d_residual")}
    options.pop("eps", None)
    return f, reference.normalize_backward(a.dy, s, a.weight, a.bias, x_dtype=a.x.dtype, **options)


# --- groups ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("position", ["pre", "post"])
@pytest.mark.parametrize("center", [False, True])
def test_groups_are_norms_of_slices_side_by_side(center, position):
    a = operands((2, 3, 12))
    options = {"c": 2.0, "center": center, "gate_position": position, "weight_offset": 1.0}
    f, grads = forward_and_backward(a, groups=3, gate=a.gate, **options)
    assert f.rstd.shape == (2, 3, 3)
    assert grads.dweight.shape == grads.dbias.shape == (12,)
    assert (f.mean is None) != center
    for group in range(3):
        own = np.s_[..., 4 * group : 4 * group + 4]
        part = SimpleNamespace(**{name: array[own] for name, array in vars(a).items()})
        alone, own_grads = forward_and_backward(part, gate=part.gate, **options)
        np.testing.assert_array_equal(f.y[own], alone.y)
        np.testing.assert_array_equal(f.rstd[..., group], alone.rstd)
        if center:
            np.testing.assert_array_equal(f.mean[..., group], alone.mean)
        for name in ("dx", "dweight", "dbias", "dgate"):
            np.testing.assert_array_equal(getattr(grads, name)[own], getattr(own_grads, name))


def test_l2_norm_of_groups_adds_eps_to_the_sum_of_each():
    x = operands((5, 12)).x
    total = np.sum(x.reshape(5, 3, 4) ** 2, axis=-1) + 0.7
    f = reference.l2_norm_forward(x, eps=0.7, groups=3)
    np.testing.assert_allclose(f.y, x / np.sqrt(np.repeat(total, 4, axis=-1)), rtol=1e-14)
    np.testing.assert_allclose(f.rstd, np.sqrt(4 / total), rtol=1e-14)
    np.testing.assert_array_equal(reference.l2_norm(x, eps=0.7, groups=3), f.y)
    dx = reference.l2_norm_backward(x, x, rstd=f.rstd, groups=3).dx
    alone = reference.l2_norm_backward(x[:, :4], x[:, :4], rstd=f.rstd[:, 0]).dx
    np.testing.assert_array_equal(dx[:, :4], alone)


# --- offset and rounding --------------------------------------------------------------------------


def test_an_offset_is_added_to_weight_in_float64():
    a = operands(dtype=BFLOAT16)
    offset = 1 + 2.0**-30
    f, grads = forward_and_backward(a, weight_offset=offset)
    a.weight = a.weight.astype(np.float64) + offset
    exact, exact_grads = forward_and_backward(a)
    np.testing.assert_array_equal(f.y, exact.y)
    for got, expected in zip(grads, exact_grads, strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), BFLOAT16, np.dtype(np.float32)], ids=str)
@pytest.mark.parametrize("given", ["", "weight", "bias", "weight bias"])
def test_rounding_before_weight_is_to_the_dtype_of_x_and_not_of_the_stream(given, dtype):
    a = operands()
    x = reference.round_to(a.x, dtype)
    weight, bias = (getattr(a, n) if n in given else None for n in ("weight", "bias"))
    told = {"residual": a.residual, "c": 3.0}
    f = reference.normalize_forward(x, weight, bias, round_before_weight=True, **told)
    kr = reference.normalize_forward(x, **told).y
    n = reference.round_to(kr, dtype).astype(np.float64)
    assert np.any(n != kr)
    n = n if weight is None else n * weight
    np.testing.assert_array_equal(f.y, n if bias is None else n + bias)


def test_backward_rounds_to_x_dtype_what_dweight_and_dgate_have():
    a = operands()
    rounds = {"round_before_weight": True, "gate": a.gate, "gate_activation": "identity"}
    f = reference.normalize_forward(a.x, a.weight, a.bias)
    kr = reference.normalize_forward(a.x).y
    given = (a.dy, a.x, a.weight, a.bias)
    plain = reference.normalize_backward(*given, rstd=f.rstd, gate=a.gate)
    for dtype in (None, np.float64, np.float16):
        rounded = reference.round_to(kr, np.float64 if dtype is None else dtype).astype(np.float64)
        grads = reference.normalize_backward(*given, rstd=f.rstd, x_dtype=dtype, **rounds)
        dn = a.dy * a.gate
        np.testing.assert_allclose(grads.dweight, np.sum(dn * rounded, axis=0), rtol=1e-14)
        np.testing.assert_array_equal(grads.dgate, a.dy * (rounded * a.weight + a.bias))
    rounds["gate_activation"] = "silu"
    grads = reference.normalize_backward(*given, rstd=f.rstd, x_dtype=np.float16, **rounds)
    np.testing.assert_array_equal(grads.dx, plain.dx)
    np.testing.assert_array_equal(grads.dbias, plain.dbias)
    assert np.any(grads.dweight != plain.dweight)


# --- gates as operands ----------------------------------------------------------------------------


@pytest.mark.parametrize("position", ["pre", "post"])
@pytest.mark.parametrize("needs", list(itertools.product((False, True), repeat=4)))
def test_backward_gives_the_gradients_asked_for(needs, position):
    a = operands()
    names = tuple(itertools.compress(("x", "weight", "bias", "gate"), needs))
    options = {"gate": a.gate, "gate_position": position}
    f = reference.normalize_forward(a.x, a.weight, a.bias, **options)
    whole = reference.normalize_backward(a.dy, a.x, a.weight, a.bias, rstd=f.rstd, **options)
    grads = reference.normalize_backward(
        a.dy, a.x, a.weight, a.bias, rstd=f.rstd, needs=names, **options
    )
    for name, got, all_of_them in zip(grads._fields, grads, whole, strict=True):
        if {"dresidual": "x"}.get(name, name[1:]) in names:
            np.testing.assert_array_equal(got, all_of_them)
        else:
            assert got is None
    assert grads.dresidual is grads.dx
    without = reference.normalize_backward(a.dy, a.x, rstd=f.rstd, needs=names)
    assert without.dgate is None


def test_bias_matters_to_the_gradient_of_a_post_gate_only():
    a = operands()
    for position in ("pre", "post"):
        options = {"gate": a.gate, "gate_position": position}
        rstd = reference.normalize_forward(a.x, a.weight, a.bias, **options).rstd
        grads, others = (
            reference.normalize_backward(a.dy, a.x, a.weight, bias, rstd=rstd, **options)
            for bias in (a.bias, None)
        )
        assert np.array_equal(grads.dgate, others.dgate) == (position == "pre")
        np.testing.assert_array_equal(grads.dx, others.dx)
        np.testing.assert_array_equal(grads.dweight, others.dweight)


@pytest.mark.parametrize("position", ["pre", "post"])
@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16, np.float32, np.float64], ids=str)
def test_an_expanded_gate_has_a_full_gradient(dtype, position):
    a = operands((2, 3, 8), dtype)
    gate = np.broadcast_to(a.gate[:1, :1], a.x.shape)
    results = [
        forward_and_backward(a, gate=view, gate_position=position, center=True)
        for view in (gate, np.ascontiguousarray(gate))
    ]
    for (f, grads), (same, same_grads) in itertools.pairwise(results):
        np.testing.assert_array_equal(f.y, same.y)
        np.testing.assert_array_equal(grads.dgate, same_grads.dgate)
        assert grads.dgate.shape == a.x.shape
        assert grads.dgate.strides == a.x.astype(np.float64).strides


@pytest.mark.parametrize("position", ["pre", "post"])
def test_a_nan_in_a_gate_poisons_its_group_before_the_norm_and_its_element_after(position):
    a = operands()
    gate = a.gate.copy()
    gate[2, 5] = np.nan
    options = {"groups": 2, "gate_position": position}
    f, grads = forward_and_backward(a, gate=gate, **options)
    expected = np.zeros(a.x.shape, bool)
    expected[2, 4:] = True
    np.testing.assert_array_equal(np.isnan(grads.dx), expected)
    if position == "post":
        expected[2, [4, 6, 7]] = False
    np.testing.assert_array_equal(np.isnan(f.y), expected)
    np.testing.assert_array_equal(np.isnan(grads.dgate), expected)


def test_no_operand_is_modified_and_zero_rows_are_empty():
    a = operands((0, 8), BFLOAT16)
    f, grads = forward_and_backward(a, gate=a.gate, center=True, **EVERYTHING)
    assert f.y.shape == grads.dx.shape == grads.dgate.shape == (0, 8)
    assert f.rstd.shape == f.mean.shape == (0, 2)
    np.testing.assert_array_equal(grads.dweight, np.zeros(8))
    a = operands(dtype=BFLOAT16)  # read-only
    before = {name: array.copy() for name, array in vars(a).items()}
    forward_and_backward(a, gate=a.gate, center=True, residual=a.residual, **EVERYTHING)
    for name, array in vars(a).items():
        np.testing.assert_array_equal(array, before[name])


# --- named forms ----------------------------------------------------------------------------------

NAMED = {"normalize": {}, "rms_norm": {}, "layer_norm": {"center": True, "eps": 1e-5}}


@pytest.mark.parametrize("name", NAMED)
def test_named_forms_pass_every_option_on(name):
    a = operands(dtype=BFLOAT16)
    options = EVERYTHING | {"gate": a.gate}
    parameters = (a.weight,) if name == "rms_norm" else (a.weight, a.bias)
    expected = reference.normalize_forward(
        a.x, *parameters, residual=a.residual, **options, **NAMED[name]
    )
    got = getattr(reference, f"{name}_forward")(a.x, *parameters, residual=a.residual, **options)
    for field, same in zip(got, expected, strict=True):
        np.testing.assert_array_equal(field, same)
    added = getattr(reference, f"add_{name}")(a.x, a.residual, *parameters, **options)
    np.testing.assert_array_equal(added.y, expected.y)
    np.testing.assert_array_equal(added.residual, expected.residual)
    y = getattr(reference, name)(a.x, *parameters, **options)
    alone = reference.normalize_forward(a.x, *parameters, **options, **NAMED[name]).y
    np.testing.assert_array_equal(y, alone)

    stats = {"rstd": expected.rstd} | ({"mean": expected.mean} if name == "layer_norm" else {})
    options |= stats | {"d_residual": a.d_residual, "x_dtype": np.float16, "needs": ("x", "gate")}
    got = getattr(reference, f"{name}_backward")(a.dy, a.residual, *parameters, **options)
    center = name == "layer_norm"
    expected = reference.normalize_backward(a.dy, a.residual, *parameters, center=center, **options)
    assert got.dweight is got.dbias is None
    np.testing.assert_array_equal(got.dx, expected.dx)
    np.testing.assert_array_equal(got.dgate, expected.dgate)


@pytest.mark.parametrize("name", ["normalize_forward", "normalize_backward"])
def test_the_defaults_are_those_of_the_design(name):
    parameters = inspect.signature(getattr(reference, name)).parameters
    assert {option: parameters[option].default for option in (*EVERYTHING, "gate")} == {
        "groups": 1,
        "weight_offset": 0.0,
        "round_before_weight": False,
        "gate_activation": "silu",
        "gate_position": "post",
        "gate": None,
    }
