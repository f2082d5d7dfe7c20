# SPDX-License-Identifier: MIT
"""The bounds of group norms hold for arithmetic done well and fail for each way of doing it wrong.

The kernels here are those of `group_arithmetic`.
"""

from __future__ import annotations

import numpy as np
import pytest

from cunorm.reference.activations import ACTIVATIONS
from tests.support.group_arithmetic import group_backward, group_forward
from tests.support.group_bounds import (
    check_group_backward,
    check_group_forward,
    curvature,
    slope_change,
)
from tests.support.operands import DTYPES, at

SMOOTH = [name for name in ACTIVATIONS if name != "relu"]


def a_case(dtype="float32", shape=(4, 10, 6, 8), groups=2, *, mean=0.0, spread=1.0, seed=0, **told):
    """Return operands by name, and what forward and backward are told; n spreads as told."""
    rng = np.random.default_rng(seed)
    channels = shape[told.get("channel_axis", -1)]
    case = {name: rng.standard_normal(shape) for name in ("x", "dy")}
    case["x"] = case["x"] + mean
    case |= {name: spread * (0.5 + rng.standard_normal(channels)) for name in ("weight", "bias")}
    case = {name: values.astype(DTYPES[dtype]) for name, values in case.items()}
    return case | {"groups": groups, "told": {"eps": 1e-5, **told}}


def run_forward(case, wrong=""):
    operands = [case[name] for name in ("x", "groups", "weight", "bias")]
    return group_forward(*operands, **case["told"], wrong=wrong)


def run_backward(case, wrong=""):
    """Run the backward on the statistics of a forward done well."""
    f = run_forward(case)
    operands = [case[name] for name in ("dy", "x", "groups", "weight", "bias")]
    told = {name: value for name, value in case["told"].items() if name != "eps"}
    return group_backward(*operands, mean=f.mean, rstd=f.rstd, **told, wrong=wrong)


def check_forward(result, case):
    operands = [case[name] for name in ("x", "groups", "weight", "bias")]
    return check_group_forward(result, *operands, **case["told"])


def check_backward(grads, case):
    operands = [case[name] for name in ("dy", "x", "groups", "weight", "bias")]
    return check_group_backward(grads, *operands, **case["told"])


def check_both(case):
    return check_forward(run_forward(case), case) | check_backward(run_backward(case), case)


# --- kernels done well ----------------------------------------------------------------------------


def draw_case(seed):
    """Draw everything there is to choose, and the operands."""
    rng = np.random.default_rng(seed)
    dtype = str(rng.choice([*DTYPES, "float32", "float32"]))
    far = DTYPES[dtype].itemsize >= 4 and rng.random() < 0.6
    groups, channel_axis = int(rng.choice([1, 2, 3, 4])), int(rng.choice([-1, 1]))
    channels, samples = groups * int(rng.choice([1, 2, 3, 8])), int(rng.choice([1, 2, 5]))
    positions = [int(size) for size in rng.choice([1, 2, 3, 7, 31], rng.integers(3))]
    shape = [samples, *positions]
    shape.insert(1 if channel_axis == 1 else len(shape), channels)
    case = a_case(
        dtype,
        tuple(shape),
        groups,
        mean=float(rng.choice([1.0, 100.0, 1e4])) if far else 0.0,
        seed=seed,
        activation=[None, *ACTIVATIONS][rng.integers(len(ACTIVATIONS) + 1)],
        channel_axis=channel_axis,
        eps=float(rng.choice([1e-5, 1e-3])),
    )
    absent = [name for name in ("weight", "bias") if rng.random() < 0.3]
    return case | dict.fromkeys(absent)


@pytest.mark.parametrize("first", range(0, 800, 100))
def test_a_good_kernel_is_within_the_bounds(first):
    for seed in range(first, first + 100):
        case = draw_case(seed)
        with at(f"seed {seed}"):
            worst = check_both(case)
        expected = {"y", "mean", "rstd", "dx"}
        expected |= {f"d{name}" for name in ("weight", "bias") if case[name] is not None}
        assert set(worst) == expected


@pytest.mark.parametrize("mean", [0.0, 1e4])
@pytest.mark.parametrize("activation", [None, "relu", "silu", "gelu"])
@pytest.mark.parametrize("shape", [(2, 64, 64, 8), (8, 1, 20000), (3, 1000, 33)], ids=str)
def test_a_good_kernel_of_wide_groups_is_within_the_bounds(shape, activation, mean):
    check_both(a_case("float32", shape, 1, mean=mean, activation=activation))


