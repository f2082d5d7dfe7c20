# SPDX-License-Identifier: MIT
"""Where there is no C++ compiler, the reference answers, after one warning."""

from __future__ import annotations

import os
import warnings

import numpy as np
import pytest

import cunorm
from cunorm import GroupNormForward, GroupNormGrads, NormForward
from tests.support import group_norm_cases as groups
from tests.support import row_norm_cases as rows
from tests.support.bounds import check_forward
from tests.support.caches import begun_anew
from tests.support.covers import each, pairwise
from tests.support.group_bounds import check_group_forward
from tests.support.internals import compiler
from tests.support.kinds import numbers, to
from tests.support.operands import draw


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


def ends(factors):
    return {name: (choices[0], choices[-1]) for name, choices in factors.items()}


@each([case for f in (rows.FORWARD, rows.BACKWARD) for case in pairwise(ends(f), rows.telling)])
def test_row_norms_take_any_pair_of_choices(case):
    (rows.check_backward_case if "dy" in case else rows.check_forward_case)(case)


@each(pairwise(ends(groups.FORWARD)) + pairwise(ends(groups.BACKWARD), groups.telling))
def test_group_norms_take_any_pair_of_choices(case):
    check = groups.check_backward_case if "dy" in case else groups.check_forward_case
    for sizes in groups.SMALL[1:3]:
        check(case, sizes)


def test_row_norms_take_places_strides_and_no_rows():
    x, weight = draw("x", (6, 40), "float32"), draw("weight", 40, "float16")
    apart, place = cunorm.layer_norm_forward(x, weight, residual_dtype="float16"), x.copy()
    out = NormForward(y=place, residual=np.empty((6, 40), np.float16))
    f = cunorm.layer_norm_forward(place, weight, out=out)
    assert f.y is place
    for found, right in zip(f, apart, strict=True):
        np.testing.assert_array_equal(found, right)
    strided = np.zeros((6, 80), np.float32)
    y = cunorm.rms_norm(x[::-1], out=strided[:, 5:45])
    np.testing.assert_array_equal(y, cunorm.rms_norm(x)[::-1])
    assert not strided[:, 45:].any()
    saved = {"rstd": f.rstd[:0], "mean": f.mean[:0]}
    none = cunorm.layer_norm_backward(x[:0], x[:0], weight, weight, **saved)
    assert none.dx.shape == (0, 40)
    assert not none.dweight.any()
    assert not none.dbias.any()


def test_group_norms_take_places_strides_and_no_samples():
    x, dy = (draw(name, (3, 6, 4, 10), "float32") for name in ("x", "dy"))
    right = groups.run(x, dy, 5)
    for place in (0, 1):
        copies = [x.copy(), dy.copy()]
        into = groups.run(*copies, 5, backward={"out": GroupNormGrads(dx=copies[place])}).dx
        assert into is copies[place]
        np.testing.assert_array_equal(into, right.dx)
    strided = np.zeros((3, 6, 4, 20), np.float32)[..., ::2]
    strided[...] = x
    np.testing.assert_array_equal(groups.run(strided, dy, 5).dx, right.dx)
    place = x.copy()
    assert cunorm.instance_norm(place, out=place) is place
    np.testing.assert_array_equal(place, cunorm.instance_norm(x))
    none = groups.run(x[:0], dy[:0], 5)
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
