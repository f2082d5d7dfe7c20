# SPDX-License-Identifier: MIT
"""The bounds in `cunorm.reference.tolerance`, with which `python -m cunorm demo` judges results."""

import numpy as np
import pytest

from cunorm import reference
from cunorm.reference.activations import ACTIVATIONS
from cunorm.reference.tolerance import Tolerance, bound, worst_error
from cunorm.results import AddNorm
from tests.support import bounds, group_bounds
from tests.support.internals import operators, row_operands, text
from tests.support.operands import NORMS, draw, parameters

TINY = 1e-30  # larger than the error of any underflow


def assert_near(tolerances, dy, forward, backward, most, least=0.999):
    """Check that the demo's bounds are `least` to `most` times those of the tests."""
    for expected, errors in zip((forward, backward), tolerances, strict=True):
        fields = {n: e for n, e in expected.exact._asdict().items() if e is not None}
        for name in fields.keys() - {"residual"}:
            dtype = str(dy.dtype) if name in ("y", "dx", "dresidual", "dgate") else "float32"
            ours = bound(fields[name], errors[name], dtype)
            ratio = (ours + TINY) / (expected.bound(name, dtype) + TINY)
            assert least < ratio.min() <= ratio.max() < most, name


def drawn(dtype):
    rows = ("x", "residual", "dy", "d_residual", "gate")
    operands = {name: draw(name, (48, 48), dtype) for name in rows}
    return operands | parameters(NORMS["layer_norm"], 48, "float32")


@pytest.mark.parametrize("operator", operators(48), ids=lambda operator: operator.label)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_demos_bounds_are_those_of_the_tests_or_somewhat_wider(operator, dtype):
    operands = operator.operands(drawn(dtype))
    tolerances = [errors for _, errors in operator.expected(operands)]
    x, dy, d_residual = (operands.get(name) for name in ("x", "dy", "d_residual"))
    given, options = [operands.get(name) for name in ("weight", "bias")], dict(operator.options)
    if operator.base == "group_norm":
        given = options.pop("num_groups"), *given
        forward = group_bounds.expected_group_forward(x, *given, eps=operator.eps, **options)
        backward = group_bounds.expected_group_backward(dy, x, *given, eps=operator.eps, **options)
    else:
        options |= {"center": "bias" in operands, "eps": operator.eps, "gate": operands.get("gate")}
        if operator.base == "l2_norm":
            options |= {"c": 1.0, "eps": operator.eps / 48}
        exact = operator.forward(reference, operands)()
        forward = bounds.expected_forward(x, *given, operands.get("residual"), **options)
        stream = x if exact.residual is None else exact.residual
        backward = bounds.expected_backward(dy, stream, *given, d_residual, **options)
    more = ("activation", "gate_position", "round_before_weight")
    # With mean 1e4, silu's slope varies within the error of silu's argument. Only the bounds of the
    # tests take the slope's maximum.
    least = 0.85 if operator.label.endswith("mean 1e4") else 0.999
    most = 2.5 if any(options.get(name) for name in more) else 1.001
    assert_near(tolerances, dy, forward, backward, most, least)


