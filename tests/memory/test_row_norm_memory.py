# SPDX-License-Identifier: MIT
"""What is remembered of calls, by forms and by places, gives no call what was another's."""

import gc
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import ml_dtypes
import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import cunorm
from cunorm import NormForward, NormGrads
from cunorm._loaded import Cached
from tests.support.calls import raises
from tests.support.operands import assert_same_bits, at, draw

OWN = "expected memory of its own"
IN_PLACE = f"{OWN} (or exactly the memory, shape, strides and dtype of an input)"


# --- arguments that are equal and not the same ----------------------------------------------------


def test_an_equal_call_before_leaves_no_trace():
    x = np.array([[3, 4]], dtype=np.float32)
    for c in (0.0, -0.0, 0.0):
        assert (np.signbit(cunorm.normalize(x, c=c)) == np.signbit(c)).all()


@pytest.mark.parametrize("name", ["rms_norm", "rms_norm_backward"])
@pytest.mark.parametrize(
    ("argument", "right", "wrong", "expected"),
    [
        ("axis", 1, True, "an int"),
        ("axis", 0, False, "an int"),
        ("groups", 1, True, "an int"),
        ("groups", 1, 1.0, "an int"),
        ("weight_offset", 1, True, "a number"),
        ("weight_offset", 0.0, False, "a number"),
        ("round_before_weight", True, 1, "True or False"),
        ("round_before_weight", False, 0, "True or False"),
        ("round_before_weight", False, np.False_, "True or False"),
    ],
    ids=repr,
)
def test_what_is_equal_to_a_right_argument_is_as_wrong_after_it(
    name, argument, right, wrong, expected
):
    x = draw("x", (8, 8), "float32")
    arrays = {"x": x, "weight": x[0]}
    if name == "rms_norm_backward":
        arrays |= {
            "dy": x,
            "rstd": np.asarray(x[0, 0] if right == 0 and argument == "axis" else x[0]),
        }
    if argument == "axis" and right == 0:
        arrays["weight"] = x
    for _ in range(2):
        with raises(TypeError, f"{name}: {argument} is {wrong!r}, expected {expected}"):
            getattr(cunorm, name)(**arrays, **{argument: wrong})
        getattr(cunorm, name)(**arrays, **{argument: right})


@pytest.mark.parametrize("name", ["center", "accumulate"])
def test_a_flag_of_a_backward_is_as_wrong_after_the_bool_that_it_equals(name):
    x, rstd = draw("x", (8, 8), "float32"), draw("rstd", 8, "float32")
    for right, wrong in ((False, 0), (True, 1)):
        for _ in range(2):
            cunorm.normalize_backward(x, x, rstd=rstd, mean=rstd, **{name: right})
            with raises(
                TypeError, f"normalize_backward: {name} is {wrong}, expected True or False"
            ):
                cunorm.normalize_backward(x, x, rstd=rstd, mean=rstd, **{name: wrong})


def test_numbers_that_change_between_calls_of_one_form_are_followed():
    x, weight = draw("x", (5, 8), "float32"), draw("weight", 8, "float32")
    y, rstd = np.empty_like(x), np.ones(5, np.float32)
    grads = NormGrads(dx=np.empty_like(x), dweight=np.empty_like(weight))
    for turn in range(2):
        for numbers in ({}, {"c": 2.0}, {"c": 3}, {"weight_offset": 1.0}, {"weight_offset": -2}):
            with at(turn, numbers):
                for eps in (0.0, -0.0, 1e-3, 1):
                    cunorm.normalize(x, weight, **numbers, eps=eps, out=y)
                    result = NormForward(y=y)
                    check = {"c": None, "weight_offset": 0.0} | numbers
                    exact = cunorm.reference.normalize_forward(x, weight, eps=eps, **check)
                    np.testing.assert_allclose(result.y, exact.y, rtol=1e-5)
                cunorm.normalize_backward(x, x, weight, rstd=rstd, **numbers, out=grads)
                exact = cunorm.reference.normalize_backward(x, x, weight, rstd=rstd, **numbers)
                np.testing.assert_allclose(grads.dx, exact.dx, rtol=1e-4, atol=1e-5)
                np.testing.assert_allclose(grads.dweight, exact.dweight, rtol=1e-5, atol=1e-5)


