# SPDX-License-Identifier: MIT
"""cunorm.jax in float64: values and gradients are those of JAX's own formulas."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

import cunorm
from cunorm import reference
from tests.support.jax_formulas import FORMULAS, case, leaves
from tests.support.operands import draw

jax = pytest.importorskip("jax", reason="JAX is not installed")

jnp = jax.numpy

from jax.test_util import check_grads  # noqa: E402

import cunorm.jax  # noqa: E402
from cunorm.jax import _launch  # noqa: E402

ROWS = [
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
]
CHANNELS = [
    case("group_norm", "weight", "bias", num_groups=2, activation="gelu"),
    case("group_norm", "weight", num_groups=1, activation="tanh", channel_axis=1),
    case("group_norm", num_groups=4, eps=0.1),
    case("instance_norm", "weight", "bias", activation="silu", channel_axis=1),
]
CASES = [*ROWS, *CHANNELS]
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


@pytest.mark.parametrize("norm", CASES, ids=str)
def test_values_and_gradients_are_those_of_jaxs_own_formulas(norm):
    arrays = norm.draw()

    def both(functions):
        call = lambda arrays: norm.call(functions, arrays)  # noqa: E731
        derive = jax.grad(lambda arrays: weighted(call(arrays)))
        return jax.jit(lambda arrays: (call(arrays), derive(arrays)))(arrays)

    actual, expected = both(cunorm.jax), both(FORMULAS)
    assert jax.tree.structure(actual[1]) == jax.tree.structure(expected[1])
    for got, right in zip(leaves(actual), leaves(expected), strict=True):
        assert got.dtype == np.float64
        np.testing.assert_allclose(got, right, **CLOSE)


@pytest.mark.parametrize("norm", CASES, ids=str)
def test_gradients_are_those_of_finite_differences(norm):
    check_grads(
        jax.jit(lambda arrays: norm.call(cunorm.jax, arrays)),
        (norm.draw(),),
        order=1,
        modes=["rev"],
    )


@pytest.mark.parametrize("norm", [ROWS[4], ROWS[7], CHANNELS[0]], ids=str)
def test_values_are_those_of_the_reference(norm):
    arrays = norm.draw()
    actual = norm.call(cunorm.jax, arrays)
    exact = norm.call(reference, {name: np.asarray(array) for name, array in arrays.items()})
    for got, right in zip(leaves(actual), leaves(exact), strict=True):
        np.testing.assert_allclose(got, right, **CLOSE)


def test_only_the_stream_or_only_y_being_used_gives_their_gradients_alone():
    x, residual, weight = (jnp.asarray(draw(n, (2, 4), "float64")) for n in ("x", "r", "w"))
    arrays = (x, residual, weight[0])
    for field in (0, 1):
        got, right = (
            jax.grad(lambda *a, f=f, field=field: weighted(f(*a)[field]), (0, 1, 2))(*arrays)
            for f in (cunorm.jax.add_rms_norm, FORMULAS["add_rms_norm"])
        )
        for one, other in zip(got, right, strict=True):
            np.testing.assert_allclose(one, other, **CLOSE)


@pytest.mark.parametrize("wanted", ["x", "weight", "bias"])
def test_gradients_that_nobody_wants_are_not_computed(wanted, monkeypatch):
    arrays = case("layer_norm", "weight", "bias").draw()
    ops = []
    run = _launch.run
    monkeypatch.setattr(_launch, "run", lambda op, arrays: ops.append(op) or run(op, arrays))

    def loss(own):
        return weighted(cunorm.jax.layer_norm(**arrays | {wanted: own}))

    jax.grad(loss)(arrays[wanted])
    (backward,) = (op for op in ops if op.kind == "row_backward")
    assert backward.said[-1] == (wanted,)


def test_every_function_takes_the_arguments_of_its_namesake_but_memory():
    for name in cunorm.jax.__all__:
        own = inspect.signature(getattr(cunorm.jax, name)).parameters
        plain = dict(inspect.signature(getattr(cunorm, name)).parameters)
        for memory in ("out", "workspace"):
            plain.pop(memory, None)
        assert list(own) == list(plain), name
        for parameter, its in plain.items():
            assert (own[parameter].kind, own[parameter].default) == (its.kind, its.default)
