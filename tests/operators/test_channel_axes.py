# SPDX-License-Identifier: MIT
"""`channel_axis` names the last axis or axis 1, counted from either end, in every front end."""

import numpy as np
import pytest

import cunorm
from cunorm import reference
from cunorm.reference import jvp

SHAPE, GROUPS = (2, 6, 5, 6), 3  # also 6 positions at the end: a wrong axis would give no error
SPELLINGS = [(1, 1), (-3, 1), (3, 3), (-1, 3)]  # a channel_axis, and the axis that it names
USUAL = {1: 1, 3: -1}
spelled = pytest.mark.parametrize(("given", "axis"), SPELLINGS)
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def drawn(seed, *shape):
    return np.random.default_rng(seed).normal(1, 2, shape).astype(np.float32)


def operands():
    return drawn(0, *SHAPE), drawn(1, 6), drawn(2, 6)


def last(array, axis):
    """Return x or y with the channels, which are the axis, moved to the end."""
    return np.moveaxis(np.asarray(array), axis, -1)


def exact(x, weight, bias, axis, groups=GROUPS):
    """Return y and the gradients of (y * y).sum() / 2, by the oracle, with the channels last."""
    x, options = last(x, axis), {"activation": "silu"}
    f = reference.group_norm_forward(x, groups, weight, bias, **options)
    grads = reference.group_norm_backward(
        f.y, x, groups, weight, bias, mean=f.mean, rstd=f.rstd, **options
    )
    return f.y, grads


@spelled
def test_numpy_arrays_are_normalised_over_the_axis_that_is_named(given, axis):
    x, weight, bias = operands()
    options = {"activation": "silu", "channel_axis": given}
    y, grads = exact(x, weight, bias, axis)
    f = cunorm.group_norm_forward(x, GROUPS, weight, bias, **options)
    found = cunorm.group_norm_backward(
        f.y, x, GROUPS, weight, bias, mean=f.mean, rstd=f.rstd, **options
    )
    np.testing.assert_allclose(last(f.y, axis), y, **CLOSE)
    np.testing.assert_allclose(last(found.dx, axis), grads.dx, **CLOSE)
    np.testing.assert_allclose(found.dweight, grads.dweight, rtol=1e-4, atol=1e-3)
    each = cunorm.instance_norm(x, weight, bias, **options)
    np.testing.assert_allclose(last(each, axis), exact(x, weight, bias, axis, 6)[0], **CLOSE)
    more = {"x_tangent": drawn(3, *SHAPE), "mean": f.mean, "rstd": f.rstd} | options
    tangent = cunorm.group_norm_jvp(x, GROUPS, weight, bias, **more)
    more |= {"x": last(x, axis), "x_tangent": last(more["x_tangent"], axis), "channel_axis": -1}
    right = jvp.group_norm_jvp(num_groups=GROUPS, weight=weight, bias=bias, **more)
    np.testing.assert_allclose(last(tangent, axis), right, **CLOSE)


@spelled
def test_where_both_memory_layouts_fit_results_have_the_layout_of_the_axis(given, axis):
    shape = (2, 1, 3, 4) if axis == 1 else (2, 3, 4, 1)
    y = cunorm.group_norm(drawn(0, *shape), 1, channel_axis=given)
    usual = cunorm.group_norm(drawn(0, *shape), 1, channel_axis=USUAL[axis])
    assert y.strides == usual.strides
    np.testing.assert_array_equal(y, usual)


@spelled
def test_the_workspace_of_a_named_axis_is_that_of_its_usual_name(given, axis):
    x, weight, bias = drawn(0, 2, 6, 500, 6), *operands()[1:]
    for op in ("group_norm", "group_norm_backward"):
        options = {"num_groups": 3}
        sizes = [
            cunorm.workspace_size(op, x, weight, bias, channel_axis=one, **options)
            for one in (given, USUAL[axis])
        ]
        assert sizes[0] == sizes[1] > 0


