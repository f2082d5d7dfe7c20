# SPDX-License-Identifier: MIT
"""Arrays of every framework: in without a copy, out as the caller's own, with the right numbers."""

from __future__ import annotations

import weakref
from contextlib import nullcontext, suppress

import numpy as np
import pytest

import cunorm
from cunorm import NormForward, NormGrads
from tests.support.bounds import check_backward, check_forward
from tests.support.calls import launched
from tests.support.kinds import GPU_KINDS, KINDS, Foreign, ForeignBefore1, OnTorchCpu, kinds
from tests.support.operands import NORMS, draw, optional, parameters, saved, weight_and_bias

SHAPE = (12, 96)
CASES = {
    "float16": "normalize",
    "bfloat16": "rms_norm",
    "float32": "layer_norm",
    "float64": "l2_norm",
}


@pytest.fixture
def calls(monkeypatch):
    return launched(monkeypatch)


@pytest.mark.parametrize("kind", kinds())
@pytest.mark.parametrize("dtype", CASES)
def test_results_are_of_the_callers_framework_and_right(kind, dtype):
    kind = kind()
    with kind.jax.enable_x64(dtype == "float64") if hasattr(kind, "jax") else nullcontext():
        check_results(kind, CASES[dtype], dtype)


def check_results(kind, name, dtype):
    norm = NORMS[name]
    x, dy = draw("x", SHAPE, dtype), draw("dy", SHAPE, dtype)
    given = parameters(norm, SHAPE[-1], dtype)
    theirs = {key: kind.put(array) for key, array in given.items()}
    forward = getattr(cunorm, f"{name}_forward")(kind.put(x), **theirs, **norm.asked())
    assert kind.is_own(forward.y, dtype)
    assert kind.is_own(forward.rstd, "float64" if dtype == "float64" else "float32")
    grads = getattr(cunorm, f"{name}_backward")(
        kind.put(dy), kind.put(x), **theirs, **norm.asked(), **saved(norm, forward)
    )
    for result in (grads.dx, grads.dweight, grads.dbias):
        assert result is None or kind.is_own(result, dtype)

    pair, meaning = weight_and_bias(given), norm.meaning(SHAPE[-1])
    check_forward(NormForward(*numbers(kind, forward)), x, *pair, **meaning)
    check_backward(NormGrads(*numbers(kind, grads)), dy, x, *pair, **meaning)


def numbers(kind, results):
    return (None if one is None else kind.get(one) for one in results)


@pytest.mark.parametrize("kind", kinds())
def test_streams_and_other_dtypes_are_of_the_callers_framework(kind):
    kind = kind()
    x, residual = draw("x", SHAPE, "float16"), draw("residual", SHAPE, "float32")
    result = cunorm.add_rms_norm(kind.put(x), kind.put(residual))
    assert kind.is_own(result.y, "float16")
    assert kind.is_own(result.residual, "float32")
    check_forward(NormForward(*numbers(kind, result)), x, None, None, residual, eps=1e-6)
    assert kind.is_own(cunorm.rms_norm(kind.put(residual), dtype="bfloat16"), "bfloat16")
    forward = cunorm.rms_norm_forward(kind.put(draw("x", 96, "float32")))
    assert forward.rstd.shape == ()
    if "Dlpack" not in type(kind).__name__:  # where NumPy may give no address
        assert cunorm.rms_norm(kind.put(np.empty((0, 96), np.float32))).shape == (0, 96)


@pytest.mark.parametrize("kind", kinds("jax", "jax on CUDA"))  # whose calls XLA makes
def test_kernels_read_and_write_the_arrays_own_memory(kind, calls):
    kind, names = kind(), ("x", "residual", "dy", "d_residual")
    arrays = {name: kind.put(draw(name, SHAPE, "float32")) for name in names}
    for name in ("weight", "bias"):
        arrays[name] = kind.put(optional(name, SHAPE[-1], "float32"))
    parameters = [arrays["weight"], arrays["bias"]]
    forward = cunorm.layer_norm_forward(arrays["x"], *parameters, residual=arrays["residual"])
    statistics = {"rstd": forward.rstd, "mean": forward.mean}
    dy, d_residual = arrays["dy"], arrays["d_residual"]
    grads = cunorm.layer_norm_backward(
        dy, forward.residual, *parameters, **statistics, d_residual=d_residual
    )
    there, back = calls
    made = {"y": forward.y, "new_residual": forward.residual, **statistics}
    for name in ("x", "residual", "weight", "bias"):
        made[name] = arrays[name]
    assert {name: getattr(there, name).pointer for name in made} == at(kind, made)
    read = {"x": forward.residual, "dy": dy, "d_residual": d_residual, **statistics}
    read |= {name: arrays[name] for name in ("weight", "bias")}
    made = {name: getattr(grads, name) for name in ("dx", "dweight", "dbias")}
    assert {name: getattr(back, name).pointer for name in read | made} == at(kind, read | made)


def at(kind, arrays):
    return {name: kind.address(array) for name, array in arrays.items()}


def swapped(array):
    return (array.permute if hasattr(array, "permute") else array.transpose)(1, 0, 2)


VIEWS = {
    "every other row": lambda array: array[::2],
    "rows backwards": lambda array: array[::-1],
    "columns": lambda array: array[:, 5:90],
    "transposed": lambda array: swapped(array.reshape(3, 4, 96)),
    "qkv": lambda array: array.reshape(3, 4, 3, 32)[:, :, 1],
    "one row": lambda array: array[2],
    "a new axis": lambda array: array[:, None],
    "one element": lambda array: array[1, 2:3],
}