def test_a_good_kernel_may_take_all_of_a_narrow_group_over_the_corner_of_relu():
    for seed in range(4):
        check_both(a_case("float32", (3000, 3, 4), mean=1e6, activation="relu", seed=seed))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("value", [1 / 3, 1e4 + 0.1])
def test_a_good_kernel_of_constant_groups_is_within_the_bounds(value, activation):
    case = a_case(activation=activation)
    case["x"][:2] = value
    check_both(case)


# --- and done wrong -------------------------------------------------------------------------------

SILU = {"activation": "silu"}
NARROW = {"dtype": "bfloat16"}
FAR = {"mean": 1e4}
WRONG_FORWARD = [
    ("mean is not corrected", FAR),
    ("mean is not corrected", FAR | SILU),
    ("variance is E[x*x] - E[x]**2", {"mean": 100.0}),
    ("variance divides by one less", {}),
    ("variance divides by one less", SILU),
    ("no eps", {}),
    ("rstd has half its bits", {}),
    ("groups have the next one's sums", {}),
    ("groups have the next one's sums", SILU | NARROW),
    ("samples share their sums", {}),
    ("channels of a group are apart", {}),
    ("channels of a group are apart", {"channel_axis": 1}),
    ("channels have the first one's weight", SILU),
    ("no activation", SILU),
    ("no activation", {"activation": "relu"}),
    ("activation is another", SILU),
    ("gelu is from 1 + erf", {"activation": "gelu", "spread": 3.0}),
    ("gelu_tanh lacks its cube", {"activation": "gelu_tanh"}),
    ("n is rounded before phi", SILU | NARROW),
    ("rounded twice", NARROW),
    ("cut off instead of rounded", NARROW),
    ("cut off instead of rounded", SILU | NARROW),
]
WRONG_BACKWARD = [
    ("mean is not corrected", FAR),
    ("mean is not corrected", FAR | {"shape": (2, 3, 4)}),
    ("sums are about 0", FAR),
    ("sums are about 0", {"mean": 300.0} | SILU),
    ("no a", {}),
    ("no a", SILU),
    ("no b", {}),
    ("no b", SILU),
    ("a and b lack weight", {}),
    ("sums divide by D", {}),
    ("groups have the next one's sums", SILU),
    ("samples share their sums", {}),
    ("channels of a group are apart", {}),
    ("channels have the first one's weight", SILU),
    ("no activation", SILU),
    ("no activation", {"activation": "relu"}),
    ("phi' is that of xhat", SILU),
    ("phi' is that of xhat", {"activation": "relu"}),
    ("phi' is that of y", SILU),
    ("phi' is that of y", {"activation": "tanh"}),
    ("g' lacks a term", SILU),
    ("g' lacks a term", {"activation": "gelu"}),
    ("g' lacks a term", SILU | FAR),
    ("phi' has the mean off by an ulp", SILU | FAR),
    ("phi' has the mean off by an ulp", SILU | {"mean": 100.0}),
    ("phi' has the mean off by an ulp", {"activation": "relu", "mean": 1e5}),
    ("tanh' is 1 - tanh**2", {"activation": "tanh", "spread": 5.0}),
    ("gelu_tanh lacks its cube", {"activation": "gelu_tanh"}),
    ("sums miss a sample", SILU | NARROW),
    ("sums miss a position", SILU | NARROW),
    ("sums are kept in the parameter's dtype", NARROW),
    ("rounded twice", NARROW),
    ("cut off instead of rounded", NARROW),
    ("cut off instead of rounded", SILU | NARROW),
]


def label(value):
    if isinstance(value, str):
        return value
    return "+".join(str(v) for v in value.values()) or "plain"


@pytest.mark.parametrize(("wrong", "told"), WRONG_FORWARD, ids=label)
def test_bounds_catch_a_forward_where(wrong, told):
    case = a_case(**told)
    check_forward(run_forward(case), case)
    with pytest.raises(AssertionError):
        check_forward(run_forward(case, wrong), case)


@pytest.mark.parametrize(("wrong", "told"), WRONG_BACKWARD, ids=label)
def test_bounds_catch_a_backward_where(wrong, told):
    case = a_case(**told)
    check_backward(run_backward(case), case)
    with pytest.raises(AssertionError):
        check_backward(run_backward(case, wrong), case)


FIELDS = ["y", "mean", "rstd", "dx", "dweight", "dbias"]