@pytest.mark.parametrize("given", [1, -1])
def test_two_axes_have_one_axis_of_channels(given):
    x, weight, bias = drawn(0, 3, 6), *operands()[1:]
    y = cunorm.group_norm(x, GROUPS, weight, bias, activation="silu", channel_axis=given)
    np.testing.assert_allclose(y, exact(x, weight, bias, 1)[0], **CLOSE)


@spelled
@pytest.mark.parametrize("transform", ["autograd", "vmap", "compile"])
def test_torch_tensors_are_normalised_over_the_axis_that_is_named(given, axis, transform):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    import cunorm.torch as ct

    arrays = operands()
    leaves = [torch.from_numpy(one).requires_grad_() for one in arrays]

    def norm(x, weight, bias):
        return ct.group_norm(x, GROUPS, weight, bias, activation="silu", channel_axis=given)

    function = norm
    if transform == "compile":
        function = torch.compile(norm, backend="aot_eager", fullgraph=True)
    if transform == "vmap":  # an example has the axes of x, and the batch one more
        batched = torch.func.vmap(norm, (2, None, None))
        function = lambda x, *more: batched(torch.stack([x, x + 1], 2), *more)[0]  # noqa: E731
    y = function(*leaves)
    grads = torch.autograd.grad(y.square().sum() / 2, leaves)
    right, exactly = exact(*arrays, axis)
    np.testing.assert_allclose(last(y.detach(), axis), right, **CLOSE)
    np.testing.assert_allclose(last(grads[0], axis), exactly.dx, **CLOSE)
    np.testing.assert_allclose(grads[1], exactly.dweight, rtol=1e-4, atol=1e-3)


@spelled
def test_second_derivatives_in_torch_are_over_the_axis_that_is_named(given, axis):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    import cunorm.torch as ct

    def second(norm, channel_axis):
        x = torch.from_numpy(operands()[0]).double().requires_grad_()
        y = norm(x, GROUPS, channel_axis=channel_axis)
        (dx,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(dx.square().sum(), x)[0]

    def formula(x, groups, channel_axis):
        first = x.movedim(axis, 1)
        return torch.nn.functional.group_norm(first, groups, eps=1e-5).movedim(1, axis)

    ours, theirs = second(ct.group_norm, given), second(formula, given)
    torch.testing.assert_close(ours, theirs)


@spelled
@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp"])
def test_jax_arrays_are_normalised_over_the_axis_that_is_named(given, axis, transform):
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    import cunorm.jax

    arrays = operands()

    def norm(x, weight, bias):
        options = {"activation": "silu", "channel_axis": given}
        return cunorm.jax.group_norm(x, GROUPS, weight, bias, **options)

    def loss(*arrays):
        y = norm(*arrays)
        return (y * y).sum() / 2, y

    right, exactly = exact(*arrays, axis)
    if transform == "vmap":  # an example has the axes of x, and the batch one more
        x = np.stack([arrays[0], arrays[0] + 1], 2)
        run = jax.vmap(jax.grad(loss, (0, 1), has_aux=True), (2, None, None))
        (dx, dweight), y = jax.tree.map(lambda one: one[0], run(x, *arrays[1:]))
    else:
        (dx, dweight), y = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(*arrays)
    np.testing.assert_allclose(last(y, axis), right, **CLOSE)
    np.testing.assert_allclose(last(dx, axis), exactly.dx, **CLOSE)
    np.testing.assert_allclose(dweight, exactly.dweight, rtol=1e-4, atol=1e-3)
    if transform == "jvp":
        tangent = drawn(3, *SHAPE)
        found = jax.jvp(lambda x: loss(x, *arrays[1:])[0], arrays[:1], (tangent,))[1]
        np.testing.assert_allclose(found, (last(tangent, axis) * exactly.dx).sum(), rtol=1e-4)