def test_a_group_norm_that_rounds_its_mean_fails_the_demo():
    """With rows of integers, whose float32 sums are exact, it would pass: the demo has others."""
    rows, _ = text(256)
    (operator,) = (one for one in operators(256) if one.label.endswith("mean 1e4"))
    operands = operator.operands(row_operands(rows, np.float32))
    exact, errors = next(operator.expected(operands))
    samples, positions, channels = operands["x"].shape
    x = operands["x"].reshape(samples, positions, 32, channels // 32)
    centered = x - x.mean(axis=(1, 3), keepdims=True, dtype=np.float64).astype(np.float32)
    variance = np.square(centered.astype(np.float64)).mean(axis=(1, 3), keepdims=True)
    n = (centered / np.sqrt(variance + operator.eps)).reshape(operands["x"].shape)
    n = n * operands["weight"] + operands["bias"]
    y = (n / (1 + np.exp(-n))).astype(np.float32)
    assert worst_error(y, exact, errors) > 10


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("position", ["pre", "post"])
@pytest.mark.parametrize("center", [False, True])
def test_the_bounds_of_any_gate_are_those_of_the_tests_or_somewhat_wider(
    activation, position, center
):
    operands = drawn("float32")
    del operands["residual"]
    operands["gate"] = np.clip(2 * operands["gate"], -4.0, 4.0)
    names = ("x", "dy", "d_residual", "weight", "bias", "gate")
    x, dy, d_residual, w, b, gate = (operands[name] for name in names)
    options = {"gate_activation": activation, "gate_position": position, "groups": 3}
    options |= {"center": center, "weight_offset": 1.0}
    forward = bounds.expected_forward(x, w, b, gate=gate, eps=1e-5, **options)
    backward = bounds.expected_backward(dy, x, w, b, d_residual, gate=gate, eps=1e-5, **options)
    tolerance = Tolerance(operands, options, 1e-5, forward.exact)
    tolerances = tolerance.forward(), tolerance.backward(dy, d_residual)
    assert_near(tolerances, dy, forward, backward, most=3.0)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_bounds_of_a_group_norm_with_any_activation_are_those_of_the_tests_or_wider(activation):
    operands, options = drawn("float32"), {"eps": 1e-5, "activation": activation}
    x, dy = (operands[name].reshape(4, 12, 48) for name in ("x", "dy"))
    parameters = {name: operands[name] for name in ("weight", "bias")}
    given = x, 3, *parameters.values()
    forward = group_bounds.expected_group_forward(*given, **options)
    backward = group_bounds.expected_group_backward(dy, *given, **options)
    options = {"num_groups": 3, "activation": activation}
    tolerance = Tolerance({"x": x, **parameters}, options, 1e-5, forward.exact)
    tolerances = tolerance.forward(), tolerance.backward(dy)
    assert_near(tolerances, dy, forward, backward, most=2.0)


@pytest.mark.parametrize("width", [16384, 16385])
def test_the_bounds_of_wide_rows_are_those_of_the_tests(width):
    x, dy = (draw(name, (3, width), "float32") for name in ("x", "dy"))
    forward = bounds.expected_forward(x, None, None, center=True, eps=1e-5)
    backward = bounds.expected_backward(dy, x, None, None, center=True, eps=1e-5)
    tolerance = Tolerance({"x": x}, {}, 1e-5, forward.exact)
    tolerances = tolerance.forward(), tolerance.backward(dy)
    assert_near(tolerances, dy, forward, backward, most=1.001)


RIGHT = {"eps": 1e-5, "center": True, "c": 2.0, "weight_offset": 1.0, "gate_activation": "gelu"}
MISTAKES = {
    "eps is twice as large": {"eps": 2e-5},
    "c is 1 part in 100,000 off": {"c": 2.00002},
    "rows keep their mean": {"center": False},
    "there is no offset": {"weight_offset": 0.0},
    "the gate is on the other side": {"gate_position": "pre"},
    "gelu is approximate": {"gate_activation": "gelu_tanh"},
    "y is rounded before weight": {"round_before_weight": True},
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_formula_exceeds_the_tolerance(mistake):
    operands = drawn("bfloat16" if "rounded" in mistake else "float32")
    x, dy, w, b = (operands[name] for name in ("x", "dy", "weight", "bias"))
    gate = {"gate": operands["gate"]}
    right, wrong = (RIGHT | gate | more for more in ({}, MISTAKES[mistake]))

    def results(options):
        f = reference.normalize_forward(x, w, b, **options)
        options = {name: value for name, value in options.items() if name != "eps"}
        return f, reference.normalize_backward(dy, x, w, b, rstd=f.rstd, mean=f.mean, **options)

    def stored(result):
        single = (None if array is None else array.astype(np.float32) for array in result)
        return type(result)(*single)

    operands = {"x": x, "weight": w, "bias": b, **gate}
    tolerance = Tolerance(operands, right, right["eps"], results(right)[0])
    errors = tolerance.forward(), tolerance.backward(dy)
    for exact, off, error in zip(results(right), results(wrong), errors, strict=True):
        assert worst_error(stored(exact), exact, error) <= 1.0
        assert worst_error(stored(off), exact, error) > 1.0


def test_a_missing_or_infinite_result_is_an_infinite_error():
    exact, errors = AddNorm(np.array([[1.0, 2.0]])), {"y": np.array([[1e-6, 1e-6]])}
    for wrong in (np.nan, np.inf, -np.inf):
        assert worst_error(AddNorm(np.float32([[1.0, wrong]])), exact, errors) == np.inf
    assert worst_error(AddNorm(np.float32([[1.0, 2.0]])), exact, errors) == 0.0
    assert worst_error(np.float32([[1.0, 2.0]]), exact, errors) == 0.0
    assert worst_error(AddNorm(), exact, errors) == np.inf