# --- one place, one array after another -----------------------------------------------------------


def check_as_elsewhere(x, y):
    """Normalise x into y, and a copy of it into new memory."""
    expected = cunorm.layer_norm(x.copy())
    cunorm.layer_norm(x, out=y)
    assert_same_bits(y.copy(), expected)


def test_arrays_that_are_reshaped_where_they_are_are_read_as_they_are_now():
    x, y = draw("x", (12, 20), "float32"), np.empty((12, 20), np.float32)
    for _ in range(2):
        for shape in ((12, 20), (20, 12), (240,), (3, 4, 20), (1, 240), (240, 1)):
            x.shape = y.shape = shape
            check_as_elsewhere(x, y)


def test_views_at_one_place_with_other_strides_are_read_as_they_are():
    memory, results = draw("x", 400, "float32"), np.empty(400, np.float32)
    for _ in range(2):
        for strides in ((80, 4), (40, 4), (44, 4), (4, 40), (0, 4), (8, 4), (80, 8)):
            x = as_strided(memory, (10, 10), strides)
            for of_y in ((40, 4), (80, 4), (156, 4)):
                with at(strides, of_y):
                    check_as_elsewhere(x, as_strided(results, (10, 10), of_y))


def test_views_at_one_place_with_other_dtypes_are_read_as_they_are():
    memory, results = np.zeros(64 * 8, np.uint8), np.zeros(64 * 8, np.uint8)
    for _ in range(2):
        for dtype in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64):
            x, y = (array.view(dtype)[:64].reshape(8, 8) for array in (memory, results))
            x[...] = draw("x", (8, 8), np.dtype(dtype).name)
            check_as_elsewhere(x, y)


def test_a_torch_tensor_that_is_changed_where_it_is_is_read_as_it_is_now():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    x, y = torch.from_numpy(draw("x", (12, 20), "float32")), torch.empty(240)
    for _ in range(2):
        x.t_()
        y.as_strided_(x.shape, (x.shape[1], 1))
        expected = cunorm.layer_norm(x.clone(memory_format=torch.contiguous_format))
        assert torch.equal(cunorm.layer_norm(x), expected)
        assert torch.equal(cunorm.layer_norm(x, out=y), expected)


def test_an_overlap_is_found_at_places_that_were_fine_for_another_shape():
    memory = draw("x", 256, "float32")
    first, second = memory[:128], memory[32:160]
    for _ in range(3):
        x, y = first[:32].reshape(4, 8), second[:32].reshape(4, 8)
        expected = cunorm.rms_norm(x.copy())
        assert_same_bits(cunorm.rms_norm(x, out=y).copy(), expected)
        x, y = first.reshape(16, 8), second.reshape(16, 8)
        with raises(ValueError, f"rms_norm: out overlaps x, {IN_PLACE}"):
            cunorm.rms_norm(x, out=y)
        with raises(ValueError, f"rms_norm_backward: out.dx overlaps x, {IN_PLACE}"):
            rstd = np.ones(16, np.float32)
            cunorm.rms_norm_backward(x.copy(), x, rstd=rstd, out=NormGrads(dx=y))


def test_an_overlap_is_found_after_the_same_arrays_were_fine_in_other_parts():
    """What is x and what is gate of an add_ tells whether the stream may be written there."""
    x, gate = draw("x", (4, 8), "float32"), draw("gate", (4, 8), "float32")
    for _ in range(2):
        cunorm.rms_norm_forward(x, residual=gate, gate=x.copy(), out=NormForward(residual=gate))
        with raises(ValueError, f"rms_norm_forward: out.residual overlaps gate, {OWN}"):
            cunorm.rms_norm_forward(x, residual=x, gate=gate, out=NormForward(residual=gate))


