# SPDX-License-Identifier: MIT
"""cunorm.jax, and the plain functions on JAX arrays, on a GPU: in order, in XLA's memory."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import cunorm
from cunorm import reference
from tests.support.jax_formulas import FORMULAS, case, leaves
from tests.support.operands import draw

jax = pytest.importorskip("jax", reason="JAX is not installed")
jnp = jax.numpy

import cunorm.jax  # noqa: E402

pytestmark = pytest.mark.gpu
SHAPE = (300, 257)  # rows that no thread's access divides
# Of float32, in sums of 300 terms of about 1, which a GPU adds up in another order.
CLOSE = {"rtol": 1e-4, "atol": 1e-3}
CASES = [
    case("rms_norm", "weight"),
    case("layer_norm", "weight", "bias", "gate"),
    case("add_rms_norm", "residual", "weight", groups=2),
    case("add_layer_norm", "residual", "weight", "bias"),
    case("group_norm", "weight", "bias", num_groups=2, activation="silu"),
    case("instance_norm", channel_axis=1),
]


@pytest.fixture(autouse=True)
def gpu():
    try:
        device = jax.devices("cuda")[0]
    except RuntimeError as error:
        pytest.skip(f"this JAX has no CUDA: {error}")
    with jax.default_device(device):
        yield device


def weighted(results):
    return sum((part * jnp.cos(part)).sum() for part in jax.tree.leaves(results))


@pytest.mark.parametrize("norm", CASES, ids=str)
def test_values_and_gradients_under_jit_are_those_of_jaxs_own_formulas(norm):
    arrays = norm.draw("float32")
    actual, expected = (
        jax.jit(
            lambda arrays, f=f: (
                norm.call(f, arrays),
                jax.grad(lambda arrays: weighted(norm.call(f, arrays)))(arrays),
            )
        )(arrays)
        for f in (cunorm.jax, FORMULAS)
    )
    for got, right in zip(leaves(actual), leaves(expected), strict=True):
        np.testing.assert_allclose(got, right, **CLOSE)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_large_arrays_of_every_dtype(dtype):
    x, weight = draw("x", SHAPE, dtype), draw("weight", SHAPE[1:], "float32")
    y = jax.jit(cunorm.jax.rms_norm)(x, weight)
    assert y.dtype == dtype
    exact = reference.rms_norm(x, weight)
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.asarray(y, np.float64), exact, rtol=2 * eps, atol=1e-5)


def test_calls_are_ordered_with_what_xla_computes_before_and_after():
    x = jnp.asarray(draw("x", (256, 256), "float32"))

    def chain(norm, x):
        for _ in range(20):
            x = norm(jnp.tanh(x @ x)) + x
        return x

    actual, expected = (
        jax.jit(partial(chain, norm))(x) for norm in (cunorm.jax.rms_norm, FORMULAS["rms_norm"])
    )
    np.testing.assert_allclose(actual, expected, rtol=1e-2, atol=1e-2)  # of matrix products, too


def test_vmap_scan_and_checkpoint():
    x, weight = (jnp.asarray(draw("x", s, "float32")) for s in ((4, 8, 64), (64,)))

    def loss(norm, x, weight):
        layer = jax.checkpoint(lambda x, _: (jax.vmap(norm, (0, None))(jnp.sin(x), weight), None))
        return (jax.lax.scan(layer, x, None, length=3)[0] ** 3).sum()

    actual, expected = (
        jax.jit(jax.grad(partial(loss, norm), (0, 1)))(x, weight)
        for norm in (cunorm.jax.rms_norm, FORMULAS["rms_norm"])
    )
    for got, right in zip(actual, expected, strict=True):
        np.testing.assert_allclose(got, right, **CLOSE)


def test_the_plain_functions_results_are_xlas_arrays_on_the_gpu(gpu, monkeypatch):
    monkeypatch.setattr(cunorm._arrays._jax.Jax, "allocate", None)
    x, weight, dy = (
        jnp.asarray(draw(name, shape, "float32"))
        for name, shape in (("x", SHAPE), ("weight", SHAPE[1:]), ("dy", SHAPE))
    )
    saved = cunorm.rms_norm_forward(x, weight)
    grads = cunorm.rms_norm_backward(dy, x, weight, rstd=saved.rstd)
    assert saved.y.devices() == grads.dweight.devices() == {gpu}
    exact = reference.rms_norm_forward(np.asarray(x), np.asarray(weight))
    right = reference.rms_norm_backward(*map(np.asarray, (dy, x, weight)), rstd=exact.rstd)
    for got, expected in ((saved.y, exact.y), (grads.dx, right.dx), (grads.dweight, right.dweight)):
        np.testing.assert_allclose(got, expected, **CLOSE)
