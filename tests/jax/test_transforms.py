# SPDX-License-Identifier: MIT
"""cunorm.jax under JAX's transformations, in float32, against JAX's own formulas."""

from __future__ import annotations

from functools import partial

import ml_dtypes
import numpy as np
import pytest

from tests.support.jax_formulas import FORMULAS, group_norm, leaves, normalize, rms_norm
from tests.support.operands import draw

jax = pytest.importorskip("jax", reason="JAX is not installed")

jnp = jax.numpy

import cunorm.jax  # noqa: E402
from cunorm.jax import _batch  # noqa: E402

# Of float32, a few roundings of 6e-8 each, in sums of up to 40 terms of about 1.
CLOSE = {"rtol": 2e-6, "atol": 1e-5}


def drawn(*shapes):
    return [jnp.asarray(draw(f"{i}", shape, "float32")) for i, shape in enumerate(shapes)]


def assert_alike(actual, expected):
    actual, expected = leaves(actual), leaves(expected)
    for got, right in zip(actual, expected, strict=True):
        assert got.shape == right.shape
        np.testing.assert_allclose(got, right, **CLOSE)


def square(norm):
    return lambda *arrays: (norm(*arrays) ** 2 * jnp.arange(8.0)).sum()


@pytest.fixture
def batches(monkeypatch):
    """Collect the ops that are run for each example by itself."""
    seen = []
    one_by_one = _batch._one_by_one
    monkeypatch.setattr(_batch, "_one_by_one", lambda *a: seen.append(a[0]) or one_by_one(*a))
    return seen


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0), (2, 1)])
def test_vmap_over_rows_over_weights_and_over_both(axes, batches):
    (x, weight) = drawn((4, 3, 8), (4, 8))
    arrays = (
        x[0] if axes[0] is None else jnp.moveaxis(x, 0, axes[0]),
        weight[0] if axes[1] is None else jnp.moveaxis(weight, 0, axes[1]),
    )
    got, right = (jax.vmap(norm, axes)(*arrays) for norm in (cunorm.jax.rms_norm, rms_norm))
    assert_alike(got, right)
    assert bool(batches) == (axes[1] is not None)  # one call serves examples that share a weight


def test_vmap_with_a_gate_and_a_positive_axis_is_one_call(batches):
    x, gate, weight = drawn((5, 2, 3, 8), (5, 2, 3, 8), (3, 8))
    for batched in ((0, 0), (0, None), (None, 0)):
        arrays = [a if is_it == 0 else a[0] for a, is_it in zip((x, gate), batched, strict=True)]
        got, right = (
            jax.vmap(lambda x, gate, f=f: f(x, weight, axis=1, gate=gate), batched)(*arrays)
            for f in (cunorm.jax.normalize, normalize)
        )
        assert_alike(got, right)
    assert not batches


def test_vmap_of_one_row_without_leading_axes():
    (x,) = drawn((4, 8))
    assert_alike(jax.vmap(cunorm.jax.rms_norm)(x), rms_norm(x))


@pytest.mark.parametrize("channel_axis", [1, -1])
def test_vmap_of_a_group_norm_is_one_call_on_all_samples(channel_axis, batches):
    x, weight = drawn((3, 2, 8, 8), (8,))
    got, right = (
        jax.vmap(lambda x, f=f: f(x, 2, weight, activation="silu", channel_axis=channel_axis))(x)
        for f in (cunorm.jax.group_norm, group_norm)
    )
    assert_alike(got, right)
    assert not batches


def test_vmap_in_vmap():
    x, weight = drawn((4, 5, 3, 8), (6, 8))
    got, right = (
        jax.vmap(jax.vmap(jax.vmap(norm, (0, None)), (0, None)), (None, 0))(x, weight)
        for norm in (cunorm.jax.rms_norm, rms_norm)
    )
    assert_alike(got, right)


@pytest.mark.parametrize("name", ["rms_norm", "group_norm"])
def test_each_example_of_a_batch_has_its_own_gradient_of_a_shared_weight(name):
    x, weight = drawn((4, 2, 3, 8), (8,))
    more = {"num_groups": 2} if name == "group_norm" else {}
    got, right = (
        jax.vmap(jax.grad(square(lambda x, w, f=f: f(x, weight=w, **more)), (0, 1)), (0, None))(
            x, weight
        )
        for f in (getattr(cunorm.jax, name), FORMULAS[name])
    )
    assert_alike(got, right)


def test_the_gradient_of_x_alone_is_one_call_for_a_batch(batches):
    x, weight = drawn((4, 3, 8), (8,))
    got, right = (
        jax.vmap(jax.grad(square(norm)), (0, None))(x, weight)
        for norm in (cunorm.jax.rms_norm, rms_norm)
    )
    assert_alike(got, right)
    assert not batches


def test_the_gradient_of_a_vmap_and_of_two():
    x, weight = drawn((4, 5, 3, 8), (8,))
    got, right = (
        jax.grad(square(jax.vmap(jax.vmap(norm, (0, None)), (0, None))), (0, 1))(x, weight)
        for norm in (cunorm.jax.rms_norm, rms_norm)
    )
    assert_alike(got, right)