# --- what is remembered has an end ----------------------------------------------------------------


def caches():
    """Return every function of cunorm's that remembers its answers."""
    modules = [module for name, module in sys.modules.items() if name.startswith("cunorm")]
    found = [value for module in modules for value in vars(module).values() if value is not Cached]
    return {id(f): f for f in found if hasattr(f, "cache_info") and hasattr(f, "cache_clear")}


def test_thousands_of_shapes_do_not_make_what_is_remembered_grow_without_end():
    def call(rows, width, groups):
        x, weight = ones[:rows, : groups * width], ones[0, : groups * width]
        out = NormForward(y=np.empty(x.shape, np.float32))
        saved = cunorm.rms_norm_forward(x, weight, groups=groups, out=out)
        size = cunorm.workspace_size("rms_norm_backward", x, weight, groups=groups)
        told = {"groups": groups, "workspace": np.empty(size, np.uint8)}
        return cunorm.rms_norm_backward(x, x, weight, rstd=saved.rstd, **told)

    ones = np.ones((40, 200), np.float32)
    call(1, 1, 1)
    bounded = [f for f in caches().values() if f.cache_info().maxsize is not None]
    endless = [f for f in caches().values() if f.cache_info().maxsize is None]
    before = [f.cache_info().currsize for f in endless]
    assert len(bounded) > 10
    shapes = [
        (rows, width, groups) for rows in range(40) for width in range(1, 41) for groups in (1, 2)
    ]
    for shape in shapes:
        call(*shape)
    assert [f.cache_info().currsize for f in endless] == before
    assert all(f.cache_info().maxsize <= 4096 for f in bounded)
    assert len(shapes) > 3000
    assert max(f.cache_info().misses for f in bounded) > 3000  # so that something was forgotten
    np.testing.assert_allclose(call(39, 20, 2).dx, 0, atol=1e-6)


def test_nothing_that_is_remembered_keeps_an_array():
    x = draw("x", (33, 44), "float32")
    result = cunorm.layer_norm_forward(x, out=NormForward(y=np.empty_like(x)))
    seen = [weakref.ref(array) for array in (x, result.y, result.rstd)]
    del x, result
    gc.collect()
    assert [ref() for ref in seen] == [None] * 3


# --- threads --------------------------------------------------------------------------------------


def test_threads_that_share_plans_get_their_own_numbers():
    """2000 calls, of arrays of the same forms, which meet in every cache by form and by place."""
    start, calls = Barrier(2), 1000

    def work(thread):
        cases = []
        for number in range(8):
            shape = (1 + number % 3, 5 + number % 2)
            names = ("x", "dy", "gate")
            arrays = {o: draw(f"{o} {thread} {number}", shape, "float32") for o in names}
            arrays["weight"] = draw(f"weight {thread}", shape[-1], "float32")
            cases.append((arrays, *run(arrays, {})))
        start.wait()
        for call in range(calls // 2):
            arrays, expected_y, expected = cases[call % len(cases)]
            given = {"y": np.empty_like(arrays["x"]), "dx": np.empty_like(arrays["x"])}
            y, grads = run(arrays, given if call % 3 else {})
            for array, right in ((y, expected_y), *zip(grads, expected, strict=True)):
                if right is not None:
                    assert_same_bits(array, right)
        return len(cases)

    def run(arrays, given):
        dy = arrays["dy"]
        operands = {name: arrays[name] for name in ("x", "weight", "gate")}
        saved = cunorm.rms_norm_forward(**operands, out=NormForward(y=given.get("y")))
        out = NormGrads(dx=given.get("dx"))
        size = cunorm.workspace_size("rms_norm_backward", arrays["x"], arrays["weight"])
        workspace = np.empty(size, np.uint8) if given else None
        grads = cunorm.rms_norm_backward(
            dy, **operands, rstd=saved.rstd, out=out, workspace=workspace
        )
        return saved.y, grads

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, range(2))) == [8, 8]
