# SPDX-License-Identifier: MIT
"""`accumulate=True`: dweight and dbias are added to what `out` holds, and rounded once.

What was there is added in float64, to a sum that is float64: so that the result is, to the bit, the
gradient that float64 arrays get, plus what was there, rounded to the array's dtype.
"""

from inspect import signature

import numpy as np
import pytest

import cunorm
from cunorm import NormGrads, _again, _backend, reference
from tests.support.bounds import assert_within, check_backward, param_grad_bound
from tests.support.calls import BACKWARDS, WIDTH, backward, given, raises
from tests.support.operands import DTYPES, assert_same_bits, at, bits, draw
from tests.support.row_errors import Options, rows_of

EPS = 1e-5
SHAPES = [((1, 5), 1), ((50, 64), 4), ((3, 7, 33), 1), ((3000, 8), 2), ((9, 1003), 1)]


def arrays_of(shape, dtype, groups=1):
    """Draw what a centred backward reads; x and dy are of float32."""
    arrays = {name: draw(name, shape, "float32") for name in ("dy", "x")}
    arrays |= {name: draw(name, shape[-1], dtype) for name in ("weight", "bias")}
    saved = cunorm.layer_norm_forward(arrays["x"], groups=groups, eps=EPS)
    return arrays | {"rstd": saved.rstd, "mean": saved.mean}


def parameter_grads(arrays, dtype, **told):
    """Return dweight and dbias in arrays of a dtype, which held NaN."""
    out = [np.full(arrays["weight"].shape, np.nan, dtype) for _ in range(2)]
    grads = NormGrads(dweight=out[0], dbias=out[1])
    cunorm.layer_norm_backward(**arrays, **told, needs=("weight", "bias"), out=grads)
    return out


def accumulated(arrays, before, **told):
    """Return copies of `before`, a dweight and a dbias, to which a call has added."""
    out = NormGrads(dweight=before[0].copy(), dbias=before[1].copy())
    grads = cunorm.layer_norm_backward(**arrays, **told, out=out, accumulate=True)
    assert grads.dweight is out.dweight
    assert grads.dbias is out.dbias
    return grads.dweight, grads.dbias


def drawn_before(width, dtype):
    return [draw(name, width, dtype, deviation=30) for name in ("dweight", "dbias")]


# --- what is added --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("into", ["float32", "float64"])
def test_what_was_there_and_the_gradient_are_added_and_rounded_once(into, dtype):
    for shape, groups in SHAPES:
        arrays, before = arrays_of(shape, dtype, groups), drawn_before(shape[-1], into)
        exact = parameter_grads(arrays, np.float64, groups=groups)
        for told in ({}, {"needs": ("weight", "bias")}):
            after = accumulated(arrays, before, groups=groups, **told)
            for old, gradient, new in zip(before, exact, after, strict=True):
                with at(shape, groups, told):
                    assert_same_bits(new, (old.astype(np.float64) + gradient).astype(into))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("into", ["float32", "float64"])
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "reference"])
def test_the_sum_is_within_the_gradients_bound_and_one_rounding(monkeypatch, compiled, into, dtype):
    """8 u of the summands' sizes, as for the gradient alone, and half an ulp of what is stored."""
    if not compiled:
        _again.forget()
        monkeypatch.setattr(_backend, "has_compiler", lambda: False)
    for shape, groups in SHAPES:
        arrays, before = arrays_of(shape, dtype, groups), drawn_before(shape[-1], into)
        after = accumulated(arrays, before, groups=groups)
        norm = Options(eps=EPS, center=True, groups=groups)
        dy, x, weight, bias = (arrays[name] for name in ("dy", "x", "weight", "bias"))
        rows = rows_of(x, weight, bias, norm, compute="float32", rounded_to=x.dtype)
        f = reference.layer_norm_forward(x, groups=groups, eps=EPS)
        exact = reference.layer_norm_backward(
            dy, x, weight, bias, rstd=f.rstd, mean=f.mean, groups=groups
        )
        dy = norm.rows(dy)
        terms = (rows.dweight_terms(dy), rows.dbias_terms(dy))
        gradients = (exact.dweight, exact.dbias)
        for old, gradient, (size, _), new in zip(before, gradients, terms, after, strict=True):
            expected = old.astype(np.float64) + gradient
            bound = param_grad_bound(expected, size.sum(axis=0).reshape(expected.shape), into)
            with at(shape, groups):
                assert_within(new, expected, bound)


