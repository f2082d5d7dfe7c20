# SPDX-License-Identifier: MIT
"""All functions of every named norm are within their bounds, on any device."""

from itertools import product

import numpy as np
import pytest

import cunorm
from cunorm import AddNorm, NormForward, NormGrads
from tests.support.bounds import check_backward, check_forward
from tests.support.cases import call_of
from tests.support.gpu_arrays import OnCupy, OnJax, OnNumpy, OnTorch, get_all, put_all
from tests.support.norm_checks import check_norm, laid_out
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
from tests.support.placed import Samples

all_norms = pytest.mark.parametrize("name", NORMS)
# The only norm that is tested with rows so long that a CPU's cores share them: such rows need
# another build, and test_cpu_plans.py tests them, too.
LONG = "layer_norm"
# The width on a GPU, where each width needs a build.
GPU_WIDTHS = {"rms_norm": 4096, "layer_norm": 128, "l2_norm": 33, "normalize": 1000}


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


@all_norms
def test_all_functions_of_a_named_norm_are_within_their_bounds(anywhere, name):
    widths = [width for width in WIDTHS if width < 16384 or name == LONG]
    for width in (GPU_WIDTHS[name],) if anywhere.is_gpu else widths:
        rows = min(row_count(width), max(3, 20_000 // width))
        with at(f"width {width}"):
            check_named(anywhere, name, "float32", (rows, width))


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

ALL = {"weight_offset": 1.0, "center": True, "c": 3.0, "gate": "float16"}
ALL |= {"stream": "+ float32", "d_residual": "float32"}
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
def test_variants_of_a_stream_are_within_their_bounds(device, variant):
    """All operands are given; the stream is float32, and the gate float16."""
    dtype, norm = VARIANTS[variant]
    case = {"x": dtype, "dy": dtype} | ALL | norm
    for width in (1000,) if device.is_gpu else (1, 31, 128, 1000, 20480):
        rows = 5 if device.is_gpu else row_count(width * norm["groups"])
        case["shape"] = (1, 1, rows, width)
        with at(width):
            call_of("row_norm_forward", case, device).check()
            call_of("row_norm_backward", case | {"x": "float32", "dx": dtype}, device).check()


def test_a_stream_with_a_gate_is_within_its_bounds_in_arrays_of_every_library(anywhere):
    shape, norm = (5, 1000), {"weight_offset": 1.0, "center": True, "c": 3.0}
    rows = {name: draw(name, shape, "float16") for name in ("x", "dy")}
    rows |= {name: draw(name, shape, "float32") for name in ("residual", "d_residual")}
    given = {name: draw(name, 1000, "float32") for name in ("weight", "bias")}
    given["gate"] = draw("gate", shape, "float16")
    there, kwargs = put_all(anywhere, rows), put_all(anywhere, given) | norm
    f = cunorm.normalize_forward(there["x"], residual=there["residual"], **kwargs)
    more = {"d_residual": there["d_residual"], "x_dtype": rows["x"].dtype}
    more |= {"rstd": f.rstd, "mean": f.mean}
    grads = cunorm.normalize_backward(there["dy"], f.residual, **kwargs, **more)
    f, options = get_all(anywhere, f), given | norm | {"eps": 1e-6}
    check_forward(f, rows["x"], residual=rows["residual"], **options)
    options |= {"d_residual": rows["d_residual"], "x_dtype": rows["x"].dtype}
    worst = check_backward(get_all(anywhere, grads), rows["dy"], f.residual, **options)
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

# Samples, positions, channels, groups. A block of a GPU has whole groups or parts of a group; lines
# have any alignment; cores of a CPU share some samples.
SIZES = [(3, (7,), 3, 1), (2, (64,), 32, 8), (1, (131,), 40, 5), (2, (9,), 320, 32)]
SIZES += [(20, (1,), 64, 32)]
HOST_SIZES = [*SIZES, (2, (4096,), 96, 6), (2, (5003,), 10, 10)]
KERNELS = ("group_norm_forward", "group_norm_backward")


@pytest.mark.parametrize("is_last", [True, False])
def test_group_norms_of_both_layouts_are_within_their_bounds(device, is_last):
    axis = -1 if is_last else 1
    sizes = [(*size, is_last, axis) for size in (SIZES if device.is_gpu else HOST_SIZES)]
    sizes += [(*SIZES[1], is_last, -axis)]
    for kernel, size, far in product(KERNELS, sizes, (False, True)):
        with at(kernel, size, far):
            call_of(kernel, {"samples": Samples(*size), "far": far}, device).check()


@pytest.mark.parametrize("axis", [-1, 1])
def test_an_instance_norm_is_a_group_norm_with_a_group_for_each_channel(device, axis):
    shape = (3, 7, 5) if axis == -1 else (3, 5, 7)
    x, *parameters = (
        device.put(draw(n, s, "float32")) for n, s in (("x", shape), ("w", 5), ("b", 5))
    )
    options = {"activation": "silu", "channel_axis": axis}
    y = device.get(cunorm.instance_norm(x, *parameters, **options))
    assert_same_bits(y, device.get(cunorm.group_norm(x, 5, *parameters, **options)))


OTHERS = [("float16", "gelu", -1), ("bfloat16", None, 1), ("float64", "tanh", -1)]


@pytest.mark.parametrize(("dtype", "activation", "axis"), OTHERS)
def test_group_norms_of_every_dtype_are_within_their_bounds(anywhere, dtype, activation, axis):
    samples, positions, channels, groups = (1, 131, 40, 5) if anywhere.is_gpu else (2, 37, 128, 8)
    x = laid_out(draw("x", (samples, positions, channels), dtype), axis)
    options = {"num_groups": groups, "channel_axis": axis, "activation": activation}
    check_norm(anywhere, x, **options)
