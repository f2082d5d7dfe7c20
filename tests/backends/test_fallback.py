# SPDX-License-Identifier: MIT
"""Where there is no C++ compiler, the reference answers, after one warning."""

from __future__ import annotations

import os
import warnings
from itertools import combinations

import numpy as np
import pytest

import cunorm
from cunorm import GroupNormForward, GroupNormGrads, NormForward, NormGrads
from tests.support.bounds import check_backward, check_forward
from tests.support.caches import begun_anew
from tests.support.covers import each, pairwise
from tests.support.group_bounds import check_group_backward, check_group_forward
from tests.support.internals import compiler
from tests.support.kinds import numbers, to
from tests.support.operands import DTYPES, NORMS, draw, optional, parameters, saved, weight_and_bias


@pytest.fixture(autouse=True)
def without_compiler():
    with begun_anew(CXX="", PATH=os.devnull), warnings.catch_warnings():
        assert compiler() is None
        warnings.filterwarnings("ignore", "cunorm found no C")
        yield


X, MEAN = np.ones((3, 5, 8), np.float32), np.ones((3, 2), np.float32)
CALLS = {
    "rms_norm_backward": lambda: cunorm.rms_norm_backward(X[0], X[0], rstd=X[0, :, 0]),
    "add_rms_norm": lambda: cunorm.add_rms_norm(X, X),
    "l2_norm": lambda: cunorm.l2_norm(X),
    "group_norm": lambda: cunorm.group_norm(X, 2),
    "instance_norm": lambda: cunorm.instance_norm(X),
    "group_norm_forward": lambda: cunorm.group_norm_forward(
        X,
        2,
        out=GroupNormForward(np.empty_like(X), MEAN.copy(), MEAN.copy()),
        workspace=np.empty(10000, np.uint8),
    ),
    "group_norm_backward": lambda: cunorm.group_norm_backward(X, X, 2, mean=MEAN, rstd=MEAN),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_there_is_one_warning_and_it_points_to_the_caller(call):
    """A shape whose plan is not known yet, and again, takes no other path to it."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        call()
        call()
        cunorm.layer_norm(X)
    (warning,) = seen
    assert warning.category is RuntimeWarning
    for text in ("no C++ compiler", "install g++ or clang++", "CXX"):
        assert text in str(warning.message)
    assert warning.filename == __file__


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NORMS)
def test_every_row_norm_is_within_its_bounds(name, dtype):
    norm, width = NORMS[name], 33
    x, residual, dy, d_residual = (
        draw(o, (7, width), dtype) for o in ("x", "residual", "dy", "d_residual")
    )
    given = parameters(norm, width, dtype)
    pair, meaning, asked = weight_and_bias(given), norm.meaning(width), norm.asked()
    y = getattr(cunorm, name)(x, **given, **asked)
    check_forward(NormForward(y), x, *pair, **meaning)
    forward = getattr(cunorm, f"{name}_forward")(x, **given, **asked)
    check_forward(forward, x, *pair, **meaning)
    assert forward.rstd.dtype == (np.float64 if dtype == "float64" else np.float32)
    more = {}
    if norm.has_residual:
        added = getattr(cunorm, f"add_{name}")(x, residual, **given, **asked)
        check_forward(NormForward(*added), x, *pair, residual, **meaning)
        more["d_residual"] = d_residual
    backward = getattr(cunorm, f"{name}_backward")
    grads = backward(dy, x, **given, **asked, **saved(norm, forward), **more)
    check_backward(grads, dy, x, *pair, *more.values(), **meaning)


VARIANTS = {
    "gate_position": [None, "pre", "post"],
    "dtype": ["bfloat16", "float32"],
    "groups": [1, 3],
    "round_before_weight": [False, True],
}


@each(pairwise(VARIANTS))
def test_gates_groups_offsets_and_roundings_are_those_of_the_kernels(case):
    dtype, position = case["dtype"], case["gate_position"]
    x, dy, gate = (draw(o, (7, 33), dtype) for o in ("x", "dy", "gate"))
    weight, bias = (draw(o, 33, "float16") for o in ("weight", "bias"))
    residual, d_residual = (draw(o, (7, 33), "float32") for o in ("residual", "d_residual"))
    norm = {name: case[name] for name in ("groups", "round_before_weight")}
    norm |= {"weight_offset": 1.0, "center": True, "c": 3.0}
    if position:
        norm |= {"gate": gate, "gate_activation": "gelu", "gate_position": position}
    f = cunorm.normalize_forward(x, weight, bias, residual=residual, **norm)
    check_forward(f, x, weight, bias, residual, eps=1e-6, **norm)
    given = (dy, f.residual, weight, bias)
    told = {"rstd": f.rstd, "mean": f.mean, "d_residual": d_residual, "x_dtype": x.dtype, **norm}
    whole = cunorm.normalize_backward(*given, **told)
    assert (whole.dx.dtype, whole.dresidual.dtype) == (x.dtype, np.float32)
    check_backward(whole, *given, d_residual, eps=1e-6, x_dtype=x.dtype, **norm)
    assert (whole.dgate is None) == (position is None)
    hold_needs_and_sums(given, told, whole)


def hold_needs_and_sums(given, told, whole):
    """Check that fewer gradients are the same, and that sums are added to what is there."""
    for size in range(1, 5):
        for needs in combinations(("x", "weight", "bias", "gate"), size):
            part = cunorm.normalize_backward(*given, **told, needs=needs)
            for field, gradient in whole._asdict().items():
                wanted = gradient if {"dresidual": "x"}.get(field, field[1:]) in needs else None
                np.testing.assert_array_equal(getattr(part, field), wanted, f"{field} of {needs}")
    before = {f"d{o}": draw(o, 33, "float32") for o in ("weight", "bias")}
    out = NormGrads(**{o: array.copy() for o, array in before.items()})
    cunorm.normalize_backward(*given, **told, out=out, accumulate=True)
    exact = NormGrads(dweight=np.empty(33), dbias=np.empty(33))
    cunorm.normalize_backward(*given, **told, out=exact)
    for o, array in before.items():
        added = (array.astype(np.float64) + getattr(exact, o)).astype(np.float32)
        np.testing.assert_array_equal(getattr(out, o), added)


def test_dtypes_streams_places_and_zero_rows_are_those_of_the_kernels():
    x, stream = draw("x", (6, 40), "bfloat16"), draw("residual", (6, 40), "float32")
    weight = draw("weight", 40, "float16")
    forward = cunorm.rms_norm_forward(x, weight, residual=stream, dtype="float16")
    check_forward(forward, x, weight, None, stream, eps=1e-6)
    assert (forward.y.dtype, forward.residual.dtype) == (np.float16, np.float32)
    cast = cunorm.layer_norm_forward(x, residual_dtype="float32")
    check_forward(cast, x, None, None, residual_dtype=np.float32, center=True, eps=1e-5)

    place = stream.copy()
    assert cunorm.rms_norm(place, out=place) is place
    np.testing.assert_array_equal(place, cunorm.rms_norm(stream))
    strided = np.zeros((6, 80), np.float32)
    np.testing.assert_array_equal(cunorm.rms_norm(stream[::-1], out=strided[:, 5:45]), place[::-1])
    assert not strided[:, 45:].any()

    saved = {"rstd": forward.rstd[:0], "mean": forward.rstd[:0]}
    none = cunorm.layer_norm_backward(x[:0], x[:0], weight, weight, **saved)
    assert none.dx.shape == (0, 40)
    assert not none.dweight.any()
    assert not none.dbias.any()


# --- group norms ----------------------------------------------------------------------------------

GROUP_NORMS = {
    "x": list(DTYPES),
    "y": [None, "bfloat16", "float64"],
    "weight": [None, "float32"],
    "bias": [None, "float16"],
    "activation": [None, "silu", "gelu", "tanh"],
    "channel_axis": [-1, 1],
    "memory": [-1, 1],
    "needs": [("x", "weight", "bias"), ("x",), ("weight", "bias")],
}


@each(pairwise(GROUP_NORMS))
def test_every_group_norm_is_within_its_bounds_and_lies_as_x_does(case):
    axis, memory = case["channel_axis"], case["memory"]
    shape = (3, 4, 6, 10) if memory == -1 else (3, 10, 4, 6)
    x, dy = (np.moveaxis(draw(o, shape, case["x"]), memory, axis) for o in ("x", "dy"))
    given = (5, *(optional(o, 10, case[o]) for o in ("weight", "bias")))
    told = {"activation": case["activation"], "channel_axis": axis}
    f = cunorm.group_norm_forward(x, *given, **told, dtype=case["y"])
    check_group_forward(f, x, *given, **told, eps=1e-5)
    y = cunorm.group_norm(x, *given, **told, dtype=case["y"])
    np.testing.assert_array_equal(y, f.y)
    assert f.y.dtype == DTYPES[case["y"] or case["x"]]
    saved, needs = {"mean": f.mean, "rstd": f.rstd}, case["needs"]
    grads = cunorm.group_norm_backward(dy, x, *given, **saved, **told, needs=needs)
    check_group_backward(grads, dy, x, *given, **told, eps=1e-5)
    assert (grads.dx is None) == ("x" not in needs)
    for name in ("weight", "bias"):
        assert (getattr(grads, f"d{name}") is None) == (not case[name] or name not in needs)
    order = np.argsort(x.strides)
    for result in (f.y, grads.dx):
        assert result is None or (np.argsort(result.strides) == order).all()


def test_group_norms_take_places_strides_and_no_samples():
    x, dy = (draw(name, (3, 6, 4, 10), "float32") for name in ("x", "dy"))
    weight = draw("weight", 10, "float32")

    def backward(dy, x, **more):
        f = cunorm.group_norm_forward(x, 5, weight, weight)
        saved = {"mean": f.mean, "rstd": f.rstd}
        return cunorm.group_norm_backward(dy, x, 5, weight, weight, **saved, **more)

    right = backward(dy, x)
    for place in (0, 1):
        copies = [dy.copy(), x.copy()]
        into = backward(*copies, out=GroupNormGrads(dx=copies[place])).dx
        assert into is copies[place]
        np.testing.assert_array_equal(into, right.dx)
    strided = np.zeros((3, 6, 4, 20), np.float32)[..., ::2]
    strided[...] = x
    np.testing.assert_array_equal(backward(dy, strided).dx, right.dx)
    place = x.copy()
    assert cunorm.instance_norm(place, out=place) is place
    np.testing.assert_array_equal(place, cunorm.instance_norm(x))
    none = backward(dy[:0], x[:0])
    assert none.dx.shape == (0, 6, 4, 10)
    assert not none.dweight.any()
    assert not none.dbias.any()


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_arrays_of_other_frameworks_are_served_too(framework):
    pytest.importorskip(framework, reason=f"{framework} is not installed")
    for dtype in ("float32", "bfloat16"):
        x = draw("x", (3, 4, 10), dtype)
        given = to(framework, x)
        y, of_groups = cunorm.rms_norm(given), cunorm.group_norm(given, 5)
        assert type(y) is type(of_groups) is type(given)
        check_forward(NormForward(numbers(y)), x, None, None, eps=1e-6)
        check_group_forward(GroupNormForward(numbers(of_groups)), x, 5, None, None, eps=1e-5)
