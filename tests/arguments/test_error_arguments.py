# SPDX-License-Identifier: MIT
"""Wrong options, and gates that do not fit, are named: function, argument, got and expected."""

from dataclasses import replace
from inspect import signature

import numpy as np
import pytest

import cunorm
from cunorm._arrays import Device
from cunorm._arrays._numpy import Numpy
from cunorm.row_norm import _backward, _forward
from tests.support.calls import BACKWARDS, FORWARDS, WIDTH, backward, forward, given, raises


@pytest.fixture(autouse=True)
def nothing_is_made_or_launched(monkeypatch):
    """Whatever is wrong here is found before."""
    monkeypatch.setattr(Numpy, "allocate", None)
    monkeypatch.setattr(_forward, "run_forward", None)
    monkeypatch.setattr(_backward, "run_backward", None)


def taking(argument):
    """Name the public row norms that have an argument."""
    return [
        name
        for name in (*FORWARDS, *BACKWARDS)
        if argument in signature(getattr(cunorm, name)).parameters
    ]


def call(name, **more):
    """Call any row norm with arrays that go together."""
    if name in BACKWARDS:
        return backward(name, given().dy, given().x, **more)
    return forward(name, given().x, **more)


# --- numbers and flags ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORWARDS)
@pytest.mark.parametrize("eps", [-1e-6, float("nan"), float("inf"), 10**400], ids=str)
def test_eps_that_is_negative_or_not_finite_is_refused(name, eps):
    shown = f"eps is {eps!r}, expected a finite number of at least 0"
    with raises(ValueError, f"{name}: {shown}"):
        forward(name, given().x, eps=eps)


@pytest.mark.parametrize("eps", ["1e-6", None, 1j, True, np.ones(1)], ids=repr)
def test_eps_that_is_no_number_is_refused(eps):
    with raises(TypeError, f"layer_norm: eps is {eps!r}, expected a number"):
        cunorm.layer_norm(given().x, eps=eps)


@pytest.mark.parametrize("c", [float("nan"), float("-inf")])
def test_c_that_is_not_finite_is_refused(c):
    arrays, text = given(), f"c is {c!r}, expected a finite number or None"
    with raises(ValueError, f"normalize: {text}"):
        cunorm.normalize(arrays.x, c=c)
    with raises(ValueError, f"normalize_backward: {text}"):
        cunorm.normalize_backward(arrays.dy, arrays.x, rstd=arrays.rstd, c=c)


def test_c_that_is_no_number_is_refused():
    with raises(TypeError, "normalize: c is 'd', expected a number"):
        cunorm.normalize(given().x, c="d")


@pytest.mark.parametrize("center", [1, None, "yes", np.True_], ids=repr)
def test_center_must_be_a_bool(center):
    arrays, text = given(), f"center is {center!r}, expected True or False"
    with raises(TypeError, f"normalize: {text}"):
        cunorm.normalize(arrays.x, center=center)
    with raises(TypeError, f"normalize_backward: {text}"):
        cunorm.normalize_backward(arrays.dy, arrays.x, rstd=arrays.rstd, center=center)


@pytest.mark.parametrize("name", taking("weight_offset"))
def test_weight_offset_without_weight_is_refused(name):
    with raises(ValueError, f"{name}: weight_offset is 1, expected 0 without a weight"):
        call(name, weight_offset=1)


@pytest.mark.parametrize("name", taking("weight_offset"))
@pytest.mark.parametrize("offset", [float("nan"), float("-inf"), 10**400], ids=str)
def test_weight_offset_that_is_not_finite_is_refused(name, offset):
    text = f"weight_offset is {offset!r}, expected a finite number"
    for weight in (given().weight, None):
        with raises(ValueError, f"{name}: {text}"):
            call(name, weight=weight, weight_offset=offset)


@pytest.mark.parametrize("name", taking("weight_offset"))
@pytest.mark.parametrize("offset", ["1", None, 1j, True, np.ones(1)], ids=repr)
def test_weight_offset_that_is_no_number_is_refused(name, offset):
    with raises(TypeError, f"{name}: weight_offset is {offset!r}, expected a number"):
        call(name, weight=given().weight, weight_offset=offset)


@pytest.mark.parametrize("name", taking("round_before_weight"))
@pytest.mark.parametrize("flag", [1, 0, None, "yes", np.True_, []], ids=repr)
def test_round_before_weight_must_be_a_bool(name, flag):
    with raises(TypeError, f"{name}: round_before_weight is {flag!r}, expected True or False"):
        call(name, round_before_weight=flag)


# --- groups ---------------------------------------------------------------------------------------


def sized(**more):
    return cunorm.workspace_size("rms_norm_backward", given().x, given().weight, **more)


GROUPED = taking("groups")


@pytest.mark.parametrize("groups", [0, -1, -8, 3, 16, 10**30])
@pytest.mark.parametrize("name", [*GROUPED, "workspace_size"])
def test_groups_that_do_not_divide_the_row_are_refused(name, groups):
    text = f"groups is {groups}, expected a divisor of 8, the width of a row"
    with raises(ValueError, f"{name}: {text}"):
        call(name, groups=groups) if name in GROUPED else sized(groups=groups)


@pytest.mark.parametrize("groups", [True, False, 2.0, None, "2", [2], np.True_], ids=repr)
@pytest.mark.parametrize("name", [*GROUPED, "workspace_size"])
def test_groups_that_are_no_int_are_refused(name, groups):
    with raises(TypeError, f"{name}: groups is {groups!r}, expected an int"):
        call(name, groups=groups) if name in GROUPED else sized(groups=groups)


