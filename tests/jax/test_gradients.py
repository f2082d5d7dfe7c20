# SPDX-License-Identifier: MIT
"""cunorm.jax in float64: values and gradients are those of JAX's own formulas."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

import cunorm
from tests.support.jax_formulas import FORMULAS, case, leaves
from tests.support.jax_frames import calls_of
from tests.support.kinds import OnJax, OnJaxCpu
from tests.support.operands import draw

jax = pytest.importorskip("jax", reason="JAX is not installed")

jnp = jax.numpy

import cunorm.jax  # noqa: E402

CASES = [
    case("rms_norm", "weight"),
    case("rms_norm", "weight", "gate", axis=1, gate_activation="identity"),
    case("layer_norm", "weight", "bias", "gate"),
    case("layer_norm", "bias", "gate", gate_activation="gelu_tanh", gate_position="pre", axis=-2),
    case("normalize", "weight", "bias", "gate", c=2.0, gate_activation="tanh", weight_offset=1.0),
    case("l2_norm", groups=2),
    case("add_rms_norm", "residual", "weight", "gate", groups=2, gate_activation="sigmoid"),
    case("add_layer_norm", "residual", "weight", "bias"),
    case("add_normalize", "residual", "gate", center=True, gate_activation="gelu", groups=2),
    case("add_normalize", "gate", gate_activation="relu", gate_position="pre", c=3.0, eps=0.5),
    case("group_norm", "weight", "bias", num_groups=2, activation="gelu"),
    case("group_norm", "weight", num_groups=1, activation="tanh", channel_axis=1),
    case("group_norm", num_groups=4, eps=0.1),
    case("instance_norm", "weight", "bias", activation="silu", channel_axis=1),
]
# Of float64, and sums of a few terms: what differs by more is another formula.
CLOSE = {"rtol": 1e-11, "atol": 1e-12}


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def weighted(results):
    """Return a sum of all results in which each element counts differently."""
    parts = jax.tree.leaves(results)
    return sum((part * jnp.cos(jnp.arange(part.size).reshape(part.shape))).sum() for part in parts)


@pytest.mark.parametrize("kind", [OnJaxCpu, pytest.param(OnJax, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("norm", CASES, ids=str)
def test_values_and_gradients_are_those_of_jaxs_own_formulas(norm, kind):
    @jax.jit
    def both(arrays):
        found = []
        for functions in (cunorm.jax, FORMULAS):
            call = lambda arrays, f=functions: norm.call(f, arrays)  # noqa: E731
            derive = jax.grad(lambda arrays, call=call: weighted(call(arrays)))
            found.append((call(arrays), derive(arrays)))
        return found

    with jax.default_device(kind().device):
        actual, expected = both(norm.draw())
    for got, right in zip(leaves(actual), leaves(expected), strict=True):
        assert got.dtype == np.float64
        np.testing.assert_allclose(got, right, **CLOSE)


def test_only_the_stream_or_only_y_being_used_gives_their_gradients_alone():
    x, residual, weight = (jnp.asarray(draw(n, (2, 4), "float64")) for n in ("x", "r", "w"))

    @jax.jit
    def both(*arrays):
        return [
            jax.grad(lambda *a, f=f, field=field: weighted(f(*a)[field]), (0, 1, 2))(*arrays)
            for f in (cunorm.jax.add_rms_norm, FORMULAS["add_rms_norm"])
            for field in (0, 1)
        ]

    found = leaves(both(x, residual, weight[0]))
    for got, right in zip(found[:6], found[6:], strict=True):
        np.testing.assert_allclose(got, right, **CLOSE)


@pytest.mark.parametrize("wanted", ["x", "weight", "bias"])
def test_gradients_that_nobody_wants_are_not_computed(wanted):
    arrays = case("layer_norm", "weight", "bias").draw()

    def loss(own):
        return weighted(cunorm.jax.layer_norm(**arrays | {wanted: own}))

    _, backward = calls_of(jax.grad(loss), arrays[wanted])
    assert backward.results == [(arrays[wanted].shape, "float64")]


def test_every_function_takes_the_arguments_of_its_namesake_but_memory():
    for name in cunorm.jax.__all__:
        own = inspect.signature(getattr(cunorm.jax, name)).parameters
        plain = dict(inspect.signature(getattr(cunorm, name)).parameters)
        for memory in ("out", "workspace"):
            plain.pop(memory, None)
        assert list(own) == list(plain), name
        for parameter, its in plain.items():
            assert (own[parameter].kind, own[parameter].default) == (its.kind, its.default)
