# SPDX-License-Identifier: MIT
"""A stack of pre-norm layers: fused with the residual stream it is the naive one."""

import numpy as np

import cunorm
from tests.support.operands import draw, optional

DEPTH, SHAPE = 4, (24, 96)
U = 2.0**-24
MATRICES = [draw(f"matrix {k}", (96, 96), "float64") / np.sqrt(96) for k in range(DEPTH)]
WEIGHTS = [optional("weight", 96, "float32") + np.float32(0.01 * k) for k in range(DEPTH)]


def layer(k, q):
    """f_k(q) = tanh(q @ matrix), rounded to float32 at its end alone."""
    return np.tanh(q.astype(np.float64) @ MATRICES[k]).astype(np.float32)


def layer_backward(k, dp, q):
    out = np.tanh(q.astype(np.float64) @ MATRICES[k])
    return ((dp * (1 - out**2)) @ MATRICES[k].T).astype(np.float32)


def naive(x, dy):
    """x_k = f_k(norm(x_{k-1})) + x_{k-1}, and back."""
    streams, norms, dweights, d_stream = [x], [], [], dy
    for k, weight in enumerate(WEIGHTS):
        norms.append(cunorm.rms_norm_forward(streams[-1], weight))
        streams.append(layer(k, norms[-1].y) + streams[-1])
    for k, norm in reversed(list(enumerate(norms))):
        d_norm = layer_backward(k, d_stream, norm.y)
        grads = cunorm.rms_norm_backward(d_norm, streams[k], WEIGHTS[k], rstd=norm.rstd)
        d_stream = grads.dx + d_stream
        dweights.append(grads.dweight)
    return streams[-1], d_stream, dweights


def fused(x, dy):
    """p_0 = x, r_0 absent; q_k, r_k = add_norm(p_{k-1}, r_{k-1}), p_k = f_k(q_k); and back."""
    branch, stream, norms, dweights, d_branch, d_stream = x, None, [], [], dy, dy
    for k, weight in enumerate(WEIGHTS):
        parts = {"residual": stream} if norms else {"residual_dtype": x.dtype}
        norms.append(cunorm.rms_norm_forward(branch, weight, **parts))
        branch, stream = layer(k, norms[-1].y), norms[-1].residual
    for k, norm in reversed(list(enumerate(norms))):
        d_norm, more = layer_backward(k, d_branch, norm.y), {"d_residual": d_stream}
        grads = cunorm.rms_norm_backward(d_norm, norm.residual, WEIGHTS[k], rstd=norm.rstd, **more)
        d_branch, d_stream = grads.dx, grads.dresidual
        dweights.append(grads.dweight)
    return branch + stream, d_branch, dweights


def test_the_fused_stack_is_the_naive_one_forward_and_backward():
    x, dy = draw("x", SHAPE, "float32"), draw("dy", SHAPE, "float32")
    (y, dx, dweights), (fused_y, fused_dx, fused_dweights) = naive(x, dy), fused(x, dy)
    # Forward, the same float32 operations are done in the same order.
    np.testing.assert_array_equal(fused_y, y)
    # Backward, the naive stack rounds dx before it adds the stream's gradient: a rounding a layer,
    # which the layers before may multiply by some tens.
    for got, right in [(fused_dx, dx), *zip(fused_dweights, dweights, strict=True)]:
        scale = abs(right).max() + abs(dweights[0]).max() * (right is not dx)
        np.testing.assert_allclose(got, right, rtol=0, atol=100 * DEPTH * U * scale)


def test_the_fused_stack_stays_right_with_a_bfloat16_branch():
    """The sum is rounded once, to the stream's float32; the bfloat16 branch loses nothing more."""
    x, stream = draw("x", SHAPE, "bfloat16"), draw("residual", SHAPE, "float32")
    result = cunorm.add_rms_norm(x, stream)
    np.testing.assert_array_equal(result.residual, x.astype(np.float32) + stream)
    assert result.y.dtype == x.dtype
    np.testing.assert_array_equal(result.y, cunorm.rms_norm(result.residual, dtype=x.dtype))
