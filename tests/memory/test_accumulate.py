# SPDX-License-Identifier: MIT
"""`accumulate=True`: dweight and dbias are added to what `out` holds, and rounded once.

What was there is added in float64, to a sum that is float64: so that the result is, to the bit, the
gradient that float64 arrays get, plus what was there, rounded to the array's dtype. That gradient
is within its bounds.
"""

from __future__ import annotations

import numpy as np
import pytest

import cunorm
from cunorm import NormGrads, reference
from tests.support import internals
from tests.support.bounds import check_backward
from tests.support.calls import arrays_of, call_of, devices, fields, host, taking, to
from tests.support.group_bounds import check_group_backward
from tests.support.operands import assert_same_bits, at, draw

# Of few rows and many, whole and in groups; of group norms, in one launch on a CPU and in several.
OF_ROWS = [((1, 5), 1), ((50, 64), 4), ((3, 7, 33), 1), ((3000, 8), 2), ((9, 1003), 1)]
OF_IMAGES = [((3, 8, 8), 4), ((2, 4900, 8), 2), ((1, 2, 6), 6)]
SMALL = {"numpy": None, "cupy": 2}  # cases, for GPUs that are interpreted
ADDING = taking("accumulate")
EPS = 1e-5


def calls_of(name, kind, dtype="float32"):
    """Yield calls of several sizes, whose parameters have a dtype."""
    groups, sizes = ("num_groups", OF_IMAGES) if "group" in name else ("groups", OF_ROWS)
    for shape, number in sizes[: SMALL[kind]]:
        call = call_of(name, shape, kind, **{groups: number})
        for key in {"weight", "bias"} & call.arrays.keys():
            call.arrays[key] = to(kind, draw(key, shape[-1], dtype))
        with at(shape, number):
            yield call


def parameters_of(call):
    """Return which gradients there are of parameters, and their shape."""
    return [field for field in ("dweight", "dbias") if field in call.out], call.shapes["weight"]


def exact_of(call):
    """Return the parameters' gradients as arrays of float64 get them, held to the oracle."""
    wanted, shape = parameters_of(call)
    out = {field: to(call.kind, np.full(shape, np.nan)) for field in wanted}
    with_its_statistics(call)
    grads = call.make(out=call.result(**out))
    hold_to_the_oracle(call, call.result(**{f: host(array) for f, array in fields(grads).items()}))
    return {field: host(array) for field, array in out.items()}


def with_its_statistics(call):
    """Let a call have the statistics of its x."""
    forward = getattr(reference, call.name.replace("backward", "forward"))
    exact = forward(host(call.arrays["x"]), **call.said, eps=EPS)
    for name in {"rstd", "mean"} & call.arrays.keys():
        numbers = getattr(exact, name).astype(np.float32)
        call.arrays[name] = to(call.kind, numbers.reshape(call.shapes[name]))


def hold_to_the_oracle(call, grads):
    given = {key: host(array) for key, array in arrays_of(call.arrays).items()}
    center = "mean" in given
    operands = {"bias": None} | {k: a for k, a in given.items() if k not in ("rstd", "mean")}
    if "num_groups" in call.said:
        check_group_backward(grads, **operands, **call.said, eps=EPS)
    else:
        check_backward(grads, **operands, **call.said | {"center": center}, eps=EPS)


def check_added(call, into, **told):
    """Add twice, as two micro-batches do, and compare what there is after each call."""
    wanted, shape = parameters_of(call)
    before = {field: draw(field, shape, into, deviation=30) for field in wanted}
    out = call.result(**{field: to(call.kind, array) for field, array in before.items()})
    for turn in range(2):
        call.arrays["dy"][...] = to(call.kind, draw(f"dy {turn}", call.shapes["dy"], "float32"))
        exact = exact_of(call)
        sums = {field: before[field].astype(np.float64) + exact[field] for field in wanted}
        right = {field: total.astype(into) for field, total in sums.items()}
        made = fields(call.make(accumulate=False))
        grads = call.make(out=out, accumulate=True, **told)
        for field, array in fields(grads).items():
            if field in wanted:
                assert array is getattr(out, field)
            assert_same_bits(host(array), right.get(field, host(made[field])), field)
        before = right


@devices
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("into", ["float32", "float64"])
@pytest.mark.parametrize("name", ADDING)
def test_what_was_there_and_the_gradient_are_added_and_rounded_once(name, into, dtype, kind):
    """Gradients with rows are written as ever; and a workspace makes no difference."""
    for call in calls_of(name, kind, dtype):
        check_added(call, into)
        check_added(call, into, workspace=call.sized_workspace())


@pytest.mark.parametrize("into", ["float32", "float64"])
@pytest.mark.parametrize("name", ADDING)
def test_the_reference_adds_and_rounds_once(name, into, monkeypatch):
    internals._again.forget()
    monkeypatch.setattr(internals._backend, "has_compiler", lambda: False)
    for call in calls_of(name, "numpy"):
        check_added(call, into)
    internals._again.forget()


def test_gradients_too_small_for_the_weights_dtype_are_not_lost():
    """The reason for main gradients in float32: bfloat16 would stay at 256, or at 1."""
    call = call_of("layer_norm_backward")
    call.arrays |= {"bias": draw("bias", 8, "bfloat16"), "dy": np.full((4, 8), 2**-9, np.float32)}
    arrays = {key: a[:4] if len(a) == 5 else a for key, a in call.arrays.items()} | {"gate": None}
    dbias = np.full(8, 256, np.float32)
    for _ in range(128):
        told = {"needs": ("bias",), "out": NormGrads(dbias=dbias), "accumulate": True}
        cunorm.layer_norm_backward(**arrays, **told)
    np.testing.assert_array_equal(dbias, 257)


@pytest.mark.parametrize("needs", [("weight",), ("bias",), ("x", "bias"), ("x",), ()])
@pytest.mark.parametrize("name", ["layer_norm_backward", "group_norm_backward"])
def test_only_what_is_needed_is_added_to(name, needs):
    """And no array is asked for where there is nothing to add."""
    call = call_of(name)
    exact = exact_of(call)
    before = {f"d{key}": draw(key, 8, "float32") for key in ("weight", "bias") if key in needs}
    out = call.result(**{field: array.copy() for field, array in before.items()})
    grads = call.make(needs=needs, out=out, accumulate=True)
    assert (grads.dx is None) == ("x" not in needs)
    for field in exact:
        assert (getattr(grads, field) is None) == (field not in before)
    for field, old in before.items():
        assert_same_bits(getattr(grads, field), (old + exact[field]).astype(np.float32), field)


@pytest.mark.parametrize("name", ADDING)
def test_without_rows_nothing_changes(name):
    call = call_of(name, (0, 4, 8))
    before = np.array([np.inf, -np.inf, np.nan, 1, 2, 3, 4, 5], np.float32)
    wanted, _ = parameters_of(call)
    out = call.result(**{field: before.copy() for field in wanted})
    grads = call.make(out=out, accumulate=True)
    for field in wanted:
        assert_same_bits(getattr(grads, field), before)