@pytest.mark.parametrize("axis", [0, -2])
@pytest.mark.parametrize("name", [*GROUPED, "workspace_size"])
def test_groups_with_an_axis_before_the_last_are_refused(name, axis):
    text = f"groups is 2 and axis is {axis}, expected axis -1 with groups"
    with raises(ValueError, f"{name}: {text}"):
        call(name, groups=2, axis=axis) if name in GROUPED else sized(groups=2, axis=axis)


def test_a_last_axis_of_one_element_before_it_is_still_not_the_last():
    """Rows of the same memory, and yet the weight has another shape."""
    x = given().x[..., None]
    text = "groups is 2 and axis is 1, expected axis -1 with groups"
    with raises(ValueError, f"rms_norm: {text}"):
        cunorm.rms_norm(x, groups=2, axis=1)


# --- gates ----------------------------------------------------------------------------------------

ACTIVATIONS = (
    "expected 'identity', 'sigmoid', 'silu', 'swish', 'tanh', 'relu', 'gelu' or 'gelu_tanh'"
)
POSITIONS = "expected 'pre' or 'post'"


def gated():
    """Give no gate and one: what is said of it is looked at in any case."""
    return ({}, {"gate": given().gate})


@pytest.mark.parametrize("name", taking("gate_activation"))
@pytest.mark.parametrize("activation", ["relu6", "SiLU", "silu ", ""])
def test_an_unknown_gate_activation_is_refused(name, activation):
    for gate in gated():
        with raises(ValueError, f"{name}: gate_activation is {activation!r}, {ACTIVATIONS}"):
            call(name, gate_activation=activation, **gate)


@pytest.mark.parametrize("name", taking("gate_activation"))
@pytest.mark.parametrize("activation", [None, 1, b"silu", ["silu"], np.tanh], ids=repr)
def test_a_gate_activation_that_is_no_name_is_refused(name, activation):
    for gate in gated():
        with raises(TypeError, f"{name}: gate_activation is {activation!r}, {ACTIVATIONS}"):
            call(name, gate_activation=activation, **gate)


@pytest.mark.parametrize("name", taking("gate_position"))
@pytest.mark.parametrize("position", ["before", "Pre", ""])
def test_an_unknown_gate_position_is_refused(name, position):
    for gate in gated():
        with raises(ValueError, f"{name}: gate_position is {position!r}, {POSITIONS}"):
            call(name, gate_position=position, **gate)


@pytest.mark.parametrize("name", taking("gate_position"))
@pytest.mark.parametrize("position", [None, 0, True, ("pre",), {"pre"}], ids=repr)
def test_a_gate_position_that_is_no_name_is_refused(name, position):
    for gate in gated():
        with raises(TypeError, f"{name}: gate_position is {position!r}, {POSITIONS}"):
            call(name, gate_position=position, **gate)


@pytest.mark.parametrize("name", taking("gate"))
@pytest.mark.parametrize(
    "shape", [(5, 7), (5, 1), (WIDTH,), (1, WIDTH), (), (5, WIDTH, 1)], ids=str
)
def test_a_gate_must_have_xs_shape(name, shape):
    with raises(ValueError, f"{name}: gate has shape {shape}, expected (5, 8), the shape of x"):
        call(name, gate=np.ones(shape, np.float32))


@pytest.mark.parametrize("name", taking("gate"))
@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64"])
def test_a_gate_must_be_of_the_four_dtypes(name, dtype):
    text = f"gate has dtype {dtype}, expected float16, bfloat16, float32 or float64"
    with raises(TypeError, f"{name}: {text}"):
        call(name, gate=np.ones((5, WIDTH), dtype))


@pytest.mark.parametrize("name", taking("gate"))
def test_a_gate_must_be_on_xs_device(name, monkeypatch):
    describe = Numpy.describe

    def elsewhere(numpy, function, argument, array):
        operand = describe(numpy, function, argument, array)
        if argument != "gate":
            return operand
        return replace(operand, form=operand.form._replace(device=Device("cuda", 1)))

    monkeypatch.setattr(Numpy, "describe", elsewhere)
    with raises(ValueError, f"{name}: gate is on cuda:1, expected cpu, the device of x"):
        call(name, gate=given().gate)


# --- needs ----------------------------------------------------------------------------------------

NEEDS = "expected a tuple of 'x', 'weight', 'bias', 'gate'"


@pytest.mark.parametrize("name", [name for name in BACKWARDS if name != "l2_norm_backward"])
@pytest.mark.parametrize("needs", [("x", "y"), ["dx"], ("",), ({},), (np.array(["x"]),)], ids=str)
def test_an_unknown_name_in_needs_is_refused(name, needs):
    with raises(ValueError, f"{name}: needs is {needs!r}, {NEEDS}"):
        backward(name, given().dy, given().x, needs=needs)


@pytest.mark.parametrize(
    "needs", ["x", None, 1, iter(("x",)), np.array("x")], ids=lambda n: type(n).__name__
)
def test_needs_that_is_no_collection_of_names_is_refused(needs):
    """One string would be taken letter by letter, and an iterator be empty at its second use."""
    with raises(TypeError, f"rms_norm_backward: needs is {needs!r}, {NEEDS}"):
        backward("rms_norm_backward", given().dy, given().x, needs=needs)
