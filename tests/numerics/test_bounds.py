# SPDX-License-Identifier: MIT
"""Bounds allow for the rounding of a store, but not for arithmetic that loses digits."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cunorm import reference
from cunorm.reference.activations import ACTIVATIONS
from cunorm.results import NormForward
from tests.support.bounds import expected_backward, expected_forward
from tests.support.gate_bounds import gate_error, gate_slope_error
from tests.support.group_bounds import expected_group_backward, expected_group_forward
from tests.support.operands import DTYPES, at, bits, draw, optional
from tests.support.ulps import assert_same_numbers, assert_within, ulp

SHAPE = (6, 256)


def row(dtype="float32", mean=0.0, weight=SHAPE[1:], bias=SHAPE[1:], gate=SHAPE, **options):
    """Return the expected results of both directions of a row norm."""
    x, residual = (draw(n, SHAPE, dtype, mean=mean) for n in ("x", "residual"))
    dy = draw("dy", SHAPE, dtype)
    parameters = [optional(*one, dtype) for one in (("weight", weight), ("bias", bias))]
    given = {"gate": draw("gate", gate, dtype)} if "gate_position" in options else {}
    options = {"eps": 1e-6, **options} | given
    forward = expected_forward(x, *parameters, residual, **options)
    stream = reference.round_to(forward.exact.residual, x.dtype)
    above = {"x_dtype": x.dtype, "branch": x}
    return forward, expected_backward(dy, stream, *parameters, dy, **above, **options)


def group(dtype="float32", mean=0.0, weight=1.0, bias=0.0, samples=((), ()), **options):
    """Return expected results of a group norm; channel 0 has the given weight and bias."""
    x, dy = draw("x", (2, 8, 60), dtype, mean=mean), draw("dy", (2, 8, 60), dtype)
    named = zip(("weight", "bias"), samples, strict=True)
    parameters = [optional(name, (*lead, 60), dtype) for name, lead in named]
    for parameter, value in zip(parameters, (weight, bias), strict=True):
        parameter[..., 0] = value
    options = {"eps": 1e-5, **options}
    forward = expected_group_forward(x, 3, *parameters, **options)
    return forward, expected_group_backward(dy, x, 3, *parameters, **options)


CASES = {
    "layer norm": (row, {"center": True, "mean": 1e4}),
    "gate before": (row, {"gate_position": "pre", "c": 3.0, "groups": 4}),
    "gate after": (row, {"gate_position": "post", "weight_offset": 1.0}),
    "rounded": (row, {"dtype": "bfloat16", "round_before_weight": True}),
    "float64": (row, {"dtype": "float64", "center": True, "gate_position": "pre"}),
    "modulated": (row, {"weight": SHAPE, "bias": (1, 256), "weight_offset": 1.0, "groups": 2}),
    "modulated, rounded": (
        row,
        {"dtype": "bfloat16", "weight": SHAPE, "round_before_weight": True},
    ),
    "gates of rows": (row, {"dtype": "bfloat16", "gate_position": "branch", "gate": (6, 1)}),
    "gates of columns": (row, {"gate_position": "branch", "gate": (256,), "center": True}),
    "gates of elements": (row, {"dtype": "float64", "gate_position": "branch"}),
    "group norm": (group, {"mean": 100.0}),
    "of samples": (group, {"samples": ((2,), (1,))}),
    "activated": (group, {"dtype": "float16", "activation": "gelu"}),
}


@pytest.mark.parametrize(("make", "options"), CASES.values(), ids=CASES)
def test_exact_results_rounded_once_pass_and_an_error_in_any_element_fails(make, options):
    dtype = DTYPES[options.get("dtype", "float32")]
    offset = 0.02 if dtype.itemsize == 2 else 3e-5
    for expected in make(**options):
        present = {n: a for n, a in expected.exact._asdict().items() if a is not None}
        stored = {n: reference.round_to(np.asarray(a, float), dtype) for n, a in present.items()}
        result = expected.exact._replace(**stored)
        assert expected.check(result).keys() == present.keys()
        for name, array in stored.items():
            for index in np.random.default_rng(0).permutation(array.size)[:5]:
                off = array.copy()
                off.flat[index] += dtype.type(offset) * np.max(np.abs(array))
                with at(name), pytest.raises(AssertionError, match=f"^{name}\\["):
                    expected.check(result._replace(**{name: off}))
        absent = result._replace(**dict.fromkeys(present))
        assert expected.check(absent) == {}


def test_a_result_that_does_not_apply_is_refused():
    expected, _ = row()
    with pytest.raises(AssertionError, match="mean does not apply"):
        expected.check(NormForward(mean=np.zeros(SHAPE[0])))


def test_without_the_branch_a_backward_has_no_dgate():
    x, dy, gate = (draw(name, SHAPE, "float32") for name in ("x", "dy", "gate"))
    options = {"eps": 1e-6, "gate": gate, "gate_position": "branch"}
    expected = expected_backward(dy, x, None, None, **options)
    with_branch = expected_backward(dy, x, None, None, branch=x, **options)
    assert expected.exact.dgate is None
    np.testing.assert_array_equal(expected.exact.dx, with_branch.exact.dx)
    bounds = (one.bound("dx", "float32") for one in (expected, with_branch))
    np.testing.assert_array_equal(*bounds)


# --- arithmetic that loses digits -----------------------------------------------------------------


@pytest.mark.parametrize("mistake", ["mean is not corrected", "variance is E[x*x] - E[x]**2"])
def test_bounds_catch_a_mean_and_a_variance_of_few_digits(mistake):
    x = draw("x", SHAPE, "float32", mean=1e4)
    mean = x.mean(axis=-1, keepdims=True)
    q = x - mean
    variance = (q * q).mean(axis=-1, keepdims=True)
    if mistake != "mean is not corrected":
        q = q - q.mean(axis=-1, keepdims=True)
        variance = np.abs((x * x).mean(axis=-1, keepdims=True) - mean * mean)
    y = q / np.sqrt(variance + np.float32(1e-6))
    with pytest.raises(AssertionError, match=r"^y\["):
        expected_forward(x, None, None, eps=1e-6, center=True).check(NormForward(y))


def test_bounds_catch_two_roundings_and_sums_in_a_narrow_dtype():
    low = DTYPES["bfloat16"]
    for make in (row, group):
        forward, backward = make("bfloat16")
        for expected, name in ((forward, "y"), (backward, "dx")):
            twice = getattr(expected.exact, name).astype(np.float16).astype(low)
            with pytest.raises(AssertionError, match="times the bound"):
                expected.check(expected.exact._replace(**{name: twice}))
    dy = draw("dy", (500, 16), "bfloat16")
    added = np.add.accumulate(dy, axis=0)[-1]
    with pytest.raises(AssertionError, match=r"^dbias\["):
        expected = expected_backward(dy, dy, None, added, eps=1e-6)
        expected.check(expected.exact._replace(dx=None, dresidual=None, dbias=added))


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


LOSING = [  # an activation, its "value" or "slope", and a computation that loses digits
    ("sigmoid", "slope", lambda z: sigmoid(z) * (1 - sigmoid(z))),
    ("silu", "slope", lambda z: sigmoid(z) + z * (sigmoid(z) * (1 - sigmoid(z)))),
    ("tanh", "slope", lambda z: 1 - np.tanh(z) ** 2),
    ("gelu", "value", lambda z: z * (1 + np.vectorize(math.erf)(z / 2**0.5).astype(z.dtype)) / 2),
]


@pytest.mark.parametrize(("activation", "function", "compute"), LOSING)
def test_bounds_catch_an_activation_that_loses_its_tail(activation, function, compute):
    z = np.linspace(-8, 8, 2001, dtype=np.float32)
    z64, error = z.astype(np.float64), gate_error if function == "value" else gate_slope_error
    exact, bound = (
        getattr(ACTIVATIONS[activation], function)(z64),
        error(z64, activation, "float32"),
    )
    assert_within(exact.astype(np.float32), exact, bound)
    with pytest.raises(AssertionError, match="times the bound"):
        assert_within(compute(z), exact, bound)


def test_a_stream_may_be_off_by_its_rounding_and_y_is_that_of_this_stream():
    """With gates of 1 + 2**-8, all sums of powers of two lie between two numbers of bfloat16."""
    low = DTYPES["bfloat16"]
    x = (2.0 ** np.random.default_rng(0).integers(-1, 2, SHAPE)).astype(low)
    options = {"gate": np.float32([1 + 2.0**-8]), "gate_activation": "identity", "eps": 1e-6}
    expected = expected_forward(x, None, None, **options, gate_position="branch")
    exact = expected.exact.residual
    below, above, far = ((factor * x).astype(low) for factor in (1, 1 + 2.0**-7, 1 + 2.0**-6))
    mixed = np.where(np.arange(256) % 3 == 0, below, above)
    np.testing.assert_array_equal(exact, (below.astype(float) + above.astype(float)) / 2)
    results = [reference.rms_norm(s).astype(np.float32) for s in (below, mixed)]
    for stream, y, other in ((below, *results), (mixed, *results[::-1])):
        assert expected.check(NormForward(y, stream))["residual"] <= 1.0
        with pytest.raises(AssertionError, match=r"^y\["):
            expected.check(NormForward(other, stream))
    with pytest.raises(AssertionError, match=r"^residual\["):
        expected.check(NormForward(None, np.where(np.arange(256) == 7, far, below)))
    with pytest.raises(AssertionError, match=r"^residual is float32"):
        expected.check(NormForward(None, exact.astype(np.float32)))


# --- the comparison itself ------------------------------------------------------------------------


@pytest.mark.parametrize("name", DTYPES)
def test_ulp_is_the_distance_to_the_next_number(name):
    values = np.concatenate([2.0 ** np.arange(-14, 15), 1.7 * 2.0 ** np.arange(-20, 15), [0.0]])
    values = values.astype(DTYPES[name])
    following = (bits(values) + np.array(1, bits(values).dtype)).view(values.dtype)
    values, following = (array.astype(np.float64) for array in (values, following))
    np.testing.assert_array_equal(ulp(-values, name), following - values)
    assert np.isnan(ulp(np.array([np.inf, np.nan]), name)).all()


@pytest.mark.parametrize(
    ("actual", "expected"),
    [(np.nan, 1.0), (1.0, np.nan), (np.inf, 1.0), (1.0, np.inf), (-np.inf, np.inf), (1e-9, 0.0)],
)
def test_nan_and_infinity_match_only_themselves_and_bounds_of_0_allow_no_error(actual, expected):
    actual, expected = np.array([actual]), np.array([expected])
    for other in (expected, -actual.astype(np.float32)):
        with pytest.raises(AssertionError):
            assert_same_numbers(actual, other, "s")
    with pytest.raises(AssertionError):
        assert_within(actual, expected, np.zeros(1))
    assert assert_within(actual, actual, np.zeros(1)) == 0.0


def test_beyond_the_largest_number_infinity_is_expected():
    bound = np.array([16.0])
    assert_within(np.array([np.inf], np.float16), np.array([65521.0]), bound)
    assert_within(np.array([65504], np.float16), np.array([65519.0]), bound)
    with pytest.raises(AssertionError):
        assert_within(np.array([np.inf], np.float16), np.array([65519.0]), bound)
