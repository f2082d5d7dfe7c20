# SPDX-License-Identifier: MIT
"""All functions of every named norm are within their bounds, on any device."""

import inspect

import numpy as np
import pytest

import cunorm
from cunorm import AddNorm, GroupNormForward, GroupNormGrads, NormForward, NormGrads
from tests.support.bounds import check_backward, check_forward
from tests.support.gpu_arrays import OnCupy, OnJax, OnNumpy, OnTorch, get_all, put_all
from tests.support.group_bounds import check_group_backward, check_group_forward
from tests.support.operands import (
    NORMS,
    WIDTHS,
    assert_same_bits,
    at,
    draw,
    parameters,
    row_count,
    saved,
    weight_and_bias,
)

all_norms = pytest.mark.parametrize("name", NORMS)
# The only norm that is tested with rows so long that a CPU's cores share them: such rows need
# another build, and test_cpu_plans.py tests them, too.
LONG = "layer_norm"
CASES = [  # name, dtype, and the width on a GPU, where each width needs a build
    ("rms_norm", "float32", 4096),
    ("layer_norm", "float32", 128),
    ("l2_norm", "float32", 33),
    ("normalize", "float32", 1000),
    # Named norms run the kernels of `normalize`; test_combinations.py has these dtypes, too.
    pytest.param("rms_norm", "bfloat16", 20480, marks=pytest.mark.exhaustive),
    pytest.param("normalize", "float16", 33, marks=pytest.mark.exhaustive),
    pytest.param("normalize", "bfloat16", 4096, marks=pytest.mark.exhaustive),
    pytest.param("normalize", "float64", 128, marks=pytest.mark.exhaustive),
]


