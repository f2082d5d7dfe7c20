# SPDX-License-Identifier: MIT
"""Norms with quantised results under torch.func: batches, and derivatives, which are refused."""

from __future__ import annotations

import re
from contextlib import nullcontext
from functools import partial

import pytest

import cunorm

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.func import grad, jacfwd, jvp, vmap  # noqa: E402

import cunorm.torch as ct  # noqa: E402
from cunorm.torch._vmap import RowBatch  # noqa: E402
from tests.support.torch_cases import Watch, assert_same  # noqa: E402
from tests.support.torch_norms import drawn  # noqa: E402

# PyTorch warns in forward mode
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script")

ITEMS, WIDTH = 3, 96
WEIGHT = drawn(WIDTH, seed=1)
SCALES = {  # given scales, and the axis of the batch
    "no scale": (None, None),
    "a number": (0.02, None),
    "an element": (torch.tensor([0.02]), None),
    "one for each row": (drawn(4, 1, seed=2).abs(), None),
    "an element of each item": (drawn(ITEMS, seed=3).abs(), 0),
    "one for each row of each item": (drawn(4, ITEMS, 1, seed=4).abs(), 1),
}


@pytest.mark.parametrize("kind", SCALES)
def test_a_batch_is_one_call_with_more_rows(kind):
    x, (scale, own) = drawn(4, ITEMS, WIDTH), SCALES[kind]
    for axis in (-1, 1):

        def call(x, scale, axis=axis):
            found = ct.rms_norm_quantized(x, WEIGHT, scale=scale, axis=axis)
            return found[: 1 if scale is not None else 2]

        with Watch() as watch:
            found = vmap(call, (1, own))(x, scale)
        assert len(watch.seen) == 1
        scales = [scale if own is None else scale.select(own, item) for item in range(ITEMS)]
        each = map(call, x.unbind(1), scales)
        assert_same(found, map(torch.stack, zip(*each, strict=True)))
        no_scales = scale if own is None else scale.narrow(own, 0, 0)
        none = vmap(call, (1, own))(x[:, :0], no_scales)
        assert_same(none, [one[:0] for one in found])


def test_items_that_make_no_single_call_run_one_by_one(monkeypatch):
    monkeypatch.setattr(RowBatch, "is_one_call", lambda batch: False)
    x = drawn(ITEMS, 4, WIDTH)
    with Watch() as watch:
        found = vmap(lambda x: ct.rms_norm_quantized(x, WEIGHT)[:2])(x)
    assert len(watch.seen) == ITEMS
    assert_same(found, ct.rms_norm_quantized(x, WEIGHT)[:2])


def test_wrong_operands_of_items_are_an_error_that_has_an_items_shape():
    for x, scale, text in (
        (drawn(3, 4, WIDTH), drawn(3, 4), "scale has shape (4,), expected (4, 1), one number"),
        (drawn(3, 4, WIDTH), drawn(4), "scale has shape (4,), expected (4, 1), one number"),
        (drawn(3), drawn(3), "x has shape (), expected at least one axis"),
    ):
        axes = 0, 0 if len(scale) == 3 else None
        with pytest.raises(ValueError, match=re.escape(f"rms_norm_quantized: {text}")):
            vmap(lambda x, scale: ct.rms_norm_quantized(x, scale=scale).q, axes)(x, scale)


# --- derivatives, which there are not -------------------------------------------------------------

X = drawn(3, WIDTH)
GRADIENT = r"^rms_norm_quantized: {0} requires grad, but quantised results have no gradient: use "
GRADIENT += r"torch\.no_grad\(\) or {0}\.detach\(\)$"
TANGENT = r"^rms_norm_quantized: x has a forward-mode tangent, but quantised results have no "
TANGENT += r"tangent: use x\.detach\(\)$"


@pytest.mark.parametrize("name", ["x", "weight", "residual", "scale"])
def test_an_operand_that_requires_grad_is_refused(name):
    shape = {"weight": (WIDTH,), "scale": (1,)}.get(name, X.shape)
    leaf = torch.ones(shape, requires_grad=True)
    for mode, device, module in (
        (nullcontext, "cpu", ct),
        (nullcontext, "cpu", cunorm),
        (nullcontext, "meta", ct),
        (Watch, "cpu", ct),
        (FakeTensorMode, "meta", ct),
    ):
        given = {"x": X.to(device)} | {name: leaf.to(device)}
        with mode(), pytest.raises(ValueError, match=GRADIENT.format(name)):
            module.rms_norm_quantized(**given)


def scales(x):
    return ct.rms_norm_quantized(x, WEIGHT).scale


def total(x):
    return scales(x).sum()


def unrecorded(x):
    with torch.no_grad():
        return scales(x)


def in_dual_level(x):
    with forward_ad.dual_level(), torch.no_grad():
        return scales(forward_ad.make_dual(x, x))


def seen_in_dual_level(x):
    with Watch():
        in_dual_level(x)


DERIVATIVES = {
    "grad": (grad(total), GRADIENT),
    "grad of a batch": (grad(lambda x: vmap(total)(x).sum()), GRADIENT),
    "a batch of grads": (vmap(grad(total)), GRADIENT),
    "jvp": (lambda x: jvp(scales, (x,), (x,)), TANGENT),
    "jvp under no_grad": (lambda x: jvp(unrecorded, (x,), (x,)), TANGENT),
    "jvp of a batch": (lambda x: jvp(vmap(scales), (x,), (x,)), TANGENT),
    "jacfwd": (jacfwd(total), TANGENT),
    "a dual tensor": (in_dual_level, TANGENT),
    "a dual tensor, seen": (seen_in_dual_level, TANGENT),
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_a_derivative_is_refused(name):
    derivative, text = DERIVATIVES[name]
    with pytest.raises(ValueError, match=text.format("x")):
        derivative(X)


def test_derivatives_of_the_rest_of_a_function_remain():
    for scale in (unrecorded, lambda x: scales(x.detach())):

        def scaled(x, scale=scale):
            return scale(x) * x

        for function in (scaled, vmap(scaled)):
            found = grad(lambda x, function=function: function(x).sum())(X)
            assert torch.equal(found, scales(X).expand(X.shape))
    tangent = jvp(lambda x: scales(x.detach()) * x, (X,), (X,))[1]
    assert torch.equal(tangent, scales(X) * X)
    with forward_ad.dual_level():
        assert torch.equal(scales(forward_ad.make_dual(X, X).detach()), scales(X))


@pytest.mark.filterwarnings("ignore:.*Dynamo")
def test_compilers_and_export_refuse_derivatives():
    leaf = X.clone().requires_grad_()

    class Total(torch.nn.Module):
        forward = staticmethod(total)

    compiled = partial(torch.compile, total, backend="eager")
    text = GRADIENT.format("x").strip("^$")
    with torch.no_grad():
        assert torch.equal(compiled(fullgraph=True)(leaf), total(X))
    with pytest.raises(torch._dynamo.exc.Unsupported, match=text):
        compiled(fullgraph=True)(leaf)
    with pytest.raises(ValueError, match=text):
        compiled()(leaf)
    with pytest.raises(ValueError, match=text):
        torch.export.export(Total(), (leaf,), strict=False)
