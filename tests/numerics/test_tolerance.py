# SPDX-License-Identifier: MIT
"""The bounds in `cunorm.reference.tolerance`, by which the demo and the bench judge results."""

from itertools import product

import numpy as np
import pytest

from cunorm import reference
from cunorm.reference.activations import ACTIVATIONS
from cunorm.reference.tolerance import Tolerance, bound, exact_of_stream, worst_error
from cunorm.results import AddNorm
from tests.support import bounds, group_bounds
from tests.support.internals import operators, row_operands, text
from tests.support.operands import DTYPES, NORMS, draw, optional, parameters

TINY = 1e-30  # larger than the error of any underflow


def drawn(dtype="float32", shape=(48, 48), gate=None, **parameter_shapes):
    rows = ("x", "residual", "dy", "d_residual")
    operands = {name: draw(name, shape, dtype) for name in rows}
    operands["gate"] = draw("gate", gate or shape, dtype)
    operands |= parameters(NORMS["layer_norm"], shape[-1], "float32")
    return operands | {n: optional(n, s, "float32") for n, s in parameter_shapes.items()}


def bounds_of_the_tests(operands, options, eps):
    """Return the bounds of both directions."""
    x, dy, w, b = (operands.get(name) for name in ("x", "dy", "weight", "bias"))
    options = {"eps": eps, **options}
    if groups := options.pop("num_groups", None):
        forward = group_bounds.expected_group_forward(x, groups, w, b, **options)
        return forward, group_bounds.expected_group_backward(dy, x, groups, w, b, **options)
    options = {"center": b is not None, "gate": operands.get("gate"), **options}
    forward = bounds.expected_forward(x, w, b, operands.get("residual"), **options)
    stream = x if forward.exact.residual is None else forward.exact.residual
    options |= {"branch": x, "d_residual": operands.get("d_residual")}
    return forward, bounds.expected_backward(dy, stream.astype(x.dtype), w, b, **options)


def assert_near(tolerances, expected, dtype, most, least=0.999):
    """Check that the demo's bounds are `least` to `most` times those of the tests."""
    for of_tests, errors in zip(expected, tolerances, strict=True):
        fields = {n: e for n, e in of_tests.exact._asdict().items() if e is not None}
        for name in fields.keys() & of_tests.errors.keys():
            stored = "float32" if name in ("mean", "rstd", "dweight", "dbias") else dtype
            ours = bound(fields[name], errors[name], stored)
            ratio = (ours + TINY) / (of_tests.bound(name, stored) + TINY)
            assert least < ratio.min() <= ratio.max() < most, name


OF_FLOATS = [operator for operator in operators(48) if not operator.needs_float8]


@pytest.mark.parametrize("operator", OF_FLOATS, ids=lambda operator: operator.label)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_demos_bounds_are_those_of_the_tests_or_somewhat_wider(operator, dtype):
    operands, options, eps = operator.operands(drawn(dtype)), operator.options, operator.eps
    if operator.base == "l2_norm":
        options, eps = {"c": 1.0}, eps / 48
    more = ("activation", "gate_position", "round_before_weight")
    # With mean 1e4, silu's slope varies within the error of silu's argument. Only the bounds of the
    # tests take the slope's maximum.
    least = 0.85 if operator.label.endswith("mean 1e4") else 0.999
    most = 2.5 if any(options.get(name) for name in more) else 1.001
    expected = bounds_of_the_tests(operands, options, eps)
    stream = None
    if operator.is_gated_branch:
        stream = reference.round_to(expected[0].exact.residual, operands["x"].dtype)
    tolerances = [errors for _, errors in operator.expected(operands, stream)]
    assert_near(tolerances, expected, dtype, most, least)


GATES = product(ACTIVATIONS, ("pre", "post"), (False, True))
NAMES = ("gate_activation", "gate_position", "center")
SHAPE = (6, 8, 48)
OF_ROWS = [(48,), (1, 48), (6, 1, 48), (8, 48), SHAPE]
ANY_GATE = [dict(zip(NAMES, one, strict=True), groups=3, weight_offset=1.0) for one in GATES]
WIDE = [({"center": True}, (3, width), 1.001) for width in (16384, 16385)]


def assert_tolerance_near(options, operands, dtype="float32", most=1.001):
    """Check the bounds of both directions, for the exact stream of a gate on the branch."""
    forward, backward = bounds_of_the_tests(operands, options, eps=1e-5)
    stream = None
    if options.get("gate_position") == "branch":
        stream = reference.round_to(forward.exact.residual, operands["x"].dtype)
    tolerance = Tolerance(operands, options, 1e-5, forward.exact, stream)
    tolerances = tolerance.forward(), tolerance.backward(operands["dy"], operands.get("d_residual"))
    assert_near(tolerances, (forward, backward), dtype, most)


@pytest.mark.parametrize(
    ("options", "shape", "most"),
    [
        *((gate, (48, 48), 3.0) for gate in ANY_GATE),
        *(({"num_groups": 3, "activation": one}, (4, 12, 48), 2.0) for one in ACTIVATIONS),
        *WIDE,
    ],
)
def test_bounds_with_any_activation_and_of_wide_rows_are_those_of_the_tests_or_wider(
    options, shape, most
):
    operands = drawn(shape=shape)
    del operands["residual"]
    if "gate_position" in options:
        operands["gate"] = np.clip(2 * operands["gate"], -4.0, 4.0)
    else:
        del operands["gate"], operands["d_residual"]
    assert_tolerance_near(options, operands, most=most)


