# SPDX-License-Identifier: MIT
"""Any framework's arrays are read, most without a copy, and results of all of them are right."""

from __future__ import annotations

import weakref
from contextlib import nullcontext, suppress
from itertools import product

import numpy as np
import pytest

import cunorm
from tests.support.bounds import check_backward, check_forward
from tests.support.calls import record_launches
from tests.support.gpu_arrays import get_all
from tests.support.internals import read_capsule
from tests.support.kinds import GPU_KINDS, KINDS, Foreign, ForeignBefore1, OnTorchCpu, kinds
from tests.support.operands import NORMS, at, draw, optional, parameters, saved, weight_and_bias

SHAPE = (12, 60)
X = draw("x", SHAPE, "float32")
CASES = list(zip(NORMS, ("float16", "bfloat16", "float32", "float64"), strict=True))


@pytest.fixture
def calls(monkeypatch):
    return record_launches(monkeypatch)


@pytest.mark.parametrize("kind", kinds())
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_results_are_of_the_callers_framework_and_right(kind, name, dtype):
    kind, norm = kind(), NORMS[name]
    x, dy = (draw(operand, SHAPE, dtype) for operand in ("x", "dy"))
    given = parameters(norm, SHAPE[-1], dtype)
    with kind.jax.enable_x64(dtype == "float64") if hasattr(kind, "jax") else nullcontext():
        options = {key: kind.put(array) for key, array in given.items()} | norm.keywords()
        forward = getattr(cunorm, f"{name}_forward")(kind.put(x), **options)
        options |= saved(norm, forward)
        grads = getattr(cunorm, f"{name}_backward")(kind.put(dy), kind.put(x), **options)
    assert kind.is_own(forward.rstd, "float64" if dtype == "float64" else "float32")
    for result in (forward.y, grads.dx, grads.dweight, grads.dbias):
        assert result is None or kind.is_own(result, dtype)
    pair, oracle_options = weight_and_bias(given), norm.oracle_options(SHAPE[-1])
    check_forward(get_all(kind, forward), x, *pair, **oracle_options)
    check_backward(get_all(kind, grads), dy, x, *pair, **oracle_options)


@pytest.mark.parametrize("kind", kinds())
def test_streams_and_small_arrays_are_of_the_callers_framework(kind):
    kind = kind()
    x, residual = draw("x", SHAPE, "float16"), draw("residual", SHAPE, "float32")
    result = cunorm.rms_norm_forward(kind.put(x), residual=kind.put(residual))
    assert kind.is_own(result.y, "float16")
    assert kind.is_own(result.residual, "float32")
    check_forward(get_all(kind, result), x, None, None, residual, eps=1e-6)
    assert cunorm.rms_norm_forward(kind.put(X[0])).rstd.shape == ()
    if "Dlpack" not in type(kind).__name__:  # NumPy may export an empty array with no address
        assert cunorm.rms_norm(kind.put(X[:0].copy())).shape == (0, 60)


@pytest.mark.parametrize("kind", kinds("jax", "jax on CUDA"))  # without JAX: XLA makes its calls
def test_kernels_read_and_write_the_arrays_own_memory(kind, calls):
    kind, norm = kind(), NORMS["layer_norm"]
    x, residual, dy, above = (kind.put(draw(n, SHAPE, "float32")) for n in ("x", "r", "dy", "dr"))
    parameters = {n: kind.put(optional(n, SHAPE[-1], "float32")) for n in norm.parameters}
    forward = cunorm.layer_norm_forward(x, **parameters, residual=residual)
    statistics, stream = saved(norm, forward), forward.residual
    reads = parameters | statistics
    grads = cunorm.layer_norm_backward(dy, stream, **reads, d_residual=above)
    used = {"x": x, "residual": residual, "y": forward.y, "residual_out": stream}
    of_grads = {name: getattr(grads, name) for name in ("dx", "dweight", "dbias")}
    everything = (
        used | parameters | statistics,
        {"x": stream, "dy": dy, "dresidual_out": above} | reads | of_grads,
    )
    for launch, arrays in zip(calls, everything, strict=True):
        for name, array in arrays.items():
            assert getattr(launch, name).pointer == kind.address(array), name


def swapped(array):
    return (array.permute if hasattr(array, "permute") else array.transpose)(1, 0, 2)


VIEWS = {
    "rows backwards": lambda array: array[::-1],
    "columns": lambda array: array[:, 5:50],
    "transposed": lambda array: swapped(array.reshape(3, 4, 60)),
    "qkv": lambda array: array.reshape(3, 4, 3, 20)[:, :, 1],
    "one row": lambda array: array[2],
    "a new axis": lambda array: array[:, None],
    "one element": lambda array: array[1, 2:3],
    "gaps": lambda array: array[:, ::2],
}


@pytest.mark.parametrize("kind", kinds("jax", "jax on CUDA"))  # without JAX, which has no views
def test_views_are_not_copied_except_for_a_last_axis_with_gaps(kind, calls, monkeypatch):
    kind = kind()
    whole = kind.put(X)
    for name, view in VIEWS.items():
        if name == "rows backwards" and "torch" in str(type(whole)):
            continue  # torch has no negative strides
        if name == "gaps":
            monkeypatch.undo()
        part = kind.put(view(X)) if isinstance(whole, Foreign) else view(whole)
        y = cunorm.rms_norm(part)
        assert name == "gaps" or calls.pop().x.pointer == kind.address(part), name
        dense = cunorm.rms_norm(kind.put(np.ascontiguousarray(view(X))))
        np.testing.assert_array_equal(kind.get(y), kind.get(dense), name)
        calls.clear()


