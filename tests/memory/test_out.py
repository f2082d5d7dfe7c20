# SPDX-License-Identifier: MIT
"""Arrays in `out=`: they are written and returned, and they set the dtype of what is written."""

from __future__ import annotations

import numpy as np
import pytest

import cunorm
from cunorm import AddNorm, GroupNormForward, GroupNormGrads, NormForward, NormGrads
from tests.support.calls import (
    GROUP_NORMS,
    assert_same,
    call_of,
    devices,
    fields,
    filled,
    host,
    names,
    to,
)
from tests.support.group_norm_cases import laid_out
from tests.support.operands import assert_same_bits, at, draw

MEMORIES = [(-1, "last"), (1, "last"), (1, "first"), (-1, "first")]


@pytest.mark.parametrize("kind", ["numpy", "torch", pytest.param("cupy", marks=pytest.mark.gpu)])
@names
def test_results_are_written_to_the_arrays_given_and_the_others_are_made(name, kind):
    call = call_of(name, kind=kind)
    expected = {field: host(array).copy() for field, array in fields(call.make()).items()}
    for part in (None, *call.parts()):
        for array in call.out.values():
            array[...] = np.nan
        result = fields(call.run(without=part))
        with at(part):
            for field, array in call.out.items():
                assert (result[field] is array) == (field != part)
            for field, right in expected.items():
                assert_same_bits(host(result[field]), right, field)


@pytest.mark.parametrize(("channel_axis", "memory"), MEMORIES)
@pytest.mark.parametrize("shape", [(3, 4, 6, 10), (2, 70, 70, 10)], ids=["one pass", "several"])
@pytest.mark.parametrize("name", GROUP_NORMS)
def test_results_of_group_norms_are_written_in_each_memory_layout(
    name, shape, channel_axis, memory
):
    """In place, too."""
    shape = shape if channel_axis == -1 else (shape[0], shape[-1], *shape[1:-1])
    call = call_of(name, shape, channel_axis=channel_axis, num_groups=5)
    for named, key in ((call.arrays, "x"), (call.arrays, "dy"), (call.out, "y"), (call.out, "dx")):
        if key in named:
            named[key] = laid_out(named[key], channel_axis, memory)
    call.workspace = call.sized_workspace()
    expected = call.make()
    assert_same(call.run(), expected)
    field = "dx" if "dx" in call.out else "y"
    for argument in [key for key in ("x", "dy") if key in call.arrays]:
        before, place = call.arrays[argument], laid_out(call.arrays[argument], channel_axis, memory)
        call.arrays[argument] = call.out[field] = place
        with at(argument):
            assert_same(call.run(), expected)
        call.arrays[argument] = before


def test_gradients_of_x_and_of_the_stream_may_each_have_an_array():
    call = call_of("layer_norm_backward")
    expected = call.make()
    array, other = (np.empty((5, 8), np.float32) for _ in range(2))
    for out in (NormGrads(dx=array), NormGrads(dresidual=array)):
        grads = call.make(out=out)
        assert grads.dx is grads.dresidual is array
        assert_same(grads, expected)
    grads = call.make(out=NormGrads(dx=array, dresidual=other))
    assert grads.dx is array
    assert grads.dresidual is other
    assert_same(grads, expected)


def test_a_stream_that_is_x_itself_is_returned_with_given_results():
    x = draw("x", (5, 8), "float32")
    y = np.empty_like(x)
    for _ in range(2):
        assert cunorm.add_rms_norm(x, None, out=AddNorm(y=y)).residual is x
        assert cunorm.rms_norm_forward(x, out=NormForward(y=y)).residual is None
        told = {"residual_dtype": "float32", "out": NormForward(y=y)}
        assert cunorm.rms_norm_forward(x, **told).residual is x


# --- dtypes ---------------------------------------------------------------------------------------


@devices
def test_an_array_in_out_sets_the_dtype_of_a_row_norms_result(kind):
    def empty(shape, dtype="float16"):
        return to(kind, np.empty(shape, dtype))

    x, dy, gate = (to(kind, draw(name, (5, 8), "bfloat16")) for name in ("x", "dy", "gate"))
    told = {"weight": to(kind, draw("weight", 8, "float32")), "gate": gate}
    forward, y = cunorm.rms_norm_forward(x, **told, dtype="float16"), empty((5, 8))
    assert cunorm.rms_norm(x, **told, out=y) is y
    assert_same_bits(host(y), host(forward.y))
    stream = empty((5, 8))
    apart = cunorm.add_rms_norm(x, None, residual_dtype="float16")
    assert cunorm.add_rms_norm(x, None, out=AddNorm(residual=stream)).residual is stream
    assert_same_bits(host(stream), host(apart.residual))
    narrow, wide = (
        NormGrads(dweight=empty(8, dtype), dgate=empty((5, 8), dtype))
        for dtype in ("float16", "float64")
    )
    for out in (narrow, wide):
        grads = cunorm.rms_norm_backward(dy, x, **told, rstd=forward.rstd, out=out)
        assert grads.dresidual.dtype == x.dtype
    for field in ("dweight", "dgate"):
        right = host(getattr(wide, field)).astype(np.float32).astype(np.float16)
        assert_same_bits(host(getattr(narrow, field)), right, field)


