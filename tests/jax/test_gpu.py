# SPDX-License-Identifier: MIT
"""cunorm.jax on a GPU, with a JAX for CUDA: three dtypes, and calls between XLA's computations."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from cunorm import reference
from tests.support.kinds import OnJax
from tests.support.operands import draw

jax = pytest.importorskip("jax", reason="JAX is not installed")
jnp = jax.numpy

import cunorm.jax  # noqa: E402
from tests.support.jax_formulas import rms_norm  # noqa: E402

pytestmark = pytest.mark.gpu
NORMS = cunorm.jax.rms_norm, rms_norm


@pytest.fixture(autouse=True)
def gpu():
    with jax.default_device(OnJax().device):
        yield


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_large_arrays_of_three_dtypes_are_right(dtype):
    x = draw("x", (300, 257), dtype)  # rows are no multiple of an access
    weight = draw("weight", 257, "float32")
    y = jax.jit(cunorm.jax.rms_norm)(x, weight)
    assert y.dtype == dtype
    exact, eps = reference.rms_norm(x, weight), float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.asarray(y, np.float64), exact, rtol=2 * eps, atol=1e-5)


def test_calls_are_ordered_with_what_xla_computes_before_and_after():
    x = jnp.asarray(draw("x", (256, 256), "float32"))
    turn = jnp.linalg.qr(jnp.asarray(draw("weight", (256, 256), "float32")))[0]

    def chain(norm, x):
        for _ in range(20):
            x = norm(x @ turn) + x
        return x

    # Products with an orthogonal matrix do not amplify roundings. All roundings add up to 1e-5 at
    # most. With TF32, which JAX uses by default, they would add up to 2e-3.
    with jax.default_matmul_precision("highest"):
        actual, expected = (jax.jit(partial(chain, norm))(x) for norm in NORMS)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)
