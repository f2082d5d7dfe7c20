# SPDX-License-Identifier: MIT
"""Wrong input of group norms is named, before anything is made, launched or written.

Each message says the function, the argument, what it got and what it expected. What is wrong with
arrays of any operator is in test_arrays*.py, `out=` in test_group_norm_outputs.py.
"""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import cunorm
from cunorm._arrays import Device
from cunorm._arrays._jax import Jax
from cunorm._arrays._numpy import Numpy
from cunorm._arrays._torch import Torch
from cunorm.group_norm import _backward, _forward
from tests.support.calls import raises
from tests.support.operands import draw

FORWARDS = ["group_norm", "instance_norm", "group_norm_forward"]
BACKWARD = "group_norm_backward"
GROUPED = ["group_norm", "group_norm_forward", BACKWARD]
SHAPE = (3, 5, 8)

names = pytest.mark.parametrize("name", [*FORWARDS, BACKWARD])


@pytest.fixture(autouse=True)
def nothing_is_made_or_launched(monkeypatch):
    """Whatever is wrong here is found before."""
    for framework in (Numpy, Torch, Jax):
        monkeypatch.setattr(framework, "allocate", None)
        monkeypatch.setattr(framework, "allocate_like", None)
        monkeypatch.setattr(framework, "contiguous", None)
    for module in (_forward, _backward):
        monkeypatch.setattr(module, "run", None)


def given(name, **more):
    """Return arguments of a function that go together, but for what is given."""
    told = {"x": draw("x", SHAPE, "float32")}
    told |= {other: draw(other, 8, "float32") for other in ("weight", "bias")}
    if name != "instance_norm":
        told["num_groups"] = 2
    if name == BACKWARD:
        told["dy"] = draw("dy", SHAPE, "float32")
        told |= {other: draw(other, (3, 2), "float32") for other in ("mean", "rstd")}
    return told | more


def call(name, **more):
    return getattr(cunorm, name)(**given(name, **more))


# --- axes and groups ------------------------------------------------------------------------------


@names
@pytest.mark.parametrize("shape", [(), (8,)], ids=str)
def test_x_of_less_than_two_axes_is_refused(name, shape):
    text = f"x has shape {shape}, expected at least two axes: samples and channels"
    with raises(ValueError, f"{name}: {text}"):
        call(name, x=np.ones(shape, np.float32))


@names
@pytest.mark.parametrize("axis", [0, 2, -2, -3, 10**30])
def test_a_channel_axis_that_is_neither_last_nor_second_is_refused(name, axis):
    with raises(ValueError, f"{name}: channel_axis is {axis}, expected -1 or 1"):
        call(name, channel_axis=axis)


@names
@pytest.mark.parametrize("axis", [1.0, None, (1,), True, "last"], ids=repr)
def test_a_channel_axis_that_is_no_int_is_refused(name, axis):
    with raises(TypeError, f"{name}: channel_axis is {axis!r}, expected an int"):
        call(name, channel_axis=axis)


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("groups", [0, -1, -8, 3, 16, 10**30])
def test_groups_that_do_not_divide_the_channels_are_refused(name, groups):
    expected = "expected a divisor of 8, the number of channels"
    with raises(ValueError, f"{name}: num_groups is {groups}, {expected}"):
        call(name, num_groups=groups)


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("groups", [True, False, 2.0, "2", [2], np.True_, None], ids=repr)
def test_groups_that_are_no_int_are_refused(name, groups):
    """None too: only the instance norm has as many as channels without being told."""
    with raises(TypeError, f"{name}: num_groups is {groups!r}, expected an int"):
        call(name, num_groups=groups)


@names
@pytest.mark.parametrize(
    ("shape", "axis", "channels", "positions"),
    [
        ((3, 5, 0), -1, 0, 5),
        ((3, 0), -1, 0, 1),
        ((3, 0, 5), 1, 0, 5),
        ((3, 0, 8), -1, 8, 0),
        ((3, 8, 4, 0), 1, 8, 0),
        ((0, 0, 8), -1, 8, 0),
    ],
)
def test_no_channels_or_no_positions_are_refused(name, shape, axis, channels, positions):
    expected = "expected 1 to 2147483647 channels of at least one position"
    got = f"{channels} channels (channel_axis {axis}) of {positions} positions"
    with raises(ValueError, f"{name}: x has shape {shape}: {got}, {expected}"):
        call(name, x=np.empty(shape, np.float32), channel_axis=axis)


