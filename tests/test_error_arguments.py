# SPDX-License-Identifier: MIT
"""Wrong eps, c, center and needs are named: function, argument, what it got, what it expected."""

import numpy as np
import pytest
from calls import BACKWARDS, FORWARDS, backward, forward, given, raises

import cunorm


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


NEEDS = "expected a tuple of 'x', 'weight', 'bias', 'gate'"


@pytest.mark.parametrize("name", [name for name in BACKWARDS if name != "l2_norm_backward"])
@pytest.mark.parametrize("needs", [("x", "y"), ["dx"], ("",), ({},)], ids=str)
def test_an_unknown_name_in_needs_is_refused(name, needs):
    with raises(ValueError, f"{name}: needs is {needs!r}, {NEEDS}"):
        backward(name, given().dy, given().x, needs=needs)


@pytest.mark.parametrize("needs", ["x", None, 1, iter(("x",))], ids=lambda n: type(n).__name__)
def test_needs_that_is_no_collection_of_names_is_refused(needs):
    """One string would be taken letter by letter, and an iterator be empty at its second use."""
    with raises(TypeError, f"rms_norm_backward: needs is {needs!r}, {NEEDS}"):
        backward("rms_norm_backward", given().dy, given().x, needs=needs)
