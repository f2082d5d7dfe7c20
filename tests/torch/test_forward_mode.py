# SPDX-License-Identifier: MIT
"""Tangents in cunorm.torch: under modes, vmap, and in-place changes of results."""

from functools import partial

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch.autograd import forward_ad  # noqa: E402
from torch.func import grad, jvp, vjp, vmap  # noqa: E402

import cunorm.torch as ct  # noqa: E402
from tests.fuzz.torch_programs import formula  # noqa: E402
from tests.support.operands import draw  # noqa: E402
from tests.support.torch_cases import Watch, case, tensor  # noqa: E402
from tests.support.torch_derivatives import (  # noqa: E402
    assert_close,
    directions,
    names,
    values,
)

# PyTorch warns in forward mode
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script")


@names
def test_modes_and_subclasses_see_tangents(name):
    call, given = case(name)[0], values(name)
    kind = type("Plain", (torch.Tensor,), {})
    with forward_ad.dual_level():
        duals = [*map(forward_ad.make_dual, given, directions(given, 0))]
        expected = [forward_ad.unpack_dual(one) for one in call(*duals)]
        with Watch() as watch:
            watched = call(*duals)
        for results in (watched, call(*(one.as_subclass(kind) for one in duals))):
            for one, right in zip(results, expected, strict=True):
                for mine, its in zip(forward_ad.unpack_dual(one), right, strict=True):
                    assert torch.equal(mine.as_subclass(torch.Tensor), its)
    assert any("_jvp" in operator.name() for operator, _ in watch.seen)


@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm", "group_norm", "add_rms_norm"])
def test_forward_mode_goes_through_a_vmap(norm):
    """PyTorch forgets under vmap which outputs of a Function are not differentiable."""
    x, v = (torch.tensor(draw(name, (3, 2, 4, 8), "float64")) for name in ("x", "v"))

    def rows(x):
        axes = (-2, -1) if norm == "group_norm" else (-1,)
        q = x if "rms" in norm else x - x.mean(axes, keepdim=True)
        return q * (q.square().mean(axes, keepdim=True) + (1e-6 if "rms" in norm else 1e-5)).rsqrt()

    def formula(x):
        return rows(3 * x) + 3 * x if norm == "add_rms_norm" else rows(x)

    def call(x):
        if norm == "add_rms_norm":
            return sum(ct.add_rms_norm(x, 2 * x))
        options = {"num_groups": 1, "channel_axis": -1} if norm == "group_norm" else {}
        return getattr(ct, norm)(x, **options)

    def derivatives(function):
        mapped = vmap(function)

        def loss(x):
            return mapped(x).sin().sum()

        def tangent(x):
            return jvp(loss, (x,), (v,))[1]

        yield jvp(mapped, (x,), (v,))[1]
        yield jvp(grad(loss), (x,), (v,))[1]
        yield grad(tangent)(x)

    for found, right in zip(derivatives(call), derivatives(formula), strict=True):
        torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-12)


def changed(norm, given, moved):
    """Return a function of an operand that changes the new stream in place."""

    def call(one):
        y, stream = norm(**given | {moved: one})
        return one.sin() + y + stream.mul_(3)

    return call, given[moved]


def changed_gradient(norm, given, moved):
    """Return a function of the stream's gradient that changes a gradient in place."""

    def results(one):
        return tuple(norm(**given | {moved: one}))

    def call(dy):
        (dx,) = vjp(results, given[moved])[1]((given["x"].sin(), dy))
        return dy.sin() + dx.mul_(3)

    return call, given["x"]


@pytest.mark.parametrize("position", ["no gate", "pre", "post", "branch"])
@pytest.mark.parametrize("moved", ["x", "residual"])
@pytest.mark.parametrize("change", [changed, changed_gradient])
def test_a_result_that_is_changed_in_place_leaves_the_tangents_of_operands(position, moved, change):
    operands = ["x", "residual", *(["gate"] if position != "no gate" else [])]
    given = {name: tensor(name, 3, 8, grad=False) for name in operands}
    options = {"gate_activation": "tanh", "gate_position": position} if "gate" in given else {}

    def exact(x, **others):
        return formula("add_layer_norm", x, others, dict(options), exact=True)

    tangent = tensor("tangent", 3, 8, grad=False)
    kept = tangent.clone()
    call, at = change(exact, given, moved)
    expected = jvp(call, (at,), (kept.clone(),))
    call, at = change(partial(ct.add_layer_norm, **options), given, moved)
    assert_close(jvp(call, (at,), (tangent,)), expected)
    assert torch.equal(tangent, kept)
    with forward_ad.dual_level():
        found = call(forward_ad.make_dual(at, tangent))
        assert_close(forward_ad.unpack_dual(found), expected)
    assert torch.equal(tangent, kept)


def test_a_backward_inside_of_a_dual_level_gives_the_gradients_of_tangents():
    x, gate = (tensor(name, 3, 8) for name in ("x", "gate"))
    tangent = tensor("tangent", 3, 8, grad=False)
    options = {"gate": gate, "gate_activation": "silu", "gate_position": "branch"}

    def by_formula(x, residual, **options):
        return formula("add_rms_norm", x, {"gate": options.pop("gate")}, options, exact=True)

    def loss(norm):
        y, _ = norm(forward_ad.make_dual(x, tangent), None, **options)
        return forward_ad.unpack_dual(y).tangent.sin().sum()

    with forward_ad.dual_level():
        right = loss(by_formula)  # whose own backward has no forward mode in PyTorch
        found = torch.autograd.grad(loss(ct.add_rms_norm), (x, gate))
    assert_close(found, torch.autograd.grad(right, (x, gate)))