def test_jacrev():
    x, weight = drawn((8,), (8,))
    got, right = (
        jax.jit(jax.jacrev(norm, (0, 1)))(x, weight) for norm in (cunorm.jax.rms_norm, rms_norm)
    )
    assert_alike(got, right)


def test_scan_over_layers_with_checkpoint():
    x, weights = drawn((3, 8), (4, 8))

    def stack(add, x, weights):
        @jax.checkpoint
        def layer(carry, weight):
            y, stream = add(*carry, weight)
            return (jnp.sin(y), stream), y.sum()

        (x, stream), sums = jax.lax.scan(layer, (x, x), weights)
        return (x * stream).sum() + sums.sum()

    got, right = (
        jax.jit(jax.value_and_grad(partial(stack, add), (0, 1)))(x, weights)
        for add in (cunorm.jax.add_rms_norm, FORMULAS["add_rms_norm"])
    )
    assert_alike(got, right)


def test_a_donated_argument():
    x, expected = drawn((3, 8)), None
    expected = rms_norm(x[0])
    assert_alike(jax.jit(cunorm.jax.rms_norm, donate_argnums=0)(x.pop()), expected)


def test_jit_disabled():
    x, weight = drawn((3, 8), (8,))
    with jax.disable_jit():
        got = jax.grad(square(cunorm.jax.rms_norm), (0, 1))(x, weight)
    assert_alike(got, jax.grad(square(rms_norm), (0, 1))(x, weight))


@pytest.mark.parametrize("rows", [(0, 8), (0, 3, 8)])
def test_zero_rows_give_empty_results_and_zero_gradients_of_parameters(rows):
    x, weight = jnp.zeros(rows), jnp.ones(8)
    y, pull = jax.vjp(cunorm.jax.layer_norm, x, weight, weight)
    assert y.shape == rows
    dx, dweight, dbias = pull(y)
    assert dx.shape == rows
    assert not dweight.any()
    assert not dbias.any()
    of_batch = jax.vmap(cunorm.jax.rms_norm, (0, None))(jnp.zeros((2, *rows)), weight)
    assert of_batch.shape == (2, *rows)
    _, pull = jax.vjp(lambda w: cunorm.jax.group_norm(jnp.zeros((0, 2, 8)), 2, w), weight)
    assert not pull(jnp.zeros((0, 2, 8)))[0].any()


def test_a_bfloat16_branch_of_a_float32_stream_has_gradients_of_each_dtype():
    x, stream = drawn((3, 8), (3, 8))
    x = x.astype(jnp.bfloat16)

    def loss(add, x, stream):
        y, new = add(x, stream)
        return (y.astype(jnp.float32) * jnp.arange(8.0)).sum() + (new**2).sum()

    dx, dstream = jax.grad(partial(loss, cunorm.jax.add_rms_norm), (0, 1))(x, stream)
    assert (dx.dtype, dstream.dtype) == (ml_dtypes.bfloat16, np.float32)
    exact = jax.grad(partial(loss, FORMULAS["add_rms_norm"]), 1)(x.astype(jnp.float32), stream)
    # y is rounded to bfloat16, its gradient is not: both of float32 here, dx once to bfloat16.
    np.testing.assert_allclose(dstream, exact, rtol=2e-6, atol=2**-8)
    np.testing.assert_array_equal(np.asarray(dx), np.asarray(dstream).astype(ml_dtypes.bfloat16))


def test_round_before_weight_rounds_as_the_published_models_do():
    x, weight = drawn((3, 8), (8,))
    x = x.astype(jnp.bfloat16)
    y = cunorm.jax.rms_norm(x, weight, round_before_weight=True)
    assert y.dtype == np.float32
    n = rms_norm(x.astype(jnp.float32)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(y, n.astype(jnp.float32) * weight)
    dweight = jax.grad(lambda w: cunorm.jax.rms_norm(x, w, round_before_weight=True).sum())(weight)
    np.testing.assert_allclose(dweight, n.astype(jnp.float32).sum(0), rtol=1e-6)


@pytest.mark.parametrize(
    "derive",
    [
        lambda f, x: jax.grad(lambda x: jax.grad(f)(x).sum())(x),
        lambda f, x: jax.hessian(f)(x),
        lambda f, x: jax.jvp(f, (x,), (x,)),
        lambda f, x: jax.jvp(jax.grad(f), (x,), (x,)),
        lambda f, x: jax.jit(jax.jacrev(jax.grad(f)))(x),
    ],
)
@pytest.mark.parametrize("name", ["rms_norm", "instance_norm"])
def test_no_second_nor_forward_mode_derivative_is_given(derive, name):
    (x,) = drawn((2, 2, 8))
    message = "second or a forward-mode derivative|forward-mode autodiff"
    with pytest.raises((NotImplementedError, TypeError), match=message):
        derive(lambda x: (getattr(cunorm.jax, name)(x) ** 2).sum(), x)


def test_an_output_is_not_written_over_an_input_that_is_still_needed():
    (x,) = drawn((3, 8))
    f = jax.jit(lambda x: (cunorm.jax.rms_norm(x + 1.0), x + 1.0))
    y, kept = f(x)
    assert_alike((y, kept), (rms_norm(x + 1.0), x + 1.0))
