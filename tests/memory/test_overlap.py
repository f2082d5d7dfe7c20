# SPDX-License-Identifier: MIT
"""A result that shares memory with another array is refused, unless it is exactly in place.

A workspace may share memory with no array. For every pair of arrays, valid calls come first; then
one array begins an element after the other.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

import cunorm
from cunorm import AddNorm, NormForward
from tests.support.calls import GROUP_NORMS, arrays_of, call_of, names, raises
from tests.support.operands import assert_same_bits, assert_same_fields, bits, draw
from tests.support.refused import IN_PLACE, OWN, RIGHT, Case, check_refused

X = draw("x", (5, 8), "float32")


def may_be(name, field, argument):
    """Return whether the array of a result may be exactly that of an argument."""
    if field in ("mean", "rstd") or argument.startswith("out."):
        return False
    if name in GROUP_NORMS:
        return field in ("y", "dx") and argument in ("x", "dy")
    return field != "residual" or argument in ("x", "residual")


def one_after_the_other(first, second):
    """Return two arrays of these shapes; the first begins one element before the second."""
    memory = np.zeros(max(first.size, second.size) + 1, np.float32)
    parts = memory[: first.size], memory[1 : second.size + 1]
    return [part.reshape(like.shape) for part, like in zip(parts, (first, second), strict=True)]


def put(call, given):
    """Return the keyword arguments that pass these arrays to a call."""
    out = {key[4:]: array for key, array in given.items() if key.startswith("out.")}
    inputs = {key: array for key, array in given.items() if not key.startswith("out.")}
    return {"out": call.out_of(call.out | out)} | inputs


@names
def test_a_result_that_overlaps_another_array_is_refused(name):
    """So is one array for two results, or for a result and an input that is read later."""
    call, cases = call_of(name, **RIGHT), []
    others = dict(arrays_of(call.arrays))
    results = dict(call.out)
    if "dx" in results and name not in GROUP_NORMS:
        results["dresidual"] = results["dx"].copy()
    for field in sorted(results, key=(call.result._fields if call.result else ["y"]).index):
        result, key = results[field], f"out.{field}"
        label = "out" if call.result is None else key
        for other, array in others.items():
            pairs = [one_after_the_other(result, array), one_after_the_other(array, result)[::-1]]
            expected = IN_PLACE if may_be(name, field, other) else OWN
            if expected == OWN and result.shape == array.shape:
                pairs.append([result, result])
            for one, two in pairs:
                text = f"{label} overlaps {other}, {expected}"
                cases.append(Case(name, ValueError, text, put(call, {key: one, other: two})))
        others[key] = result
    check_refused(cases)


@pytest.mark.parametrize("name", [*GROUP_NORMS, "rms_norm_backward"])
def test_a_workspace_that_overlaps_any_array_is_refused(name):
    call, cases = call_of(name, **RIGHT), []
    memory = np.full((1 << 14) + 64, 0xFF, np.uint8)
    workspace = memory[-memory.ctypes.data % 64 :][: 1 << 14]
    for key, array in (
        arrays_of(call.arrays) | {f"out.{f}": a for f, a in call.out.items()}
    ).items():
        label = "out" if call.result is None and key == "out.y" else key
        for start in (0, 64, len(workspace) - array.nbytes):
            view = workspace[start : start + array.nbytes].view(np.float32).reshape(array.shape)
            change = put(call, {key: view}) | {"workspace": workspace}
            cases.append(Case(name, ValueError, f"workspace overlaps {label}, {OWN}", change))
    check_refused(cases)


def test_a_view_with_other_strides_or_dtype_is_not_in_place():
    """A reversed view lies before its first element."""
    x, more = X.copy(), np.ones((10, 8), np.float32)
    pairs = [(x, x[::-1]), (x, x.view(np.float16)[:, :8]), (more[:6], more[4:][::-1])]
    for (given, out), groups in product(pairs, (None, 2)):
        name, options = ("group_norm", {"num_groups": 2}) if groups else ("rms_norm", {})
        with raises(ValueError, f"{name}: out overlaps x, {IN_PLACE}"):
            getattr(cunorm, name)(given, **options, out=out)


def test_a_result_may_not_be_a_weight_of_the_same_shape():
    weight, x = draw("weight", 8, "float32"), draw("x", (8, 8), "float32")
    given = {"residual": None, "weight": weight, "gate": None, "gate_activation": "silu"}
    given |= {"gate_position": "post"}
    row = given | {"x": x[0], "residual": x[1], "axis": -1, "out": AddNorm(residual=weight)}
    square = given | {"x": x, "out": NormForward(rstd=weight)}
    check_refused(
        [
            Case("add_rms_norm", ValueError, f"out.residual overlaps weight, {OWN}", row),
            Case("rms_norm_forward", ValueError, f"out.rstd overlaps weight, {OWN}", square),
        ]
    )


def test_an_x_that_is_returned_as_the_stream_may_not_be_written_over():
    x = draw("x", 1003, "float32")
    for kwargs in ({}, {"weight": x}, {"gate": x}):
        with raises(ValueError, f"add_rms_norm: out.y overlaps x, {OWN}"):
            cunorm.add_rms_norm(x, None, **kwargs, out=AddNorm(y=x))
    with raises(ValueError, f"normalize_forward: out.y overlaps x, {OWN}"):
        cunorm.normalize_forward(x, residual_dtype="float32", out=NormForward(y=x))
    with raises(ValueError, f"normalize_forward: out.residual overlaps out.y, {OWN}"):
        cunorm.normalize_forward(x, out=NormForward(y=x, residual=x))


# --- arrays between the elements of another array -------------------------------------------------


def test_an_input_that_is_copied_to_be_aligned_overlaps_no_result():
    """The elements of x are reversed in memory. The result begins 3 bytes after the last."""
    memory = np.zeros(8 * 256 + 64, np.uint8)
    start = -memory.ctypes.data % 8
    elements = memory[start + 1 : start + 1 + 4 * 256].view(np.float32)
    elements[:] = draw("x", 256, "float32")
    x = np.lib.stride_tricks.as_strided(elements[-1:], (4, 64), (-256, -4))
    out = memory[start + 4 + 4 * 256 : start + 4 + 8 * 256].view(np.float32).reshape(4, 64)
    expected = cunorm.rms_norm(x.copy())
    for _ in range(2):
        assert_same_bits(cunorm.rms_norm(x, out=out), expected)


def test_results_and_workspaces_between_the_rows_of_another_array_are_accepted():
    call = call_of("rms_norm_backward")
    expected = call.make()
    memory = np.zeros((5, 8, 128), np.float32)
    start = -memory.ctypes.data % 64 // 4
    x, dx, dgate = (memory[:, index, start : start + 8] for index in range(3))
    x[...] = call.arrays["x"]
    before = bits(x).copy()
    workspace = memory[0, 3:].reshape(-1)[start:][:256]
    out = call.out_of(call.out | {"dx": dx, "dgate": dgate})
    grads = call.make(x=x, out=out, workspace=workspace)
    assert_same_fields(grads, expected)
    np.testing.assert_array_equal(bits(x), before)