@pytest.mark.parametrize("into", ["float32", "float64"])
def test_two_calls_add_up(into):
    """As two micro-batches do: each sum is rounded once."""
    for shape, groups in SHAPES:
        first = arrays_of(shape, "bfloat16", groups)
        second = arrays_of((5, *shape[1:]), "bfloat16", groups)
        before = drawn_before(shape[-1], into)
        between = accumulated(first, before, groups=groups)
        after = accumulated(second, between, groups=groups)
        exact = parameter_grads(second, np.float64, groups=groups)
        for old, gradient, new in zip(between, exact, after, strict=True):
            with at(shape, groups):
                assert_same_bits(new, (old.astype(np.float64) + gradient).astype(into))


def test_gradients_too_small_for_the_weights_dtype_are_not_lost():
    """The reason for main gradients in float32: bfloat16 would stay at 256, or at 1."""
    arrays = arrays_of((4, WIDTH), "bfloat16")
    arrays["dy"] = np.full((4, WIDTH), 2**-9, np.float32)
    dbias = np.full(WIDTH, 256, np.float32)
    for _ in range(128):
        cunorm.layer_norm_backward(
            **arrays, needs=("bias",), out=NormGrads(dbias=dbias), accumulate=True
        )
    np.testing.assert_array_equal(dbias, 257)


@pytest.mark.parametrize("needs", [("weight",), ("bias",), ("x", "bias"), ("x",), ("gate",), ()])
def test_only_what_is_needed_is_added_to(needs):
    arrays = arrays_of((50, 64), "bfloat16")
    before = dict(zip(("weight", "bias"), drawn_before(64, "float32"), strict=True))
    exact = dict(zip(("weight", "bias"), parameter_grads(arrays, np.float64), strict=True))
    out = NormGrads(**{f"d{name}": before[name].copy() for name in before if name in needs})
    grads = cunorm.layer_norm_backward(**arrays, needs=needs, out=out, accumulate=True)
    for name, old in before.items():
        gradient = getattr(grads, f"d{name}")
        assert (gradient is None) == (name not in needs)
        if name in needs:
            assert_same_bits(gradient, (old + exact[name]).astype(np.float32), name)
    assert (grads.dx is None) == ("x" not in needs)


def test_gradients_with_rows_are_written_as_ever():
    arrays = arrays_of((50, 64), "float32") | {"gate": draw("gate", (50, 64), "float32")}
    expected = cunorm.layer_norm_backward(**arrays)
    rows = [np.full((50, 64), np.nan, np.float32) for _ in range(2)]
    before = drawn_before(64, "float32")
    out = NormGrads(dx=rows[0], dgate=rows[1], dweight=before[0], dbias=before[1])
    grads = cunorm.layer_norm_backward(**arrays, out=out, accumulate=True)
    assert_same_bits(grads.dx, expected.dx)
    assert_same_bits(grads.dgate, expected.dgate)
    operands = (arrays["dy"], arrays["x"], arrays["weight"], arrays["bias"])
    rest = grads._replace(dweight=None, dbias=None)
    check_backward(rest, *operands, eps=EPS, center=True, gate=arrays["gate"])


@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8)], ids=str)
@pytest.mark.parametrize("into", ["float32", "float64"])
def test_without_rows_nothing_changes(into, shape):
    arrays, before = arrays_of(shape, "float16"), drawn_before(8, into)
    before[0][:3] = (np.inf, -np.inf, np.nan)
    for groups in (1, 2):
        statistics = (*shape[:-1], 2) if groups == 2 else shape[:-1]
        for name in ("rstd", "mean"):
            arrays[name] = np.ones(statistics, np.float32)
        for old, new in zip(before, accumulated(arrays, before, groups=groups), strict=True):
            assert_same_bits(new, old)


