# SPDX-License-Identifier: MIT
"""`workspace_size` of the group norms: enough for their calls, and on a CPU not a byte too much."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

import cunorm
from cunorm import GroupNormForward
from cunorm._activations import ACTIVATIONS
from cunorm._arrays import Device, contiguous_form
from cunorm._dtypes import DTYPES as STORAGE
from cunorm.group_norm import _backward_plan, _forward, _workspace_size
from cunorm.group_norm._run import schedule_of, workspace_bytes
from tests.memory.test_workspace import guarded
from tests.support.calls import raises
from tests.support.group_norm_cases import laid_out
from tests.support.operands import DTYPES, assert_same_fields, at, draw

OPS = ("group_norm", "instance_norm", "group_norm_forward", "group_norm_backward")
ALL = ("x", "weight", "bias")
# Samples, height, width, channels and groups of what is one launch on a CPU, and of several.
SMALL, LARGE = (3, 5, 7, 12, 4), (2, 60, 50, 24, 3)


def operands(sizes, memory, dtype="float32"):
    """Draw x with the channels on axis 1, last or first in memory, weight and bias."""
    samples, height, width, channels, _ = sizes
    shape = (samples, channels, height, width)
    parameters = [draw(name, channels, dtype) for name in ("weight", "bias")]
    return laid_out(draw("x", shape, dtype), 1, memory), *parameters


def told_of(op, groups):
    return {"channel_axis": 1} | ({} if op == "instance_norm" else {"num_groups": groups})


def call(op, sizes, x, weight, bias, **more):
    """Make a call whose fields are its results."""
    told = {"weight": weight, "bias": bias} | told_of(op, sizes[-1]) | more
    if op == "group_norm_backward":
        statistic = draw("rstd", (sizes[0], sizes[-1]), str(np.result_type(x, np.float32)))
        dy = laid_out(draw("dy", x.shape, "float32"), 1, "first")  # is copied where x is not so
        return cunorm.group_norm_backward(dy, x, mean=statistic, rstd=statistic, **told)
    result = getattr(cunorm, op)(x, **told)
    return result if op == "group_norm_forward" else GroupNormForward(result)


@pytest.mark.parametrize("memory", ["last", "first"])
@pytest.mark.parametrize("sizes", [SMALL, LARGE], ids=["one pass", "several"])
@pytest.mark.parametrize("op", OPS)
def test_exactly_as_many_bytes_as_are_said_are_enough_and_nothing_around_them_is_touched(
    op, sizes, memory
):
    arrays = operands(sizes, memory)
    size = cunorm.workspace_size(op, *arrays, **told_of(op, sizes[-1]))
    expected = call(op, sizes, *arrays)
    for fill in (0xFF, 0x00, 0x7F):
        workspace, around = guarded(size, fill)
        assert_same_fields(call(op, sizes, *arrays, workspace=workspace), expected)
        workspace[...] = fill
        assert (around == fill).all()
    text = f"workspace has {size - 4} bytes, expected at least {size}, as "
    with raises(ValueError, f"{op}: {text}cunorm.workspace_size says"):
        call(op, sizes, *arrays, workspace=guarded(size - 4)[0])


@pytest.mark.parametrize("needs", [ALL, ("x",), ("weight", "bias"), ("bias",)], ids=",".join)
@pytest.mark.parametrize("sizes", [SMALL, LARGE], ids=["one pass", "several"])
def test_of_a_backward_the_size_is_that_of_what_is_wanted(sizes, needs):
    op, arrays = "group_norm_backward", operands(sizes, "last")
    size = cunorm.workspace_size(op, *arrays, **told_of(op, sizes[-1]), needs=needs)
    workspace, around = guarded(size)
    expected = call(op, sizes, *arrays, needs=needs)
    assert_same_fields(call(op, sizes, *arrays, needs=needs, workspace=workspace), expected)
    workspace[...] = 0xFF
    assert (around == 0xFF).all()
    text = f"workspace has {size - 4} bytes, expected at least {size}, as "
    with raises(ValueError, f"{op}: {text}cunorm.workspace_size says"):
        call(op, sizes, *arrays, needs=needs, workspace=guarded(size - 4)[0])


def test_by_default_every_gradient_is_wanted():
    sizes, op = SMALL, "group_norm_backward"
    x, weight, bias = operands(sizes, "last")
    told = told_of(op, sizes[-1])
    assert cunorm.workspace_size(op, x, weight, bias, **told) == cunorm.workspace_size(
        op, x, weight, bias, **told, needs=ALL
    )
    sizes = [
        cunorm.workspace_size(op, x, *some, **told) for some in ((), (weight,), (weight, bias))
    ]
    assert sizes[0] < sizes[1] < sizes[2]


@pytest.mark.parametrize("op", OPS)
def test_the_sums_of_float64_take_twice_the_memory(op):
    sizes = [
        cunorm.workspace_size(op, *operands(SMALL, "last", dtype), **told_of(op, 4))
        for dtype in DTYPES
    ]
    assert sizes[0] == sizes[1] == sizes[2] == sizes[3] / 2


def test_no_samples_need_no_more_than_one():
    for op in OPS:
        x, weight, bias = operands(SMALL, "last")
        told = told_of(op, 4)
        none = cunorm.workspace_size(op, x[:0], weight, bias, **told)
        assert none <= cunorm.workspace_size(op, x[:1], weight, bias, **told)
        workspace, _ = guarded(none)
        assert call(op, (0, *SMALL[1:]), x[:0], weight, bias, workspace=workspace)[0].size == 0


def test_x_of_a_tensor_in_channels_last_memory_has_the_size_of_a_numpy_array_like_it():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    x = np.zeros((2, 60, 50, 24), np.float32)
    theirs = torch.from_numpy(x).permute(0, 3, 1, 2)
    assert theirs.is_contiguous(memory_format=torch.channels_last)
    assert cunorm.workspace_size(
        "group_norm", theirs, num_groups=3, channel_axis=1
    ) == cunorm.workspace_size("group_norm", x, num_groups=3)


# --- what other operands may be -------------------------------------------------------------------

SHAPES = (
    *((2, 8, 8, 64), (1, 2, 1, 6), (3, 64, 64, 320), (2, 8, 1, 10), (70, 16, 16, 512)),
    (2, 32, 32, 16),  # a GPU's threads have room for a group, but not with gelu
)


@pytest.mark.parametrize("device", [Device("cpu", 0), Device("cuda", 0)], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_enough_for_any_activation_and_dtypes_of_the_other_operands(shape, device):
    """And on a CPU for all of them the same."""
    several = product(("float16", "float32", "float64"), (-1, 1), ("bfloat16", "float64"))
    for dtype, axis, other in several:
        x = contiguous_form(shape, STORAGE[dtype], device)
        parameter = contiguous_form((shape[axis],), STORAGE[other], device)
        inputs = (x, parameter, parameter)
        enough = _workspace_size.forward_size("test", inputs, 2, axis)
        backward_enough = _workspace_size.backward_size("test", inputs, 2, axis, ALL)
        for activation, y, dx in product(ACTIVATIONS, STORAGE, STORAGE.values()):
            told = _forward.asked("test", 2, activation, axis, y, False)
            forward = _forward.planned(told, (*inputs, None, None, None))
            with at(dtype, axis, other, activation, y, dx):
                assert_enough(enough, forward.form, device)
                plan = backward_plan(inputs, activation, axis, STORAGE[y], dx)
                assert_enough(backward_enough, plan.form, device)


def backward_plan(inputs, activation, axis, dy, dx):
    x = inputs[0]
    compute = STORAGE["float64" if x.dtype is STORAGE["float64"] else "float32"]
    statistic = contiguous_form((x.shape[0], 2), compute, x.device)
    told = _backward_plan.asked("test", 2, activation, axis, ALL, False)
    like_x = [contiguous_form(x.shape, dtype, x.device) for dtype in (dy, dx)]
    arrays = (like_x[0], x, statistic, statistic, *inputs[1:], like_x[1], None, None)
    return _backward_plan.planned(told, arrays)


def assert_enough(said, form, device):
    needed = workspace_bytes(form, device)
    assert needed == said if device.kind == "cpu" else needed <= said
    if device.kind == "cuda":  # what an alignment allows changes nothing
        sizes = {schedule_of(form, device, access).handed_size for access in (1, 2, 4, 8)}
        assert sizes == {schedule_of(form, device).handed_size}


# --- what has no size -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "told", "error", "text"),
    [
        ("group_norm", {}, TypeError, "num_groups is None, expected an int"),
        ("group_norm_backward", {}, TypeError, "num_groups is None, expected an int"),
        ("group_norm_forward", {"num_groups": 2.0}, TypeError, "num_groups is 2.0, expected an "),
        ("group_norm", {"num_groups": 5}, ValueError, "num_groups is 5, expected a divisor of 12"),
        ("instance_norm", {"num_groups": 12}, ValueError, "num_groups is given, expected None: "),
        ("rms_norm_backward", {"num_groups": 2}, ValueError, "num_groups is given, expected None"),
        ("l2_norm_backward", {"channel_axis": 1}, ValueError, "channel_axis is 1, expected the d"),
        ("instance_norm", {"channel_axis": 2}, ValueError, "channel_axis is 2, expected -1 or 1"),
        ("instance_norm", {"channel_axis": "C"}, TypeError, "channel_axis is 'C', expected an in"),
        ("instance_norm", {"axis": 0}, ValueError, "axis is 0, expected the default: instance_n"),
        ("instance_norm", {"groups": 2}, ValueError, "groups is 2, expected the default: instan"),
        ("instance_norm", {"x_dtype": "float16"}, ValueError, "x_dtype is given, expected None: "),
        ("instance_norm", {"needs": ("x",)}, ValueError, "needs is ('x',), expected the default"),
        (
            "group_norm_backward",
            {"num_groups": 2, "needs": ("gate",)},
            ValueError,
            "needs is ('gate',), expected a tuple of 'x', 'weight', 'bias'",
        ),
        (
            "instance_norm",
            {"weight": np.ones(3)},
            ValueError,
            "weight has shape (3,), expected (12,), one for each channel",
        ),
    ],
)
def test_what_a_function_does_not_take_has_no_size(op, told, error, text):
    with pytest.raises(error) as caught:
        cunorm.workspace_size(op, np.zeros((2, 5, 12), np.float32), **told)
    assert str(caught.value).startswith(f"workspace_size: {text}")
