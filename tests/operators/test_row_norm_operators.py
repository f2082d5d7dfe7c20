# SPDX-License-Identifier: MIT
"""Every row norm is within its bound of the oracle, forward and backward, at every width."""

import inspect

import numpy as np
import pytest

import cunorm
from cunorm import AddNorm, NormForward, NormGrads
from tests.support.bounds import check_backward, check_forward
from tests.support.operands import (
    DTYPES,
    NORMS,
    WIDTHS,
    at,
    draw,
    optional,
    parameters,
    row_count,
    saved,
    weight_and_bias,
)

WITH_RESIDUAL = [name for name, norm in NORMS.items() if norm.has_residual]
all_norms = pytest.mark.parametrize("name", NORMS)
all_dtypes = pytest.mark.parametrize("dtype", DTYPES)


@all_norms
@all_dtypes
def test_y_is_within_its_bound_at_every_width(name, dtype):
    norm = NORMS[name]
    for width in WIDTHS:
        x = draw("x", (row_count(width), width), dtype)
        given = parameters(norm, width, dtype)
        y = getattr(cunorm, name)(x, **given, **norm.asked())
        assert type(y) is np.ndarray
        assert y.dtype == x.dtype
        with at(f"width {width}"):
            check_forward(NormForward(y), x, *weight_and_bias(given), **norm.meaning(width))


@all_norms
@all_dtypes
def test_forward_returns_the_same_y_and_statistics_within_their_bounds(name, dtype):
    norm = NORMS[name]
    compute = np.float64 if dtype == "float64" else np.float32
    for width in WIDTHS:
        x = draw("x", (row_count(width), width), dtype)
        given = parameters(norm, width, dtype)
        result = getattr(cunorm, f"{name}_forward")(x, **given, **norm.asked())
        assert type(result) is NormForward
        assert result.residual is None
        assert result.rstd.dtype == compute
        assert (result.mean is not None) == norm.center
        np.testing.assert_array_equal(result.y, getattr(cunorm, name)(x, **given, **norm.asked()))
        with at(f"width {width}"):
            check_forward(result, x, *weight_and_bias(given), **norm.meaning(width))


@pytest.mark.parametrize("name", WITH_RESIDUAL)
@all_dtypes
def test_add_returns_y_and_the_exact_sum_at_every_width(name, dtype):
    norm = NORMS[name]
    for width in WIDTHS:
        shape = (row_count(width), width)
        x, residual = draw("x", shape, dtype), draw("residual", shape, dtype)
        given = parameters(norm, width, dtype)
        operands = (x, *weight_and_bias(given), residual)
        result = getattr(cunorm, f"add_{name}")(x, residual, **given, **norm.asked())
        assert type(result) is AddNorm
        forward = getattr(cunorm, f"{name}_forward")(x, **given, residual=residual, **norm.asked())
        with at(f"width {width}"):
            check_forward(NormForward(*result), *operands, **norm.meaning(width))
            check_forward(forward, *operands, **norm.meaning(width))


@all_norms
@all_dtypes
def test_gradients_are_within_their_bounds_at_every_width(name, dtype):
    norm = NORMS[name]
    for width in WIDTHS:
        shape = (row_count(width), width)
        x, dy = draw("x", shape, dtype), draw("dy", shape, dtype)
        given = parameters(norm, width, dtype)
        forward = getattr(cunorm, f"{name}_forward")(x, **given, **norm.asked())
        grads = _backward(name, dy, x, given, forward)
        assert type(grads) is NormGrads
        assert grads.dresidual is grads.dx
        assert grads.dgate is None
        assert (grads.dweight is not None, grads.dbias is not None) == (
            "weight" in given,
            "bias" in given,
        )
        with at(f"width {width}"):
            check_backward(grads, dy, x, *weight_and_bias(given), **norm.meaning(width))


@pytest.mark.parametrize("name", WITH_RESIDUAL)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_streams_gradient_from_above_is_added(name, dtype):
    norm = NORMS[name]
    for width in WIDTHS:
        shape = (row_count(width), width)
        x, dy, d_residual = (draw(o, shape, dtype) for o in ("x", "dy", "d_residual"))
        given = parameters(norm, width, dtype)
        forward = getattr(cunorm, f"{name}_forward")(x, **given, **norm.asked())
        grads = _backward(name, dy, x, given, forward, d_residual=d_residual)
        with at(f"width {width}"):
            operands = (dy, x, *weight_and_bias(given), d_residual)
            check_backward(grads, *operands, **norm.meaning(width))