@pytest.mark.parametrize("weight", OF_ROWS)
@pytest.mark.parametrize("bias", OF_ROWS[1:4])
def test_bounds_of_modulated_norms_are_those_of_the_tests(weight, bias):
    operands = drawn(shape=SHAPE, weight=weight, bias=bias)
    del operands["gate"]
    assert_tolerance_near({"center": True, "groups": 3, "c": 2.0}, operands)
    del operands["residual"], operands["d_residual"]
    assert_tolerance_near({"center": True, "axis": -1, "weight_offset": 1.0}, operands)


@pytest.mark.parametrize("gate", [*OF_ROWS, (6, 1, 1), (8, 1), (1,)])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_bounds_of_a_gate_on_the_branch_are_those_of_the_tests_or_wider(activation, gate):
    options = {"gate_position": "branch", "gate_activation": activation, "center": True}
    for dtype in ("float32", "bfloat16"):
        operands = drawn(dtype, SHAPE, gate=gate, weight=(6, 1, 48))
        operands["gate"] = np.clip(operands["gate"], -2.0, 2.0)
        assert_tolerance_near(options, operands, dtype, most=3.0)
        del operands["residual"], operands["d_residual"]
        assert_tolerance_near(options | {"groups": 3}, operands, dtype, most=3.0)


def test_a_stream_may_be_rounded_to_either_side_and_y_is_that_of_this_stream():
    """With gates of 1 + 2**-8, all sums of powers of two lie between two numbers of bfloat16."""
    low, gate = DTYPES["bfloat16"], {"gate_activation": "identity", "gate_position": "branch"}
    x = (2.0 ** np.random.default_rng(0).integers(-1, 2, SHAPE)).astype(low)
    operands = {"x": x, "gate": np.float32([1 + 2.0**-8])}
    below, above, far = ((factor * x).astype(low) for factor in (1, 1 + 2.0**-7, 1 + 2.0**-6))
    mixed = np.where(np.arange(48) % 3 == 0, below, above)

    def forward(operands):
        return reference.normalize_forward(**operands, **gate)

    def worst(stream, normed):
        exact = exact_of_stream(forward, operands, "identity", stream)
        errors = Tolerance(operands, gate, 1e-6, exact, stream).forward()
        y = reference.rms_norm(normed).astype(np.float32)
        return worst_error(AddNorm(y, stream), exact, errors)

    assert worst(below, below) <= 1.0 and worst(mixed, mixed) <= 1.0
    assert worst(mixed, below) > 1.0
    assert worst(far, far) > 1.0


@pytest.mark.parametrize("channel_axis", [-1, 1, -2, 2])
@pytest.mark.parametrize(("weight", "bias"), [((6, 48), (1, 48)), ((48,), (6, 48))])
def test_bounds_of_group_norms_with_parameters_of_samples_are_those_of_the_tests(
    weight, bias, channel_axis
):
    shape = SHAPE if channel_axis in (-1, 2) else (6, 48, 8)
    operands = drawn(shape=shape, weight=weight, bias=bias)
    operands = {name: operands[name] for name in ("x", "dy", "weight", "bias")}
    assert_tolerance_near({"num_groups": 3, "channel_axis": channel_axis}, operands)


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
    x, dy, w, b, gate = (operands[name] for name in ("x", "dy", "weight", "bias", "gate"))

    def results(options):
        f = reference.normalize_forward(x, w, b, gate=gate, **options)
        options = {name: value for name, value in options.items() if name != "eps"}
        saved = {"rstd": f.rstd, "mean": f.mean}
        return f, reference.normalize_backward(dy, x, w, b, gate=gate, **saved, **options)

    def stored(result):
        single = (None if array is None else array.astype(np.float32) for array in result)
        return type(result)(*single)

    operands = {"x": x, "weight": w, "bias": b, "gate": gate}
    right, wrong = results(RIGHT), results(RIGHT | MISTAKES[mistake])
    tolerance = Tolerance(operands, RIGHT, RIGHT["eps"], right[0])
    errors = tolerance.forward(), tolerance.backward(dy)
    for exact, off, error in zip(right, wrong, errors, strict=True):
        assert (
            worst_error(stored(exact), exact, error) <= 1.0 < worst_error(stored(off), exact, error)
        )


def test_a_missing_or_infinite_result_is_an_infinite_error():
    exact, errors = AddNorm(np.array([[1.0, 2.0]])), {"y": np.array([[1e-6, 1e-6]])}
    for wrong in (np.nan, np.inf, -np.inf):
        assert worst_error(AddNorm(np.float32([[1.0, wrong]])), exact, errors) == np.inf
    for right in (AddNorm(np.float32([[1.0, 2.0]])), np.float32([[1.0, 2.0]])):
        assert worst_error(right, exact, errors) == 0.0
    assert worst_error(AddNorm(), exact, errors) == np.inf