def try_kind(kind):
    with suppress(pytest.skip.Exception):
        return kind()


WRITABLE = ("numpy", "torch", "cupy", "torch on CUDA")


@pytest.mark.parametrize(
    "kinds_by_name", [KINDS, pytest.param(GPU_KINDS, marks=pytest.mark.gpu)], ids=["CPU", "GPU"]
)
def test_operands_out_and_workspace_may_be_of_another_framework_than_x(kinds_by_name):
    """The first turn plans each call, the second turn finds it in the cache."""
    available = {name: kind for name in kinds_by_name if (kind := try_kind(kinds_by_name[name]))}
    weight, rstd = optional("weight", SHAPE[-1], "float32"), draw("rstd", SHAPE[:1], "float32")
    assert len(available) > 1
    first = next(iter(available.values()))
    y = cunorm.rms_norm(*map(first.put, (X, weight)))
    grads = cunorm.rms_norm_backward(*map(first.put, (X, X, weight)), rstd=first.put(rstd))
    expected = [*map(first.get, (y, grads.dx, grads.dweight))]
    for (one, x_kind), (other, kind) in product(available.items(), repeat=2):
        x, w, statistic = map(x_kind.put, (X, weight, rstd))
        for turn in range(2):
            given = [kind.put(np.zeros_like(array)) for array in (X, X, weight)]
            with at(one, other, turn):
                y = cunorm.rms_norm(x, kind.put(weight))
                assert x_kind.is_own(y, "float32")
                np.testing.assert_array_equal(x_kind.get(y), expected[0])
                if other not in WRITABLE:
                    with pytest.raises(ValueError, match=r"^rms_norm: out cannot be written to"):
                        cunorm.rms_norm(x, w, out=given[0])
                    continue
                assert cunorm.rms_norm(x, w, out=given[0]) is given[0]
                out = cunorm.NormGrads(dx=given[1], dweight=given[2])
                workspace = kind.put(np.zeros(1 << 16, np.float32))
                options = {"rstd": statistic, "out": out, "workspace": workspace}
                grads = cunorm.rms_norm_backward(x, x, w, **options)
                assert grads.dx is given[1]
                assert grads.dweight is given[2]
                for array, right in zip(given, expected, strict=True):
                    np.testing.assert_array_equal(kind.get(array), right)


# --- unusual NumPy arrays -------------------------------------------------------------------------


def unaligned():
    return np.frombuffer(b"\0" + X.tobytes(), np.uint8)[1:].view(np.float32).reshape(SHAPE)


def field(dtype, *more):
    array = np.zeros(SHAPE, [("value", dtype), *more])["value"]
    array[...] = X
    return array


# For each array: how to create it, and whether kernels read it in place (None: not tested).
ODD = {
    "a matrix": (lambda: X.view(np.matrix), True),
    "a row, expanded": (lambda: np.broadcast_to(X[0], SHAPE), True),
    "a field, with gaps": (lambda: field(np.float16, ("tag", np.int16)), None),
    "an odd address": (unaligned, False),
    "odd strides": (lambda: field(np.float32, ("tag", np.int8)), False),
}


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
@pytest.mark.parametrize("name", ODD)
def test_unusual_numpy_arrays_are_read_right(name, monkeypatch):
    make, is_read_there = ODD[name]
    array = make()
    expected = cunorm.rms_norm(np.array(array, order="C"))
    np.testing.assert_array_equal(cunorm.rms_norm(array), expected)
    if is_read_there is not None:
        calls = record_launches(monkeypatch)
        cunorm.rms_norm(array)
        address = calls[0].x.pointer
        assert (address == array.__array_interface__["data"][0]) == is_read_there
        assert address % array.itemsize == 0


# --- DLPack, PyTorch ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Foreign, ForeignBefore1])
def test_a_capsule_of_either_version_is_read_and_freed_but_not_consumed(kind):
    x = draw("x", SHAPE, "float32")[::-1, 3:50]
    given, alive = [], weakref.ref(x)

    class Kept(kind):
        def __dlpack__(self, **options):
            given.append(super().__dlpack__(**options))
            return given[-1]

    np.testing.assert_array_equal(cunorm.rms_norm(Kept(x)), cunorm.rms_norm(x))
    assert "dltensor" in repr(given[-1])  # a consumed capsule has another name
    del x
    assert alive() is not None
    given.clear()
    assert alive() is None


class Offset(Foreign):
    """An array whose capsule has a byte offset."""

    def __dlpack__(self, **options):
        capsule = super().__dlpack__(**options)
        tensor, _ = read_capsule(capsule)
        tensor.data, tensor.byte_offset = tensor.data - 64, 64
        return capsule


def test_a_foreign_objects_offset_in_bytes_counts():
    np.testing.assert_array_equal(cunorm.rms_norm(Offset(X)), cunorm.rms_norm(X))


def test_torchs_inference_mode_changes_nothing():
    kind = OnTorchCpu()
    x = kind.put(X)
    with kind.torch.inference_mode():
        y = cunorm.rms_norm(x)
        reused = cunorm.rms_norm(x.clone(), out=kind.torch.empty(SHAPE))
    for one in (y, reused):
        np.testing.assert_array_equal(one, cunorm.rms_norm(x))
