# SPDX-License-Identifier: MIT
"""With `accumulate=True`, dweight and dbias are added to the values in `out`, and rounded once.

The former values are added in float64 to a float64 sum. The result therefore has the bits of a
gradient that another call wrote to a float64 array, plus the former values, rounded to the result's
dtype. tests/operators checks sums that are added to float64 values against their bounds.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.calls import call_of, devices, fields, functions_taking, host, to
from tests.support.operands import assert_same_bits, at, draw

# No, few and many rows, whole and in groups; large and small samples.
OF_ROWS = [((1, 5), 1), ((50, 64), 4), ((3, 7, 33), 1), ((3000, 8), 2), ((9, 1003), 1), ((0, 8), 1)]
OF_IMAGES = [((2, 4900, 8), 2), ((3, 8, 8), 4), ((1, 2, 6), 6), ((0, 8, 8), 4)]
ACCUMULATING = functions_taking("accumulate")
# Dtypes of parameters, and of the arrays in `out`.
PAIRS = [("float32", "float64"), ("bfloat16", "float32")]
CASES = [
    (name, *PAIRS[number % 2]) for number, name in enumerate([*ACCUMULATING, ACCUMULATING[-1]])
]


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
    """Return the parameters' gradients in float64 arrays."""
    wanted, shape = sums_of(call)
    out = {field: to(call.kind, np.full(shape, np.nan)) for field in wanted}
    call.make(out=call.result(**out))
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