def test_without_accumulate_it_does_not_matter_what_was_there():
    arrays = arrays_of((50, 64), "float32")
    expected = cunorm.layer_norm_backward(**arrays, needs=("weight", "bias"))
    for value in (np.nan, np.inf, 7.0):
        out = [np.full(64, value, np.float32) for _ in range(2)]
        grads = NormGrads(dweight=out[0], dbias=out[1])
        cunorm.layer_norm_backward(**arrays, out=grads, accumulate=False)
        assert_same_bits(out[0], expected.dweight)
        assert_same_bits(out[1], expected.dbias)


def test_a_workspace_makes_no_difference():
    arrays, before = arrays_of((50, 64), "bfloat16"), drawn_before(64, "float32")
    operands = (arrays["x"], arrays["weight"], arrays["bias"])
    size = cunorm.workspace_size("layer_norm_backward", *operands)
    workspace = np.full(size // 4, np.nan, np.float32)
    with_it = accumulated(arrays, before, workspace=workspace)
    for new, other in zip(with_it, accumulated(arrays, before), strict=True):
        assert_same_bits(new, other)


def test_torch_knows_that_an_array_was_added_to():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    arrays = arrays_of((50, 64), "float32")
    before = drawn_before(64, "float32")
    theirs = {name: torch.from_numpy(array) for name, array in arrays.items()}
    out = NormGrads(dweight=torch.from_numpy(before[0].copy()), dbias=torch.zeros(64))
    version = out.dweight._version
    cunorm.layer_norm_backward(**theirs, out=out, accumulate=True)
    assert out.dweight._version > version
    assert_same_bits(out.dweight.numpy(), accumulated(arrays, before)[0])


# --- errors ---------------------------------------------------------------------------------------

ADDING = [name for name in BACKWARDS if "accumulate" in signature(getattr(cunorm, name)).parameters]
PARAMETERS = [
    (name, parameter)
    for name in ADDING
    for parameter in ("weight", "bias")
    if parameter in signature(getattr(cunorm, name)).parameters
]
TO_ADD = "expected an array of float32 or float64 to add to, as accumulate is True"


@pytest.mark.parametrize("name", ADDING)
@pytest.mark.parametrize("accumulate", [1, 0, None, "yes", np.True_], ids=repr)
def test_accumulate_must_be_a_bool(name, accumulate):
    with raises(TypeError, f"{name}: accumulate is {accumulate!r}, expected True or False"):
        backward(name, given().dy, given().x, accumulate=accumulate)


@pytest.mark.parametrize(("name", "parameter"), PARAMETERS)
def test_accumulate_needs_an_array_to_add_to(name, parameter):
    arrays = given()
    text = f"{name}: out.d{parameter} is None, {TO_ADD}"
    told = {parameter: getattr(arrays, parameter), "accumulate": True}
    dx = np.full_like(arrays.x, 7)
    for out in (None, NormGrads(), NormGrads(dx=dx)):
        with raises(ValueError, text):
            backward(name, arrays.dy, arrays.x, **told, out=out)
    assert (dx == 7).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("name", "parameter"), PARAMETERS)
def test_accumulate_adds_to_no_narrow_array(name, parameter, dtype):
    arrays, into = given(), np.ones(WIDTH, DTYPES[dtype])
    before = bits(into).copy()
    told = {parameter: getattr(arrays, parameter).astype(DTYPES[dtype]), "accumulate": True}
    with raises(ValueError, f"{name}: out.d{parameter} is of dtype {dtype}, {TO_ADD}"):
        out = NormGrads(**{f"d{parameter}": into})
        backward(name, arrays.dy, arrays.x, **told, out=out)
    np.testing.assert_array_equal(bits(into), before)


@pytest.mark.parametrize("name", ADDING)
def test_accumulate_asks_for_no_array_where_there_is_nothing_to_add(name):
    arrays, told = given(), {"accumulate": True}
    expected = backward(name, arrays.dy, arrays.x)
    assert_same_bits(backward(name, arrays.dy, arrays.x, **told).dx, expected.dx)
    told["needs"] = ("x",)
    grads = backward(name, arrays.dy, arrays.x, weight=arrays.weight, **told)
    assert grads.dweight is None


def test_only_norms_with_parameters_accumulate():
    arrays = given()
    with pytest.raises(TypeError, match="unexpected keyword argument 'accumulate'"):
        cunorm.l2_norm_backward(arrays.dy, arrays.x, rstd=arrays.rstd, accumulate=True)
