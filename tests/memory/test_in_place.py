# SPDX-License-Identifier: MIT
"""Results written exactly over inputs have the same bits as in separate arrays.

Several arrays of a gated call can be input and result at once. Rows are few and many, short and
long, whole and in groups, so that every plan of a CPU runs. tests/operators tests views.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

import cunorm
from cunorm import AddNorm, NormForward, NormGrads
from tests.support.calls import devices, host, to
from tests.support.cases import call_of
from tests.support.gpu_arrays import OnNumpy
from tests.support.operands import assert_same_bits, assert_same_fields, at, draw
from tests.support.placed import Samples

SIZES = [(1, 1003, 1), (1, 64, 4), (9, 5, 1), (9, 2100, 1), (9, 5, 5), (50, 200, 8)]
SMALL = [(3, 64, 4), (2, 1003, 1)]  # for the software GPU
ALL_SIZES = {"numpy": SIZES, "cupy": SMALL}
FORWARD_ALIASES = [
    *({"y": name} for name in ("x", "gate", "residual")),
    *({"residual": name} for name in ("x", "residual")),
    {"y": "gate", "residual": "x"},
    {"y": "gate", "residual": "residual"},
    {"y": "x", "residual": "residual"},
    {"y": "residual", "residual": "x"},
]
BACKWARD_ALIASES = [
    *({field: name} for field in ("dx", "dgate") for name in ("dy", "x", "gate", "d_residual")),
    {"dweight": "weight", "dbias": "bias"},
    {"dresidual": "x"},
    {"dx": "dy", "dgate": "gate"},
    {"dx": "x", "dgate": "gate"},
    {"dx": "gate", "dgate": "dy"},
    {"dx": "d_residual", "dgate": "x"},
    {"dx": "dy", "dgate": "gate", "dweight": "weight", "dbias": "bias"},
    {"dx": "gate", "dgate": "x", "dweight": "bias", "dbias": "weight"},
]
WIDER_ALIASES = [  # with a float32 stream: x and dresidual are float32, other rows bfloat16
    {"dx": "dy", "dresidual": "x"},
    {"dx": "gate", "dresidual": "x", "dgate": "dy"},
    {"dx": "d_residual", "dgate": "gate"},
]


def arrays_of(rows, width, dtype, *names):
    arrays = {name: draw(name, (rows, width), dtype) for name in names}
    return arrays | {name: draw(name, width, dtype) for name in ("weight", "bias")}


def statistics(rows, groups):
    """Draw a mean and an rstd; they may be any numbers, because tests compare only bits."""
    shape = (*rows, groups) if groups > 1 else rows
    mean, rstd = (np.asarray(draw(name, shape, "float32")) for name in ("mean", "rstd"))
    return {"mean": mean, "rstd": rstd}


def check(function, result, arrays, choices, kind="numpy", **options):
    """Call with results over copies of inputs, and compare with results in separate memory."""

    def put():
        copies = {id(array): to(kind, array.copy()) for array in arrays.values()}
        return {name: copies[id(array)] for name, array in arrays.items()}

    right = {k: host(a) for k, a in function(**put(), **options)._asdict().items() if a is not None}
    for aliases in choices:
        copies = put()
        out = result(**{field: copies[name] for field, name in aliases.items()})
        with at(aliases):
            actual = function(**copies, **options, out=out)
            assert all(getattr(actual, field) is getattr(out, field) for field in aliases)
            for field, array in right.items():
                assert_same_bits(host(getattr(actual, field)), array, field)


# --- every pair, and several at once --------------------------------------------------------------


@devices
@pytest.mark.parametrize(("dtype", "position"), [("float32", "pre"), ("bfloat16", "post")])
def test_results_of_a_forward_may_be_exactly_inputs(dtype, position, kind):
    for rows, width, groups in ALL_SIZES[kind]:
        options = {"groups": groups, "gate_position": position, "kind": kind}
        arrays = arrays_of(rows, width, dtype, "x", "residual", "gate")
        with at(rows, width, groups):
            check(cunorm.layer_norm_forward, NormForward, arrays, FORWARD_ALIASES, **options)


@devices
@pytest.mark.parametrize(
    ("dtype", "stream", "position"),
    [
        ("float32", "float32", "post"),
        ("bfloat16", "bfloat16", "pre"),
        ("bfloat16", "float32", "post"),
    ],
)
def test_gradients_may_be_exactly_inputs(dtype, stream, position, kind):
    for rows, width, groups in ALL_SIZES[kind]:
        options = {"groups": groups, "gate_position": position, "kind": kind, "x_dtype": dtype}
        arrays = arrays_of(rows, width, dtype, "dy", "gate", "d_residual")
        arrays |= statistics((rows,), groups) | {"x": draw("x", (rows, width), stream)}
        aliases = BACKWARD_ALIASES if stream == dtype else WIDER_ALIASES
        with at(rows, width, groups):
            check(cunorm.layer_norm_backward, NormGrads, arrays, aliases, **options)


def test_a_result_may_be_written_over_an_array_that_is_every_input():
    for rows, width, groups in SIZES:
        x, given = draw("x", (rows, width), "float32"), arrays_of(rows, width, "float32")
        stream = dict.fromkeys(("x", "residual", "gate"), x) | given
        given |= dict.fromkeys(("dy", "x", "gate", "d_residual"), x) | statistics((rows,), groups)
        over, options = [{"dx": "x"}, {"dgate": "x"}], {"groups": groups}
        with at(rows, width, groups):
            check(cunorm.layer_norm_forward, NormForward, stream, [{"y": "x"}], **options)
            check(cunorm.layer_norm_backward, NormGrads, given, over, **options)


@pytest.mark.parametrize("groups", [1, 64])
def test_in_one_row_any_gradient_may_be_exactly_any_input(groups):
    """All operands have the shape of x; with 64 groups, the statistics also have this shape."""
    arrays = arrays_of(1, 64, "float32", "dy", "x", "d_residual", "gate")
    arrays = {name: array.reshape(64) for name, array in arrays.items()} | statistics((), groups)
    names = [name for name, array in arrays.items() if array.shape == (64,)]
    aliases = [{field: name} for field in NormGrads._fields for name in names]
    check(cunorm.layer_norm_backward, NormGrads, arrays, aliases, groups=groups)


# --- where the residual stream begins -------------------------------------------------------------


def test_where_x_is_returned_as_the_stream_y_may_be_any_other_input():
    arrays = {name: draw(name, 1003, "float32") for name in ("x", "gate", "weight")}
    aliases, options = [{"y": "gate"}, {"y": "weight"}], {"residual": None, "groups": 17}
    check(cunorm.add_rms_norm, AddNorm, arrays, aliases, **options)


@pytest.mark.parametrize(("dtype", "stream"), [("float32", "float16"), ("bfloat16", "float32")])
def test_y_may_be_exactly_x_where_the_stream_is_written_to_another_array(dtype, stream):
    options = {"residual": None, "residual_dtype": stream}
    for width in (1, 64, 1003, 20000, 40001):
        arrays = {"x": draw("x", (5, width), dtype), "weight": draw("weight", width, dtype)}
        with at(width):
            check(cunorm.add_rms_norm, AddNorm, arrays, [{"y": "x"}], **options)


# --- group norms ----------------------------------------------------------------------------------


@pytest.mark.parametrize("spatial", [(4, 6), (70, 70)], ids=["small", "large"])
@pytest.mark.parametrize(("way", "over"), [("forward", "x"), ("backward", "x"), ("backward", "dy")])
def test_results_of_group_norms_may_be_exactly_inputs(way, over, spatial):
    for is_last, axis in product((True, False), (-1, 1)):
        case = {"samples": Samples(3, spatial, 10, 5, is_last, axis)}
        separate, shared = (
            call_of(f"group_norm_{way}", case | {"in_place": where}, OnNumpy()).run()
            for where in (None, over)
        )
        with at(is_last, axis):
            assert_same_fields(shared, separate)
