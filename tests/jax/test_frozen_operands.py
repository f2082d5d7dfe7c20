# SPDX-License-Identifier: MIT
"""Gradients of some operands while others are frozen, in changing order in one process.

JAX keeps the trace of a call, and uses it again for gradients of other operands. Each gradient must
nevertheless be that of the requested operands.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from tests.support.operands import at

jax = pytest.importorskip("jax", reason="JAX is not installed")
jnp = jax.numpy

import cunorm.jax  # noqa: E402
from tests.support import jax_formulas  # noqa: E402
from tests.support.jax_checks import CLOSE, drawn, float64  # noqa: E402, F401  # a fixture
from tests.support.jax_frames import _ffi, calls_of  # noqa: E402


def assert_gradients(own, formula, wanted, arrays, of_each=lambda derived: derived):
    """Compare the gradients of each choice of operands, in the order of `wanted`."""
    exact = jax.jit(of_each(jax.grad(formula, tuple(range(len(arrays))))))(*arrays)
    assert all(np.abs(one).max() > 0.01 for one in exact), "a comparison of zeros"
    for argnums in wanted:
        found = of_each(jax.grad(own, argnums))(*arrays)
        for argnum, got in zip(np.atleast_1d(argnums), jax.tree.leaves(found), strict=True):
            with at(f"operand {argnum} of {argnums}"):
                np.testing.assert_allclose(got, exact[argnum], **CLOSE)


# Nets of two norms in sequence; `norms` is the module of the norms.
def weighted(norms):
    return lambda x, w, v: norms.rms_norm(jnp.tanh(norms.rms_norm(x, w)), v)


def gated(norms):
    return lambda x, g, w: norms.rms_norm(jnp.tanh(norms.rms_norm(x, w, gate=g)), w, gate=x)


def streams(norms):
    def run(x, s, w, v, b):
        x, s = norms.add_rms_norm(x, s, w)
        x, s = norms.add_layer_norm(jnp.tanh(x), s, v, b)
        return x + s**2

    return run


def groups(norms):
    norm = partial(norms.group_norm, num_groups=2, activation="silu")
    return lambda x, w, v: norm(jnp.tanh(norm(x, weight=w)), weight=v)


def scanned(layer):
    @jax.checkpoint
    def step(carry, one, w, v):
        return layer(carry, one * w, v), carry.sum()

    def run(x, w, v):
        x, sums = jax.lax.scan(partial(step, w=w, v=v), x, jnp.arange(1.0, 3))
        return x + sums.sum()

    return run


def of_both(layer):
    """Return a layer that runs on x and on -x, and leaves out the first weight for one of them."""

    def other(x, w, v):
        return layer(x, v, v)

    def chosen(x, w, v):
        return jax.lax.cond(x.sum() > 0, layer, other, x, w, v)

    batch = jax.vmap(chosen, (0, None, None))
    return lambda x, w, v: batch(jnp.stack([x, -x]), w, v).sum(0)


ROWS, IMAGES, WEIGHTED = (3, 6), (2, 3, 6), ((2, 5), 5, 5)
# For each case: the net, its operands, what transforms it and its derivative.
NETS = {
    "gated": (gated, (ROWS, ROWS, 6)),
    "streams": (streams, (ROWS, ROWS, 6, 6, 6)),
    "groups": (groups, (IMAGES, 6, 6)),
    "jit": (weighted, WEIGHTED, jax.jit),
    "checkpoint": (weighted, WEIGHTED, jax.checkpoint),
    "scan with checkpoint": (weighted, WEIGHTED, scanned),
    "vmap of cond": (weighted, WEIGHTED, of_both),
    "each example": (
        weighted,
        WEIGHTED,
        lambda layer: layer,
        lambda derived: jax.vmap(derived, (0, None, None)),
    ),
}


def losses(net, transform=lambda layer: layer):
    """Return two losses of a net: with cunorm's functions, and with formulas."""
    runs = [transform(net(norms)) for norms in (cunorm.jax, jax_formulas)]  # JAX keeps their traces
    return [lambda *arrays, run=run: (run(*arrays) ** 3).sum() for run in runs]