@pytest.mark.parametrize("kind", kinds("jax", "jax on CUDA"))  # which have none
def test_views_are_not_copied_but_for_a_last_axis_with_gaps(kind, calls, monkeypatch):
    kind, x = kind(), draw("x", SHAPE, "float32")
    whole = kind.put(x)
    for name, view in VIEWS.items():
        if name == "rows backwards" and "torch" in str(type(whole)):
            continue  # it has no negative strides
        part = kind.put(view(x)) if isinstance(whole, Foreign) else view(whole)
        y = cunorm.rms_norm(part)
        assert calls.pop().x.pointer == kind.address(part), name
        dense = cunorm.rms_norm(kind.put(np.ascontiguousarray(view(x))))
        np.testing.assert_array_equal(kind.get(y), kind.get(dense), name)
        calls.clear()
    monkeypatch.undo()
    gaps = kind.put(x[:, ::2]) if isinstance(whole, Foreign) else whole[:, ::2]
    y = cunorm.rms_norm(gaps)
    dense = cunorm.rms_norm(kind.put(x[:, ::2].copy()))
    np.testing.assert_array_equal(kind.get(y), kind.get(dense))
    np.testing.assert_array_equal(x, draw("x", SHAPE, "float32"))


@pytest.mark.parametrize(
    "every", [KINDS, pytest.param(GPU_KINDS, marks=pytest.mark.gpu)], ids=["CPU", "GPU"]
)
def test_operands_of_several_frameworks_go_together_and_x_decides(every):
    x, weight = draw("x", SHAPE, "float32"), optional("weight", SHAPE[-1], "float32")
    there = [kind for kind in map(made_or_none, every.values()) if kind]
    expected = there[0].get(cunorm.rms_norm(there[0].put(x), there[0].put(weight)))
    assert len(there) > 1
    for one, other in zip(there, there[1:] + there[:1], strict=True):
        y = cunorm.rms_norm(one.put(x), other.put(weight))
        assert one.is_own(y, "float32")
        np.testing.assert_array_equal(one.get(y), expected)


def made_or_none(kind):
    with suppress(pytest.skip.Exception):
        return kind()


# --- NumPy's arrays that are not quite plain ------------------------------------------------------


def unaligned():
    return np.frombuffer(b"\0" + draw("x", (3, 4), "float32").tobytes(), np.uint8)[1:]


def memory_map(folder):
    array = np.memmap(folder / "x", np.float32, "w+", shape=(3, 4))
    array[...] = draw("x", (3, 4), "float32")
    return array


def field(dtype, *more):
    array = np.zeros((3, 4), [("value", dtype), *more])["value"]
    array[...] = draw("x", (3, 4), "float32")
    return array


# Of each: how to make it, and whether kernels read it where it lies: those with gaps do not, but in
# a copy of their own, and what is not aligned is copied before anything else is done.
ODD = {
    "a map of a file": (memory_map, True),
    "a matrix": (lambda _: draw("x", (3, 4), "float32").view(np.matrix), True),
    "a row, expanded": (lambda _: np.broadcast_to(draw("x", 4, "float32"), (3, 4)), True),
    "a field, with gaps": (lambda _: field(np.float16, ("tag", np.int16)), None),
    "an odd address": (lambda _: unaligned().view(np.float32).reshape(3, 4), False),
    "odd strides": (lambda _: field(np.float32, ("tag", np.int8)), False),
}


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
@pytest.mark.parametrize("name", ODD)
def test_numpy_arrays_that_are_memory_of_another_kind_are_read_right(name, tmp_path, monkeypatch):
    make, is_read_there = ODD[name]
    array = make(tmp_path)
    expected = cunorm.rms_norm(np.array(array, order="C"))
    np.testing.assert_array_equal(cunorm.rms_norm(array), expected)
    if is_read_there is not None:
        calls = launched(monkeypatch)
        cunorm.rms_norm(array)
        place = calls[0].x.pointer
        assert (place == array.__array_interface__["data"][0]) == is_read_there
        assert place % array.itemsize == 0


# --- DLPack, PyTorch ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Foreign, ForeignBefore1])
def test_a_capsule_of_either_version_is_looked_into_and_freed_not_consumed(kind):
    x = draw("x", SHAPE, "float32")[::-1, 3:90]
    given, alive = [], weakref.ref(x)

    class Kept(kind):
        def __dlpack__(self, **options):
            given.append(super().__dlpack__(**options))
            return given[-1]

    np.testing.assert_array_equal(cunorm.rms_norm(Kept(x)), cunorm.rms_norm(x))
    assert "dltensor" in repr(given[-1])  # a consumed one is called otherwise
    del x
    assert alive() is not None
    given.clear()
    assert alive() is None


def test_torchs_inference_mode_changes_nothing():
    kind = OnTorchCpu()
    x = kind.put(draw("x", SHAPE, "float32"))
    with kind.torch.inference_mode():
        y = cunorm.rms_norm(x)
        again = cunorm.rms_norm(x.clone(), out=kind.torch.empty(SHAPE))
    for one in (y, again):
        np.testing.assert_array_equal(one, cunorm.rms_norm(x))