def check_named(on, name, dtype, shape, groups=1):
    """Run all functions of a named norm, and check each against the oracle."""
    norm = NORMS[name]
    rows = {n: draw(n, shape, dtype) for n in ("x", "residual", "dy", "d_residual")}
    given = parameters(norm, shape[-1], dtype)
    operands = weight_and_bias(given)
    oracle_options = norm.oracle_options(shape[-1] // groups) | {"groups": groups}
    there, kwargs = put_all(on, rows), put_all(on, given) | norm.keywords() | {"groups": groups}
    x, residual = there["x"], there["residual"]
    forward, backward = (
        getattr(cunorm, f"{name}_{direction}") for direction in ("forward", "backward")
    )

    f = forward(x, **kwargs)
    assert type(f) is NormForward
    assert type(f.y) is type(x)
    assert f.rstd.shape == (shape[0], *([groups] if groups > 1 else []))
    check_forward(get_all(on, f), rows["x"], *operands, **oracle_options)
    y = on.get(getattr(cunorm, name)(x, **kwargs))
    assert_same_bits(y, on.get(f.y))
    grads = backward(there["dy"], x, **kwargs, **saved(norm, f))
    assert type(grads) is NormGrads
    assert type(grads.dx) is type(x)
    assert grads.dresidual is grads.dx
    check_backward(get_all(on, grads), rows["dy"], rows["x"], *operands, **oracle_options)
    if not norm.has_residual:
        return
    added = getattr(cunorm, f"add_{name}")(x, residual, **kwargs)
    assert type(added) is AddNorm
    f = forward(x, **kwargs, residual=residual)
    got = get_all(on, f)
    for field, array in zip(("y", "residual"), get_all(on, added), strict=True):
        assert_same_bits(array, getattr(got, field), field)
    check_forward(got, rows["x"], *operands, rows["residual"], **oracle_options)
    more = saved(norm, f) | {"d_residual": there["d_residual"]}
    grads = backward(there["dy"], f.residual, **kwargs, **more)
    stream = (rows["dy"], got.residual, *operands, rows["d_residual"])
    check_backward(get_all(on, grads), *stream, **oracle_options)


@pytest.mark.parametrize(("name", "dtype", "gpu_width"), CASES)
def test_all_functions_of_a_named_norm_are_within_their_bounds(anywhere, name, dtype, gpu_width):
    widths = [width for width in WIDTHS if width < 16384 or name == LONG]
    for width in (gpu_width,) if anywhere.is_gpu else widths:
        rows = min(row_count(width), max(3, 20_000 // width))
        with at(f"width {width}"):
            check_named(anywhere, name, dtype, (rows, width))


@pytest.mark.gpu
@pytest.mark.real_gpu("the rows are too long")
def test_long_rows_are_within_their_bounds_on_a_gpu():
    check_named(OnCupy(), "layer_norm", "float32", (2, 65536))


def test_parameter_gradients_are_within_their_bounds_over_any_number_of_rows(device):
    for count in (1, 15, 16, 17, 63, 64, 500, *(() if device.is_gpu else (4000,))):
        for dtype in ("float32",) if device.is_gpu else ("bfloat16", "float32"):
            with at(dtype, count):
                check_named(device, "layer_norm", dtype, (count, 65 if count > 64 else 33))


@all_norms
def test_norms_of_groups_are_within_their_bounds(name):
    for groups, width in ((2, 65), (3, 128), (7, 5), (96, 1), (2, 20480)):
        with at(f"{groups} groups of width {width}"):
            shape = (row_count(groups * width), groups * width)
            check_named(OnNumpy(), name, "float32", shape, groups)


# --- gates, groups, offsets and roundings ---------------------------------------------------------

ALL = {"weight_offset": 1.0, "center": True, "c": 3.0}
PRE = {"gate_activation": "gelu", "gate_position": "pre"}
POST = {"gate_activation": "silu", "gate_position": "post"}
VARIANTS = {
    "pre-gate, groups, float16": ("float16", PRE | {"groups": 4}),
    "post-gate, groups, rounded": (
        "bfloat16",
        POST | {"gate_activation": "gelu_tanh", "groups": 4, "round_before_weight": True},
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_of_a_stream_are_within_their_bounds(anywhere, variant):
    """All operands are given; the stream is float32, and the gate float16."""
    dtype, norm = VARIANTS[variant]
    norm = ALL | norm
    for width in (1000,) if anywhere.is_gpu else (1, 31, 128, 1000, 20480):
        columns = width * norm["groups"]
        shape = (5 if anywhere.is_gpu else row_count(columns), columns)
        rows = {name: draw(name, shape, dtype) for name in ("x", "dy")}
        rows |= {name: draw(name, shape, "float32") for name in ("residual", "d_residual")}
        given = {name: draw(name, columns, "float32") for name in ("weight", "bias")}
        given["gate"] = draw("gate", shape, "float16")
        there, kwargs = put_all(anywhere, rows), put_all(anywhere, given) | norm
        f = cunorm.normalize_forward(there["x"], residual=there["residual"], **kwargs)
        more = {"d_residual": there["d_residual"], "x_dtype": rows["x"].dtype}
        more |= {"rstd": f.rstd, "mean": f.mean}
        grads = cunorm.normalize_backward(there["dy"], f.residual, **kwargs, **more)
        f, options = get_all(anywhere, f), {"bias": given["bias"], "eps": 1e-6} | given | norm
        with at(f"width {width}"):
            check_forward(f, rows["x"], residual=rows["residual"], **options)
            operands = (rows["dy"], f.residual)
            options |= {"d_residual": rows["d_residual"], "x_dtype": rows["x"].dtype}
            worst = check_backward(get_all(anywhere, grads), *operands, **options)
            assert worst.keys() == {"dx", "dresidual", "dweight", "dbias", "dgate"}


def test_heads_of_a_fused_qkv_and_an_expanded_gate_are_read_where_they_are(anywhere):
    qkv, gate = draw("x", (50, 3, 8, 64), "bfloat16"), draw("gate", (50, 1, 64), "bfloat16")
    weight = draw("weight", 64, "float32")
    there = put_all(anywhere, {"x": qkv, "gate": gate, "weight": weight})
    expanded = {
        OnTorch: lambda array: array.expand(50, 8, 64),
        OnCupy: lambda array: anywhere.cupy.broadcast_to(array, (50, 8, 64)),
        OnJax: lambda array: None,
    }.get(type(anywhere), lambda array: np.broadcast_to(array, (50, 8, 64)))(there["gate"])
    options = {} if expanded is None else {"gate": np.broadcast_to(gate, (50, 8, 64))}
    f = cunorm.rms_norm_forward(there["x"][:, 1], there["weight"], gate=expanded)
    check_forward(get_all(anywhere, f), qkv[:, 1], weight, None, eps=1e-6, **options)


# --- group norms ----------------------------------------------------------------------------------

AXES = {"last": -1, "first": 1}  # of the channels, by their place in memory
# Samples, positions, channels, groups. A block of a GPU has whole groups or parts of a group; lines
# have any alignment; cores of a CPU share some samples.
SIZES = [(3, 7, 3, 1), (2, 64, 32, 8), (1, 131, 40, 5), (2, 9, 320, 32), (20, 1, 64, 32)]
HOST_SIZES = [*SIZES, (2, 4096, 96, 6), (2, 5003, 10, 10)]


def check_grouped(on, name, size, dtype, memory, channel_axis, activation="silu", mean=0.0):
    samples, positions, channels, groups = size
    shape = (samples, positions, channels) if channel_axis == -1 else (samples, channels, positions)
    x, dy = draw("x", shape, dtype, mean=mean), draw("dy", shape, dtype)
    given = parameters(NORMS["layer_norm"], channels, "float32")
    there = [laid_out(on, array, channel_axis, memory) for array in (x, dy)]
    options = {"activation": activation, "channel_axis": channel_axis}
    kwargs = put_all(on, given) | options
    groups = channels if name == "instance_norm" else groups
    f = cunorm.group_norm_forward(there[0], groups, **kwargs)
    groups_option = {"num_groups": groups} if name == "group_norm" else {}
    y = getattr(cunorm, name)(there[0], **groups_option, **kwargs)
    saved = {"mean": f.mean, "rstd": f.rstd}
    grads = cunorm.group_norm_backward(*there[::-1], groups, **kwargs, **saved)
    assert (type(f), type(grads)) == (GroupNormForward, GroupNormGrads)
    assert all(type(result) is type(there[0]) for result in (*f, *grads))
    assert_same_bits(on.get(y), on.get(f.y))
    operands = (x, groups, *weight_and_bias(given))
    with at(size, dtype, memory, channel_axis):
        check_group_forward(get_all(on, f), *operands, eps=1e-5, **options)
        check_group_backward(get_all(on, grads), dy, *operands, eps=1e-5, **options)


def laid_out(on, array, channel_axis, memory):
    """Copy an array to the device with channels last or first in memory (JAX has one order)."""
    axis = AXES[memory]
    dense = on.put(np.array(np.moveaxis(array, channel_axis, axis), order="C"))
    axes = list(range(array.ndim))
    axes.insert(channel_axis % array.ndim, axes.pop(axis))
    return (getattr(dense, "permute", None) or dense.transpose)(*axes)


@pytest.mark.parametrize("memory", AXES)
def test_group_norms_of_both_layouts_are_within_their_bounds(anywhere, memory):
    axis, other = (-1, 1) if memory == "last" else (1, -1)
    for size in SIZES if anywhere.is_gpu else HOST_SIZES:
        for mean in (0.0, 1e4):
            check_grouped(anywhere, "group_norm", size, "float32", memory, axis, mean=mean)
    check_grouped(anywhere, "group_norm", SIZES[1], "float32", memory, other)
    for size in SIZES[:2]:
        check_grouped(anywhere, "instance_norm", size, "float32", memory, axis)


OTHERS = [("float16", "gelu", "last"), ("bfloat16", None, "first"), ("float64", "tanh", "last")]


@pytest.mark.parametrize(("dtype", "activation", "memory"), OTHERS)
def test_group_norms_of_every_dtype_are_within_their_bounds(anywhere, dtype, activation, memory):
    size = SIZES[2] if anywhere.is_gpu else (2, 37, 128, 8)
    check_grouped(anywhere, "group_norm", size, dtype, memory, AXES[memory], activation)


@all_norms
def test_eps_and_positional_arguments_are_those_of_the_table_of_norms(name):
    eps = inspect.signature(getattr(cunorm, name)).parameters["eps"].default
    assert eps == NORMS[name].eps
    for function in (name, f"{name}_forward", f"{name}_backward"):
        kinds = inspect.signature(getattr(cunorm, function)).parameters.values()
        positional = [p.name for p in kinds if p.kind is p.POSITIONAL_OR_KEYWORD]
        arrays = ["dy", "x"] if function.endswith("_backward") else ["x"]
        assert positional == [*arrays, *NORMS[name].parameters]
