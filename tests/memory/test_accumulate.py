# SPDX-License-Identifier: MIT
"""With `accumulate=True`, dweight and dbias are added to the values in `out`, and rounded once.

The former values are added in float64 to a float64 sum. The result therefore has the bits of a
gradient that another call wrote to a float64 array, plus the former values, rounded to the result's
dtype. The tests check the float64 gradient against its bounds.
"""

from __future__ import annotations

import numpy as np
import pytest

import cunorm
from cunorm import NormGrads, reference
from tests.support.bounds import check_backward
from tests.support.calls import arrays_of, call_of, devices, fields, functions_taking, host, to
from tests.support.group_bounds import check_group_backward
from tests.support.operands import assert_same_bits, at, draw

# Few and many rows, whole and in groups; large and small samples.
OF_ROWS = [((1, 5), 1), ((50, 64), 4), ((3, 7, 33), 1), ((3000, 8), 2), ((9, 1003), 1)]
OF_IMAGES = [((2, 4900, 8), 2), ((3, 8, 8), 4), ((1, 2, 6), 6)]
ACCUMULATING = functions_taking("accumulate")
# Dtypes of parameters, and of the arrays in `out`.
PAIRS = [("float32", "float64"), ("bfloat16", "float32")]
CASES = [
    (name, *PAIRS[number % 2]) for number, name in enumerate([*ACCUMULATING, ACCUMULATING[-1]])
]
EPS = 1e-5


def calls_of(name, kind, dtype):
    """Yield calls of several sizes, with parameters of a dtype."""
    sizes = OF_IMAGES if "group" in name else OF_ROWS
    for shape, number in sizes[1:2] if kind == "cupy" else sizes:  # each size needs many kernels
        call = call_of(name, shape, kind, groups=number, num_groups=number)
        for key in {"weight", "bias"} & call.arrays.keys():
            call.arrays[key] = to(kind, draw(key, shape[-1], dtype))
        with at(shape, number):
            yield call


def sums_of(call):
    """Return the names of the parameters' gradients, and their shape."""
    return [field for field in ("dweight", "dbias") if field in call.out], call.shapes["weight"]


def exact_of(call):
    """Return the parameters' gradients in float64 arrays, checked against the oracle."""
    wanted, shape = sums_of(call)
    forward = getattr(reference, call.name.replace("backward", "forward"))
    right = forward(host(call.arrays["x"]), **call.options, eps=EPS)
    for key in {"rstd", "mean"} & call.arrays.keys():
        numbers = getattr(right, key).astype(np.float32)
        call.arrays[key] = to(call.kind, numbers.reshape(call.shapes[key]))
    out = {field: to(call.kind, np.full(shape, np.nan)) for field in wanted}
    grads = fields(call.make(out=call.result(**out)))
    grads = call.result(**{field: host(array) for field, array in grads.items()})
    given = {key: host(array) for key, array in arrays_of(call.arrays).items()}
    operands = {"bias": None} | {k: a for k, a in given.items() if k not in ("rstd", "mean")}
    if "num_groups" in call.options:
        check_group_backward(grads, **operands, **call.options, eps=EPS)
    else:
        check_backward(grads, **operands, **call.options | {"center": "mean" in given}, eps=EPS)
    return {field: host(array) for field, array in out.items()}


@devices
@pytest.mark.parametrize(("name", "dtype", "into"), CASES)
def test_a_former_value_plus_a_gradient_is_rounded_once(name, dtype, into, kind):
    """Add twice, as for two micro-batches; dx and dgate are written as usual."""
    for call in calls_of(name, kind, dtype):
        wanted, shape = sums_of(call)
        before = {field: draw(field, shape, into, deviation=30) for field in wanted}
        out = call.result(**{field: to(kind, array) for field, array in before.items()})
        for kwargs in ({}, {"workspace": call.make_workspace()}):
            call.arrays["dy"][...] = to(kind, draw(f"dy {kwargs}", call.shapes["dy"], "float32"))
            exact = exact_of(call)
            results = {field: host(array) for field, array in fields(call.make()).items()}
            for field in wanted:
                results[field] = (before[field].astype(np.float64) + exact[field]).astype(into)
            for field, array in fields(call.make(out=out, accumulate=True, **kwargs)).items():
                assert field not in wanted or array is getattr(out, field)
                assert_same_bits(host(array), results[field], field)
            before = results


def test_gradients_too_small_for_the_weights_dtype_are_not_lost():
    """In bfloat16, the sum would stay at 256."""
    call = call_of("layer_norm_backward", (4, 8))
    call.arrays |= {"bias": draw("bias", 8, "bfloat16"), "dy": np.full((4, 8), 2**-9, np.float32)}
    dbias = np.full(8, 256, np.float32)
    kwargs = {"gate": None, "needs": ("bias",), "out": NormGrads(dbias=dbias), "accumulate": True}
    for _ in range(128):
        cunorm.layer_norm_backward(**call.arrays | kwargs)
    np.testing.assert_array_equal(dbias, 257)


@pytest.mark.parametrize("needs", [("bias",), ("x", "bias"), ()])
@pytest.mark.parametrize("name", ["layer_norm_backward", "group_norm_backward"])
def test_only_needed_gradients_are_accumulated(name, needs):
    """`out` needs no array if no parameter gradient is needed."""
    call = call_of(name)
    exact, before = exact_of(call), draw("dbias", 8, "float32")
    out = call.result(dbias=before.copy()) if needs else call.result()
    grads = call.make(needs=needs, out=out, accumulate=True)
    assert fields(grads).keys() - {"dresidual"} == {f"d{operand}" for operand in needs}
    if needs:
        assert_same_bits(grads.dbias, (before + exact["dbias"]).astype(np.float32))


@pytest.mark.parametrize("name", ACCUMULATING)
def test_without_rows_nothing_changes(name):
    call = call_of(name, (0, 4, 8))
    before = np.array([np.inf, -np.inf, np.nan, 1, 2, 3, 4, 5], np.float32)
    wanted, _ = sums_of(call)
    grads = call.make(
        out=call.result(**{field: before.copy() for field in wanted}), accumulate=True
    )
    for field in wanted:
        assert_same_bits(getattr(grads, field), before)
