# SPDX-License-Identifier: MIT
"""Gradients of some operands while others are frozen, in changing order in one process.

JAX keeps the trace of a call, and uses it again for gradients of other operands. Each gradient must
nevertheless be that of the requested operands.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from tests.support.operands import at, draw

jax = pytest.importorskip("jax", reason="JAX is not installed")
jnp = jax.numpy

import cunorm.jax  # noqa: E402
from tests.support import jax_formulas  # noqa: E402
from tests.support.jax_frames import _ffi, calls_of  # noqa: E402

# The bounds allow some roundings of float64 in sums of a few dozen terms.
CLOSE = {"rtol": 1e-10, "atol": 1e-11}


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def drawn(*shapes):
    return [jnp.asarray(draw(f"frozen {i}", shape, "float64")) for i, shape in enumerate(shapes)]


def assert_gradients(own, formula, wanted, arrays):
    """Compare the gradients of each choice of operands, in the order of `wanted`."""
    exact = jax.jit(jax.grad(formula, tuple(range(len(arrays)))))(*arrays)
    assert all(np.abs(one).max() > 0.01 for one in exact), "a comparison of zeros"
    for argnums in wanted:
        found = jax.grad(own, argnums)(*arrays)
        for argnum, got in zip(np.atleast_1d(argnums), jax.tree.leaves(found), strict=True):
            with at(f"operand {argnum} of {argnums}"):
                np.testing.assert_allclose(got, exact[argnum], **CLOSE)


# Nets of two norms in sequence; `norm_named` returns the norm of a name.
def weighted(norm_named):
    norm = norm_named("rms_norm")
    return lambda x, w, v: norm(jnp.tanh(norm(x, w)), v)


def gated(norm_named):
    norm = norm_named("rms_norm")
    return lambda x, g, w: norm(jnp.tanh(norm(x, w, gate=g)), w, gate=x)


def streams(norm_named):
    def run(x, s, w, v, b):
        x, s = norm_named("add_rms_norm")(x, s, w)
        x, s = norm_named("add_layer_norm")(jnp.tanh(x), s, v, b)
        return x + s**2

    return run


def groups(norm_named):
    norm = partial(norm_named("group_norm"), num_groups=2, activation="silu")
    return lambda x, w, v: norm(jnp.tanh(norm(x, weight=w)), weight=v)


ROWS, IMAGES = (3, 6), (2, 3, 6)
NETS = {
    "gated": (gated, (ROWS, ROWS, 6)),
    "streams": (streams, (ROWS, ROWS, 6, 6, 6)),
    "groups": (groups, (IMAGES, 6, 6)),
}


def losses(net):
    """Return two losses of a net: with cunorm's functions, and with formulas."""
    nets = [net(partial(getattr, module)) for module in (cunorm.jax, jax_formulas)]
    return [lambda *arrays, run=run: (run(*arrays) ** 3).sum() for run in nets]


@pytest.mark.parametrize("name", NETS)
def test_each_operand_has_its_gradient_whichever_was_asked_for_before(name):
    net, shapes = NETS[name]
    arrays, argnums = drawn(*shapes), [*range(len(shapes))]
    assert_gradients(*losses(net), [*argnums, *reversed(argnums), tuple(argnums)], arrays)


@pytest.mark.parametrize("order", [(0, 1, 0), ((0, 1), 1, 0)])
def test_a_refused_derivative_and_any_order_change_no_gradient(order):
    own, formula = losses(weighted)
    w, v, x = drawn(3, 3, (1, 3))

    def of_weights(loss):
        return lambda w, v: loss(x, w, v)

    assert_gradients(of_weights(own), of_weights(formula), order, (w, v))
    with pytest.raises(NotImplementedError):
        jax.hessian(of_weights(own))(w, v)
    assert_gradients(of_weights(own), of_weights(formula), order, (w, v))


def test_two_pullbacks_of_one_norm_by_different_operands_are_each_right_in_any_order():
    x, w, dy = drawn((4, 7), 7, (4, 7))
    for names in (("x", "w"), ("w", "x")):
        pulls, rights = {}, {}
        for name in names:
            for kept, norm in ((pulls, cunorm.jax.rms_norm), (rights, jax_formulas.rms_norm)):
                of_one = {"x": lambda x, f=norm: f(x, w), "w": lambda w, f=norm: f(x, w)}
                kept[name] = jax.vjp(of_one[name], {"x": x, "w": w}[name])[1]
        for name in ("x", "w", "x"):
            np.testing.assert_allclose(pulls[name](dy)[0], rights[name](dy)[0], **CLOSE)


def scanned(layer):
    @jax.checkpoint
    def step(carry, one, w, v):
        return layer(carry, one * w, v), carry.sum()

    def run(x, w, v):
        x, sums = jax.lax.scan(partial(step, w=w, v=v), x, jnp.arange(1.0, 3))
        return x + sums.sum()

    return run


def chosen(layer):
    """Return a layer with a branch that leaves out the first weight."""
    other = lambda x, w, v: layer(x, v, v)  # noqa: E731
    return lambda x, w, v: jax.lax.cond(x.sum() > 0, layer, other, x, w, v)


def of_both(layer):
    """Return a layer that runs on x and on -x, and leaves out the first weight for one of them."""
    batch = jax.vmap(chosen(layer), (0, None, None))
    return lambda x, w, v: batch(jnp.stack([x, -x]), w, v).sum(0)


FORMS = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "scan with checkpoint": scanned,
    "vmap of cond": of_both,
}


@pytest.mark.parametrize("form", FORMS)
def test_transformed_norms_have_the_gradients_of_the_operands_that_are_not_frozen(form):
    arrays = drawn((2, 5), 5, 5)
    losses_ = []
    for module in (cunorm.jax, jax_formulas):
        run = FORMS[form](weighted(partial(getattr, module)))  # made once: JAX keeps its traces
        losses_.append(lambda *arrays, run=run: (run(*arrays) ** 3).sum())
    assert_gradients(*losses_, [1, 2, 0, (0, 2), 1], arrays)


def test_gradients_of_each_example_are_those_of_the_operands_that_are_not_frozen():
    arrays = drawn((3, 5), 5, 5)
    own, formula = losses(weighted)
    all_argnums, axes = (0, 1, 2), (0, None, None)
    exact = jax.jit(jax.vmap(jax.grad(formula, all_argnums), axes))(*arrays)
    for argnums in ((2,), (1,), (0,), (0, 1), (2,)):
        found = jax.vmap(jax.grad(own, argnums), axes)(*arrays)
        for argnum, got in zip(argnums, found, strict=True):
            np.testing.assert_allclose(got, exact[argnum], **CLOSE)


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
        assert asked == expected[argnums], argnums
        if is_compiled:
            results = [len(one.results) for one in calls_of(derived, x, w, v)[-len(asked) :]]
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
    target = jnp.arange(24.0).reshape(3, 8)

    def is_trained(path, value):
        return isinstance(value, nnx.Param) and path[1] != 4

    found = []
    for norm in (cunorm.jax.rms_norm, lambda x, scale: jax_formulas.rms_norm(x, scale[...])):
        net = Net(norm, scales)
        derive = nnx.grad(
            lambda net: ((net(x) - target) ** 2).mean(), argnums=nnx.DiffState(0, is_trained)
        )
        found.append(jax.tree.leaves(derive(net)))
    assert len(found[0]) == 4
    for got, right in zip(*found, strict=True):
        assert np.abs(right).max() > 1e-3
        np.testing.assert_allclose(got, right, **CLOSE)