def test_2_to_the_31_channels_are_refused():
    x = np.broadcast_to(np.float16(1), (2, 2**31))
    with pytest.raises(ValueError, match=r"^group_norm: x has shape .+: 2147483648 channels"):
        cunorm.group_norm(x, 1)


# --- numbers and names ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORWARDS)
@pytest.mark.parametrize("eps", [-1e-6, float("nan"), float("inf"), 10**400, "1", True], ids=str)
def test_eps_other_than_a_finite_number_of_at_least_0_is_refused(name, eps):
    is_number = type(eps) in (int, float)
    expected = "a finite number of at least 0" if is_number else "a number"
    with raises(
        ValueError if is_number else TypeError, f"{name}: eps is {eps!r}, expected {expected}"
    ):
        call(name, eps=eps)


ACTIVATIONS = (
    "expected 'identity', 'sigmoid', 'silu', 'swish', 'tanh', 'relu', 'gelu' or 'gelu_tanh'"
)


@names
@pytest.mark.parametrize("activation", ["relu6", "SiLU", "silu ", ""])
def test_an_unknown_activation_is_refused(name, activation):
    with raises(ValueError, f"{name}: activation is {activation!r}, {ACTIVATIONS}"):
        call(name, activation=activation)


@names
@pytest.mark.parametrize("activation", [1, b"silu", ["silu"], False, np.tanh], ids=repr)
def test_an_activation_that_is_no_name_is_refused(name, activation):
    with raises(TypeError, f"{name}: activation is {activation!r}, {ACTIVATIONS}"):
        call(name, activation=activation)


@pytest.mark.parametrize("needs", [("x", "gate"), ["dx"], ("",), ({},), "x", None, 1], ids=str)
def test_needs_other_than_a_collection_of_its_names_are_refused(needs):
    error = ValueError if isinstance(needs, tuple | list) else TypeError
    with raises(
        error, f"{BACKWARD}: needs is {needs!r}, expected a tuple of 'x', 'weight', 'bias'"
    ):
        call(BACKWARD, needs=needs)


@pytest.mark.parametrize("flag", [1, None, np.True_], ids=repr)
def test_accumulate_must_be_a_bool(flag):
    with raises(TypeError, f"{BACKWARD}: accumulate is {flag!r}, expected True or False"):
        call(BACKWARD, accumulate=flag)


# --- shapes ---------------------------------------------------------------------------------------


@names
@pytest.mark.parametrize("argument", ["weight", "bias"])
@pytest.mark.parametrize("shape", [(5,), (1, 8), (), (3, 8), (2,), (8, 1)], ids=str)
def test_parameters_must_have_an_element_for_each_channel(name, argument, shape):
    text = f"{argument} has shape {shape}, expected (8,), one for each channel"
    with raises(ValueError, f"{name}: {text}"):
        call(name, **{argument: np.ones(shape, np.float32)})


@names
def test_the_channels_are_those_of_channel_axis(name):
    told = {"channel_axis": 1} | ({} if name == "instance_norm" else {"num_groups": 5})
    with raises(ValueError, f"{name}: weight has shape (8,), expected (5,), one for each channel"):
        call(name, **told)


@pytest.mark.parametrize("shape", [(3, 8, 5), (3, 5, 1), (5, 8), (3, 5, 8, 1), (1, 5, 8)], ids=str)
def test_dy_must_have_xs_shape(shape):
    text = f"dy has shape {shape}, expected (3, 5, 8), the shape of x"
    with raises(ValueError, f"{BACKWARD}: {text}"):
        call(BACKWARD, dy=np.ones(shape, np.float32))


@pytest.mark.parametrize("argument", ["mean", "rstd"])
@pytest.mark.parametrize("shape", [(3,), (3, 8), (2, 3), (3, 1, 2), (6,), (1, 2)], ids=str)
def test_statistics_must_have_an_element_for_each_group_of_each_sample(argument, shape):
    text = (
        f"{argument} has shape {shape}, expected (3, 2), one element for each group of each sample"
    )
    with raises(ValueError, f"{BACKWARD}: {text}"):
        call(BACKWARD, **{argument: np.ones(shape, np.float32)})


