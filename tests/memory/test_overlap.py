# SPDX-License-Identifier: MIT
"""Results and workspaces that share memory with another array are refused, unless exactly in place.

Each pair that there can be, one of them an element after the other; whatever calls went before.
"""

from __future__ import annotations

import numpy as np
import pytest

import cunorm
from cunorm import AddNorm, NormForward
from tests.support.calls import GROUP_NORMS, arrays_of, call_of, names, raises
from tests.support.operands import assert_same_bits, bits, draw
from tests.support.refused import IN_PLACE, OWN, RIGHT, Case, check_refused

X = draw("x", (5, 8), "float32")


def label(call, field):
    return "out" if call.result is None else f"out.{field}"


def may_be(name, field, argument):
    """Whether a result may be exactly that input."""
    if field in ("mean", "rstd"):
        return False
    if name in GROUP_NORMS:
        return field in ("y", "dx") and argument in ("x", "dy")
    return field != "residual" or argument in ("x", "residual")


def one_after_the_other(first, second):
    """Return arrays like two, of which the first begins an element before the second."""
    memory = np.zeros(max(first.size, second.size) + 1, np.float32)
    parts = memory[: first.size], memory[1 : second.size + 1]
    return [part.reshape(like.shape) for part, like in zip(parts, (first, second), strict=True)]


def changed(call, field, array, **more):
    return {"out": call.out_of(call.out | {field: array})} | more


@names
def test_a_result_that_overlaps_part_of_an_input_is_refused(name):
    call, cases = call_of(name, **RIGHT), []
    for field, result in call.out.items():
        for argument, array in arrays_of(call.arrays).items():
            expected = IN_PLACE if may_be(name, field, argument) else OWN
            text = f"{label(call, field)} overlaps {argument}, {expected}"
            for turned in (False, True):
                pair = [result, array][:: -1 if turned else 1]
                out, given = one_after_the_other(*pair)[:: -1 if turned else 1]
                change = changed(call, field, out, **{argument: given})
                cases.append(Case(name, ValueError, text, change))
    check_refused(cases)


@names
def test_a_result_that_overlaps_another_is_refused(name):
    """Nor may the two be the same array."""
    call, cases = call_of(name, **RIGHT), []
    results = [(field, array) for field, array in call.out.items()]
    if "dx" in call.out and name not in GROUP_NORMS:
        results.append(("dresidual", call.out["dx"].copy()))
    order = [*(call.result._fields if call.result else ["y"])]
    for number, (later, array) in enumerate(results):
        for earlier, other in results[:number]:
            assert order.index(earlier) < order.index(later)
            pairs = [one_after_the_other(array, other), one_after_the_other(other, array)[::-1]]
            pairs += [[array, array]] if array.shape == other.shape else []
            for one, two in pairs:
                change = {"out": call.out_of(call.out | {later: one, earlier: two})}
                text = f"{label(call, later)} overlaps {label(call, earlier)}, {OWN}"
                cases.append(Case(name, ValueError, text, change))
    check_refused(cases)


@pytest.mark.parametrize("name", [*GROUP_NORMS, "rms_norm_backward"])
def test_a_workspace_that_overlaps_any_array_is_refused(name):
    call, cases = call_of(name, **RIGHT), []
    memory = np.full((1 << 14) + 64, 0xFF, np.uint8)
    workspace = memory[-memory.ctypes.data % 64 :][: 1 << 14]
    for named in (call.arrays, call.out):
        for key, array in arrays_of(named).items():
            what = label(call, key) if named is call.out else key
            for start in (0, 64, len(workspace) - array.nbytes):
                place = workspace[start : start + array.nbytes].view(np.float32)
                change = {"workspace": workspace, "out": call.out_of(call.out)}
                place = place.reshape(array.shape)
                change |= changed(call, key, place) if named is call.out else {key: place}
                text = f"workspace overlaps {what}, {OWN}"
                cases.append(Case(name, ValueError, text, change))
    check_refused(cases)


@pytest.mark.parametrize(
    "place",
    [lambda x: x[::-1], lambda x: x.view(np.float16)[:, :8]],
    ids=["other strides", "other dtype"],
)
def test_an_input_in_other_strides_or_dtype_is_not_exactly_it(place):
    x = X.copy()
    with raises(ValueError, f"rms_norm: out overlaps x, {IN_PLACE}"):
        cunorm.rms_norm(x, out=place(x))
    with raises(ValueError, f"group_norm: out overlaps x, {IN_PLACE}"):
        cunorm.group_norm(x, 2, out=place(x))


def test_a_reversed_result_lies_before_its_first_element():
    memory = np.ones((10, 8), np.float32)
    with raises(ValueError, f"rms_norm: out overlaps x, {IN_PLACE}"):
        cunorm.rms_norm(memory[:6], out=memory[4:][::-1])


def test_what_is_read_after_a_result_is_written_may_not_be_that():
    gate, weight = X.copy(), draw("weight", 8, "float32")
    cases = [
        Case("add_rms_norm", ValueError, f"out.residual overlaps gate, {OWN}", change)
        for change in (
            {"gate": gate, "out": AddNorm(residual=gate)},
            {"gate": gate, "residual": gate, "out": AddNorm(residual=gate)},
        )
    ]
    square = {"x": draw("x", (8, 8), "float32"), "residual": None, "gate": None}
    out = NormForward(rstd=weight)
    text = f"out.rstd overlaps weight, {OWN}"
    cases.append(
        Case("rms_norm_forward", ValueError, text, square | {"weight": weight, "out": out})
    )
    check_refused(cases)


def test_an_x_that_is_returned_as_the_stream_may_not_be_written_over():
    x = draw("x", 1003, "float32")
    for told in ({}, {"weight": x}, {"gate": x}):
        with raises(ValueError, f"add_rms_norm: out.y overlaps x, {OWN}"):
            cunorm.add_rms_norm(x, None, **told, out=AddNorm(y=x))
    with raises(ValueError, f"normalize_forward: out.y overlaps x, {OWN}"):
        cunorm.normalize_forward(x, residual_dtype="float32", out=NormForward(y=x))
    with raises(ValueError, f"normalize_forward: out.residual overlaps out.y, {OWN}"):
        cunorm.normalize_forward(x, out=NormForward(y=x, residual=x))


# --- what lies within the extent of another, and shares nothing with it ---------------------------


def test_results_and_workspaces_between_the_rows_of_another_array_are_taken():
    call = call_of("rms_norm_backward")
    expected = call.make()
    memory = np.zeros((5, 8, 128), np.float32)
    start = -memory.ctypes.data % 64 // 4
    x, dx, dgate = (memory[:, place, start : start + 8] for place in range(3))
    x[...] = call.arrays["x"]
    before = bits(x).copy()
    workspace = memory[0, 3:].reshape(-1)[start:][:160]
    size = cunorm.workspace_size("rms_norm_backward", x, call.arrays["weight"])
    assert size <= workspace.nbytes
    out = call.out_of(call.out | {"dx": dx, "dgate": dgate})
    grads = call.make(x=x, out=out, workspace=workspace)
    for field, right in expected._asdict().items():
        if right is not None:
            assert_same_bits(np.ascontiguousarray(getattr(grads, field)), right, field)
    np.testing.assert_array_equal(bits(x), before)