GATES = {
    "pre": {"gate_activation": "gelu_tanh", "gate_position": "pre", "weight_offset": 1.0},
    "post": {"gate_activation": "silu", "gate_position": "post", "round_before_weight": True},
}


@pytest.mark.parametrize("name", WITH_RESIDUAL)
@pytest.mark.parametrize(("dtype", "position"), [("float32", "pre"), ("bfloat16", "post")])
def test_gated_norms_are_within_their_bounds_at_every_width(name, dtype, position):
    norm = NORMS[name]
    for width in WIDTHS:
        shape = (row_count(width), width)
        x, residual, dy, gate = (draw(o, shape, dtype) for o in ("x", "residual", "dy", "gate"))
        given, options = parameters(norm, width, dtype), {"gate": gate, **GATES[position]}
        told, operands = norm.asked() | options, (x, *weight_and_bias(given), residual)
        meaning = norm.meaning(width) | options
        y = getattr(cunorm, name)(x, **given, **told)
        added = getattr(cunorm, f"add_{name}")(x, residual, **given, **told)
        forward = getattr(cunorm, f"{name}_forward")(x, **given, residual=residual, **told)
        grads = _backward(name, dy, forward.residual, given, forward, d_residual=x, **options)
        with at(f"width {width}"):
            check_forward(NormForward(y), *operands[:3], **meaning)
            check_forward(NormForward(*added), *operands, **meaning)
            check_forward(forward, *operands, **meaning)
            given_back = (dy, forward.residual, *weight_and_bias(given), x)
            worst = check_backward(grads, *given_back, **meaning)
            assert worst.keys() >= {"dx", "dgate", "dweight"}


@all_norms
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_norms_of_groups_are_within_their_bounds(name, dtype):
    norm = NORMS[name]
    for groups, width in ((1, 96), (2, 65), (3, 128), (7, 5), (96, 1), (2, 20480)):
        shape = (row_count(groups * width), groups * width)
        x, dy = draw("x", shape, dtype), draw("dy", shape, dtype)
        given = parameters(norm, shape[-1], dtype)
        told, meaning = norm.asked() | {"groups": groups}, norm.meaning(width) | {"groups": groups}
        forward = getattr(cunorm, f"{name}_forward")(x, **given, **told)
        grads = _backward(name, dy, x, given, forward, groups=groups)
        assert forward.rstd.shape == (shape[0], *([groups] if groups > 1 else []))
        with at(f"{groups} groups of width {width}"):
            y = getattr(cunorm, name)(x, **given, **told)
            check_forward(NormForward(y), x, *weight_and_bias(given), **meaning)
            check_forward(forward, x, *weight_and_bias(given), **meaning)
            check_backward(grads, dy, x, *weight_and_bias(given), **meaning)


@pytest.mark.parametrize("count", [1, 15, 16, 17, 63, 64, 500, 4000])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_parameter_gradients_are_within_their_bounds_over_any_number_of_rows(dtype, count):
    width, norm = 65, NORMS["layer_norm"]
    x, dy = (draw(name, (count, width), dtype) for name in ("x", "dy"))
    given = {"weight": optional("weight", width, dtype), "bias": optional("bias", width, dtype)}
    forward = cunorm.layer_norm_forward(x, **given)
    grads = _backward("layer_norm", dy, x, given, forward)
    check_backward(grads, dy, x, *weight_and_bias(given), **norm.meaning(width))


@pytest.mark.parametrize("name", NORMS)
def test_the_signatures_are_those_of_the_design(name):
    eps = inspect.signature(getattr(cunorm, name)).parameters["eps"].default
    assert eps == NORMS[name].eps
    for function in (name, f"{name}_forward", f"{name}_backward"):
        kinds = inspect.signature(getattr(cunorm, function)).parameters.values()
        positional = [p.name for p in kinds if p.kind is p.POSITIONAL_OR_KEYWORD]
        arrays = ["dy", "x"] if function.endswith("_backward") else ["x"]
        assert positional == [*arrays, *NORMS[name].parameters]


def _backward(name, dy, x, given, forward, **more):
    norm = NORMS[name]
    told = {key: value for key, value in norm.asked().items() if key != "eps"}
    return getattr(cunorm, f"{name}_backward")(
        dy, x, **given, **told, **saved(norm, forward), **more
    )