# --- dtypes and arrays ----------------------------------------------------------------------------

DTYPES = "expected float16, bfloat16, float32 or float64"


@names
@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64", "float8_e4m3fn"])
def test_integer_complex_and_fp8_x_are_refused(name, dtype):
    x = np.zeros(SHAPE, getattr(ml_dtypes, dtype, dtype))
    with raises(TypeError, f"{name}: x has dtype {dtype}, {DTYPES}"):
        call(name, x=x)


@names
def test_integer_operands_are_refused(name):
    for argument in set(given(name)) - {"x", "num_groups"}:
        wrong = given(name)[argument].astype(np.int16)
        with raises(TypeError, f"{name}: {argument} has dtype int16, {DTYPES}"):
            call(name, **{argument: wrong})


@pytest.mark.parametrize("argument", ["mean", "rstd"])
@pytest.mark.parametrize(
    ("x", "wrong", "compute"),
    [
        ("bfloat16", "bfloat16", "float32"),
        ("float32", "float64", "float32"),
        ("float64", "float32", "float64"),
    ],
)
def test_statistics_must_be_of_the_compute_type(argument, x, wrong, compute):
    arrays = {"x": draw("x", SHAPE, x)}
    arrays |= {other: draw(other, (3, 2), compute) for other in ("mean", "rstd")}
    arrays[argument] = draw(argument, (3, 2), wrong)
    text = f"{argument} has dtype {wrong}, expected {compute}, the compute type: float64 if x is, "
    with raises(TypeError, f"{BACKWARD}: {text}else float32"):
        call(BACKWARD, **arrays)


@pytest.mark.parametrize("name", FORWARDS)
@pytest.mark.parametrize("dtype", ["int8", float, np.int32, 3], ids=str)
def test_a_dtype_that_is_none_of_the_four_is_refused(name, dtype):
    with pytest.raises(TypeError, match=rf"^{name}: dtype is .+, {DTYPES}$"):
        call(name, dtype=dtype)


@names
def test_what_is_no_array_is_refused_with_its_type(name):
    for argument in set(given(name)) - {"num_groups"}:
        for thing, what in (([1.0], "of type list"), (1.5, "of type float"), (None, "None")):
            if thing is not None or argument not in ("weight", "bias"):
                with pytest.raises(TypeError, match=f"^{name}: {argument} is {what}, expected a"):
                    call(name, **{argument: thing})


# --- devices and frameworks -----------------------------------------------------------------------


@names
def test_an_operand_on_another_device_than_x_is_refused(name, monkeypatch):
    describe = Numpy.describe

    def elsewhere(numpy, function, argument, array):
        operand = describe(numpy, function, argument, array)
        if argument == "x":
            return operand
        return replace(operand, form=operand.form._replace(device=Device("cuda", 1)))

    monkeypatch.setattr(Numpy, "describe", elsewhere)
    for argument in set(given(name)) - {"x", "num_groups"}:
        alone = {} if name == BACKWARD else dict.fromkeys({"weight", "bias"} - {argument})
        text = f"{'dy' if name == BACKWARD else argument} is on cuda:1, expected cpu"
        with raises(ValueError, f"{name}: {text}, the device of x"):
            call(name, **alone)


@names
def test_a_tensor_that_requires_grad_is_refused_outside_no_grad(name):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    for argument in set(given(name)) - {"num_groups"}:
        tensor = torch.from_numpy(given(name)[argument]).requires_grad_()
        text = f"{argument} requires grad, which this function does not record: use "
        with raises(
            ValueError, f"{name}: {text}cunorm.torch, torch.no_grad() or {argument}.detach()"
        ):
            call(name, **{argument: tensor})


def test_a_jax_tracer_is_refused_and_pointed_to_the_jax_front_end():
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    with pytest.raises(
        TypeError, match=r"^instance_norm: x is a JAX tracer.+use cunorm\.jax there"
    ):
        jax.jit(cunorm.instance_norm)(jax.numpy.ones(SHAPE))
