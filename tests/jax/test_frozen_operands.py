# SPDX-License-Identifier: MIT
"""Gradients of some operands while others are frozen, in changing order in one process.

JAX keeps the trace of a call, and uses it again for gradients of other operands. Each gradient must
nevertheless be that of the requested operands.
"""

from __future__ import annotations

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


# Nets of two norms in sequence; `norms` is the module of the norms.
def weighted(norms):
    return lambda x, w, v: norms.rms_norm(jnp.tanh(norms.rms_norm(x, w)), v)


def streams(norms):
    def run(x, s, w, v, b):
        x, s = norms.add_rms_norm(x, s, w)
        x, s = norms.add_layer_norm(jnp.tanh(x), s, v, b)
        return x + s**2

    return run


NETS = {  # the nets, and the shapes of their operands
    "streams": (streams, ((3, 6), (3, 6), 6, 6, 6)),
    "checkpoint": (lambda norms: jax.checkpoint(weighted(norms)), ((2, 5), 5, 5)),
}


def losses(net):
    """Return two losses of a net: with cunorm's functions, and with formulas."""
    runs = [net(norms) for norms in (cunorm.jax, jax_formulas)]  # JAX keeps their traces
    return [lambda *arrays, run=run: (run(*arrays) ** 3).sum() for run in runs]


@pytest.mark.parametrize("name", NETS)
def test_each_operand_has_its_gradient_whichever_was_asked_for_before(name):
    """tests/fuzz/test_jax_programs.py has other nets, transformations and orders."""
    net, shapes = NETS[name]
    (own, formula), arrays, argnums = losses(net), drawn(*shapes), [*range(len(shapes))]
    exact = jax.jit(jax.grad(formula, tuple(argnums)))(*arrays)
    assert all(np.abs(one).max() > 0.01 for one in exact), "a comparison of zeros"
    for wanted in [*argnums, (0, 2), *reversed(argnums), tuple(argnums)]:
        found = jax.grad(own, wanted)(*arrays)
        for argnum, got in zip(np.atleast_1d(wanted), jax.tree.leaves(found), strict=True):
            with at(f"operand {argnum} of {wanted}"):
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