@pytest.mark.parametrize("told", [{}, SILU, NARROW, {"channel_axis": 1}], ids=label)
@pytest.mark.parametrize("name", FIELDS)
def test_bounds_catch_an_error_in_any_element_of(name, told):
    case = a_case(shape=(2, 8, 6, 8), **told)
    is_forward = name in ("y", "mean", "rstd")
    result = run_forward(case) if is_forward else run_backward(case)
    check = check_forward if is_forward else check_backward
    check(result, case)
    exact = getattr(result, name).astype(np.float64)
    for index in np.random.default_rng(0).permutation(exact.size)[:20]:
        off = exact.copy()
        off.flat[index] += 1e-2 * np.abs(exact).max()
        with pytest.raises(AssertionError, match=f"^{name}\\["):
            check(result._replace(**{name: off}), case)


def test_a_result_that_does_not_apply_is_refused_and_one_that_is_none_is_not_looked_at():
    case = a_case()
    f, grads = run_forward(case), run_backward(case)
    assert check_forward(f._replace(y=None), case).keys() == {"mean", "rstd"}
    assert check_backward(grads._replace(dx=None), case).keys() == {"dweight", "dbias"}
    for name in ("weight", "bias"):
        with pytest.raises(AssertionError, match=f"d{name} does not apply"):
            check_backward(grads, case | {name: None})


def test_each_group_of_each_sample_is_held_to_its_own_size():
    case = a_case(shape=(2, 10, 8))
    for name in ("weight", "bias"):
        case[name][:4] *= np.float32(1e-4)
    case["dy"][0] *= np.float32(1e-4)
    f, grads = run_forward(case), run_backward(case)
    y, dx = f.y.copy(), grads.dx.copy()
    y[0, 0, 0] += np.float32(1e-6)  # little in the other group
    with pytest.raises(AssertionError, match=r"^y\[0, 0, 0\].*1 of 160"):
        check_forward(f._replace(y=y), case)
    dx[0, 0, 7] += np.float32(1e-7)  # little in the other sample
    with pytest.raises(AssertionError, match=r"^dx\[0, 0, 7\].*1 of 160"):
        check_backward(grads._replace(dx=dx), case)


# --- activations ----------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", SMOOTH)
def test_curvature_is_the_derivative_of_the_slope(activation):
    z, h = np.linspace(-12, 12, 2001), 1e-3
    at = [ACTIVATIONS[activation].slope(z + step * h) for step in (1, -1, 2, -2)]
    quotient = (8 * (at[0] - at[1]) - (at[2] - at[3])) / (12 * h)
    np.testing.assert_allclose(curvature(z, activation), quotient, rtol=1e-7, atol=1e-12)
    with np.errstate(all="raise", under="ignore"):
        far = curvature(np.array([-1e30, -1e3, 1e3, 1e30]), activation)
    np.testing.assert_array_equal(far, np.zeros(4))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("error", [1e-6, 1e-3, 0.1])
def test_slope_change_is_what_the_slope_changes_by_and_little_more(error, activation):
    z = np.linspace(-6, 6, 4001)
    slope = ACTIVATIONS[activation].slope
    changes = [np.abs(slope(z + step * error) - slope(z)) for step in np.linspace(-1, 1, 41)]
    bound = slope_change(z, np.full(z.shape, error), activation)
    change = np.maximum.reduce(changes)
    assert (change <= bound * (1 + 1e-3) + 1e-15).all()
    assert (bound <= change * (1 + 30 * error) + 20 * error**2 + 1e-15).all()


def test_a_channel_of_zeros_has_no_slope_of_relu():
    case = a_case(activation="relu")
    for name in ("weight", "bias"):
        case[name][3] = 0.0
    grads = run_backward(case)
    check_backward(grads, case)
    assert grads.dbias[3] == 0
    with pytest.raises(AssertionError, match=r"^dweight\[3\]"):
        check_backward(run_backward(case, "relu' is 1 at 0"), case)


@pytest.mark.parametrize("activation", ["sigmoid", "silu", "gelu", "gelu_tanh"])
def test_where_phi_is_flat_the_bound_of_y_is_small(activation):
    case = a_case(activation=activation)
    case["bias"][0] = -25.0  # in the tail; for gelu, beyond the smallest numbers
    f = run_forward(case)
    check_forward(f, case)
    f.y[..., 0] += np.float32(1e-8)  # of max(abs(n)), far less than an ulp
    with pytest.raises(AssertionError, match=r"^y\[., ., ., 0\]"):
        check_forward(f, case)