@pytest.mark.parametrize("name", NETS)
def test_each_operand_has_its_gradient_whichever_was_asked_for_before(name):
    net, shapes, *transforms = NETS[name]
    argnums = [*range(len(shapes))]
    order = argnums[::-1] if transforms else argnums  # x is frozen first, or a parameter is
    wanted = [*order, (0, 2), *reversed(order), tuple(argnums)]
    assert_gradients(*losses(net, *transforms[:1]), wanted, drawn(*shapes), *transforms[1:])


@pytest.mark.parametrize("order", [(0, 1, 0), ((0, 1), 1, 0)])
def test_a_hessian_and_any_order_change_no_gradient(order):
    w, v, x = drawn(3, 3, (1, 3))
    own, formula = (lambda w, v, loss=loss: loss(x, w, v) for loss in losses(weighted))
    assert_gradients(own, formula, order, (w, v))
    np.testing.assert_allclose(jax.hessian(own)(w, v), jax.hessian(formula)(w, v), **CLOSE)
    assert_gradients(own, formula, order, (w, v))


def test_two_pullbacks_of_one_norm_by_different_operands_are_each_right_in_any_order():
    x, w, dy = drawn((4, 7), 7, (4, 7))
    for names in (("x", "w"), ("w", "x")):
        pulls = []
        for norm in (cunorm.jax.rms_norm, jax_formulas.rms_norm):
            of = {"x": (lambda x, f=norm: f(x, w), x), "w": (lambda w, f=norm: f(x, w), w)}
            pulls.append({name: jax.vjp(*of[name])[1] for name in names})
        for name in ("x", "w", "x"):
            found, right = (pull[name](dy)[0] for pull in pulls)
            np.testing.assert_allclose(found, right, **CLOSE)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_no_gradient_of_a_frozen_operand_is_computed(is_compiled, monkeypatch):
    x, w, v = drawn((3, 9), 9, 9)
    own, _ = losses(weighted)
    asked, run = [], _ffi.run

    def see(op, *args):
        outputs = run(op, *args)
        if op.name.endswith("backward"):
            new = {name for name, one in outputs.items() if one is not None}
            asked.append(new - {"dresidual"})  # the same array as dx
        return outputs

    monkeypatch.setattr(_ffi, "run", see)
    expected = {
        (0,): [{"dx"}, {"dx"}],
        (1,): [{"dx"}, {"dweight"}],
        (2,): [{"dweight"}],
        (1, 2): [{"dx", "dweight"}, {"dweight"}],
        (0, 1): [{"dx"}, {"dx", "dweight"}],
    }
    for argnums in [*expected, *reversed(expected)]:
        asked.clear()
        derived = jax.grad(own, argnums)
        jax.jit(derived)(x, w, v) if is_compiled else derived(x, w, v)
        if not is_compiled:
            assert asked == expected[argnums], argnums
        else:
            results = [
                len(one.results) for one in calls_of(derived, x, w, v)[-len(expected[argnums]) :]
            ]
            assert results == [len(names) for names in expected[argnums]]


def test_a_flax_net_whose_last_norm_is_frozen_trains_the_others():
    nnx = pytest.importorskip("flax.nnx", reason="Flax is not installed")

    class Net(nnx.Module):
        def __init__(self, norm, scales):
            self.norm, self.scales = norm, nnx.List([nnx.Param(one) for one in scales])

        def __call__(self, x):
            for scale in self.scales:
                x = self.norm(jnp.tanh(x), scale)
            return x

    x, *scales = drawn((3, 8), *[8] * 5)

    def is_trained(path, value):
        return isinstance(value, nnx.Param) and path[1] != 4

    def loss(net):
        return ((net(x) - jnp.arange(24.0).reshape(3, 8)) ** 2).mean()

    derive = nnx.grad(loss, argnums=nnx.DiffState(0, is_trained))
    norms = (cunorm.jax.rms_norm, lambda x, scale: jax_formulas.rms_norm(x, scale[...]))
    found, right = (jax.tree.leaves(derive(Net(norm, scales))) for norm in norms)
    assert len(found) == 4
    for got, its in zip(found, right, strict=True):
        assert np.abs(its).max() > 1e-3
        np.testing.assert_allclose(got, its, **CLOSE)