@devices
def test_an_array_in_out_sets_the_dtype_of_a_group_norms_result(kind):
    call = call_of("group_norm_backward", kind=kind)
    x = call.arrays["x"]
    y, dx, wide = (to(kind, np.empty(x.shape, d)) for d in ("float16", "float16", "float64"))
    for array in (dx, wide):
        assert call.make(out=GroupNormGrads(dx=array)).dx is array
    assert_same_bits(host(dx), host(wide).astype(np.float16))
    assert cunorm.group_norm_forward(x, 4, out=GroupNormForward(y=y)).y is y
    assert_same_bits(host(y), host(cunorm.group_norm(x, 4, dtype="float16")))


# --- views ----------------------------------------------------------------------------------------

ROWS = {
    "padded": ((5, 14), lambda a: a[:, 3:11]),
    "every other": ((10, 8), lambda a: a[::2]),
    "reversed": ((5, 9), lambda a: a[::-1, 1:]),
}
LAST = {
    "padded": ((3, 24, 16), lambda a: a[..., 3:13]),
    "every other": ((6, 48, 10), lambda a: a[::2, ::2]),
    "reversed": ((3, 24, 12), lambda a: a[::-1, ::-1, 1:11]),
    "samples inside": ((24, 3, 10), lambda a: a.transpose(1, 0, 2)),
}
FIRST = {
    "padded": ((3, 10, 30), lambda a: a[..., 3:27]),
    "every other": ((6, 20, 24), lambda a: a[::2, ::2]),
    "reversed": ((3, 10, 26), lambda a: a[::-1, ::-1, 1:25]),
    "samples between": ((10, 3, 24), lambda a: a.transpose(1, 0, 2)),
}


def check_views(call, views, kind):
    expected = fields(call.make())
    for shape, view in views.values():
        buffers = {
            field: to(kind, filled(np.empty(shape, np.float32)))
            for field in call.out
            if field in ("y", "dx", "dgate", "residual")
        }
        call.out |= {field: view(buffer) for field, buffer in buffers.items()}
        with at(shape):
            call.run()
            for field, buffer in buffers.items():
                right = host(expected[field])
                assert_same_bits(host(view(buffer)), right, field)
                assert np.count_nonzero(~np.isnan(host(buffer))) == right.size


@devices
@pytest.mark.parametrize("name", ["layer_norm_forward", "layer_norm_backward"])
def test_a_view_in_out_of_a_row_norm_is_written_and_nothing_around_it(name, kind):
    check_views(call_of(name, kind=kind), ROWS, kind)


@devices
@pytest.mark.parametrize(("channel_axis", "views"), [(-1, LAST), (1, FIRST)], ids=["last", "first"])
@pytest.mark.parametrize("name", ["group_norm_forward", "group_norm_backward"])
def test_a_view_in_out_of_a_group_norm_is_written_and_nothing_around_it(
    name, channel_axis, views, kind
):
    shape = (3, 24, 10) if channel_axis == -1 else (3, 10, 24)
    call = call_of(name, shape, kind, channel_axis=channel_axis, num_groups=5)
    check_views(call, views, kind)


# --- autograd -------------------------------------------------------------------------------------


def versions(named):
    return {key: tensor._version for key, tensor in named.items() if hasattr(tensor, "_version")}


@names
def test_torch_knows_which_tensors_were_written_to(name):
    """Once in each call, whether it is planned or made again."""
    call = call_of(name, kind="torch")
    read = call.arrays | {"workspace": call.workspace}
    for part in (None, *call.out):
        for turn in range(2):
            unchanged, before = versions(read), versions(call.out)
            call.run(without=part)
            with at(part, turn):
                assert versions(read) == unchanged
                assert versions(call.out) == {
                    field: version + (field != part) for field, version in before.items()
                }


def test_a_saved_tensor_that_is_written_to_is_an_error():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    call = call_of("rms_norm", kind="torch")
    leaf = torch.ones_like(call.out["y"], requires_grad=True)
    for _ in range(2):
        product = (leaf * call.out["y"]).sum()
        call.run()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()
