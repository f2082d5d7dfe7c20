# SPDX-License-Identifier: MIT
"""Where nothing but the new stream is used, each summand gets a gradient of its own dtype."""

import pytest

from tests.support.operands import draw

jax = pytest.importorskip("jax", reason="JAX is not installed")
cunorm_jax = pytest.importorskip("cunorm.jax")


def test_a_stream_alone_gives_a_narrow_x_a_gradient_of_its_dtype():
    x, residual = (jax.numpy.asarray(draw(name, (3, 8), "float32")) for name in ("x", "r"))
    x = x.astype("bfloat16")

    def loss(x, residual):
        return cunorm_jax.add_rms_norm(x, residual).residual.sum()

    dx, dresidual = jax.grad(loss, (0, 1))(x, residual)
    assert (dx.dtype, dresidual.dtype) == (x.dtype, residual.dtype)
