# SPDX-License-Identifier: MIT
"""A stack of pre-norm layers: fused with the residual stream it is the naive one."""

import numpy as np
import pytest

import cunorm
from tests.support.operands import draw, optional

DEPTH, SHAPE = 4, (24, 96)
U = 2.0**-24


class Layer:
    """f(q) = tanh(q @ matrix), rounded to float32 at its end alone."""

    def __init__(self, number, names):
        self.matrix = draw(f"matrix {number}", (96, 96), "float64") / np.sqrt(96)
        shift = np.float32(0.01 * number)
        self.parameters = [optional(name, 96, "float32") + shift for name in names]

    def forward(self, q):
        return np.tanh(q.astype(np.float64) @ self.matrix).astype(np.float32)

    def backward(self, dp, q):
        out = np.tanh(q.astype(np.float64) @ self.matrix)
        return ((dp * (1 - out**2)) @ self.matrix.T).astype(np.float32)


def saved(forward):
    return {"rstd": forward.rstd} | ({} if forward.mean is None else {"mean": forward.mean})


def naive(forward, backward, layers, x, dy):
    """x_k = f_k(norm(x_{k-1})) + x_{k-1}, and back."""
    streams, norms, gradients, d_stream = [x], [], [], dy
    for layer in layers:
        norms.append(forward(streams[-1], *layer.parameters))
        streams.append(layer.forward(norms[-1].y) + streams[-1])
    for layer, stream, norm in reversed(list(zip(layers, streams, norms, strict=False))):
        d_norm = layer.backward(d_stream, norm.y)
        grads = backward(d_norm, stream, *layer.parameters, **saved(norm))
        d_stream = grads.dx + d_stream
        gradients.append((grads.dweight, grads.dbias))
    return streams[-1], d_stream, gradients


def fused(forward, backward, layers, x, dy):
    """p_0 = x, r_0 absent; q_k, r_k = add_norm(p_{k-1}, r_{k-1}), p_k = f_k(q_k); and back."""
    branch, stream, norms, gradients, d_branch, d_stream = x, None, [], [], dy, dy
    for layer in layers:
        parts = {"residual": stream} if norms else {"residual_dtype": x.dtype}
        norms.append(forward(branch, *layer.parameters, **parts))
        branch, stream = layer.forward(norms[-1].y), norms[-1].residual
    for layer, norm in reversed(list(zip(layers, norms, strict=True))):
        d_norm, more = layer.backward(d_branch, norm.y), {"d_residual": d_stream}
        grads = backward(d_norm, norm.residual, *layer.parameters, **saved(norm), **more)
        d_branch, d_stream = grads.dx, grads.dresidual
        gradients.append((grads.dweight, grads.dbias))
    return branch + stream, d_branch, gradients


@pytest.mark.parametrize(
    ("name", "names"), [("rms_norm", ["weight"]), ("layer_norm", ["weight", "bias"])]
)
def test_the_fused_stack_is_the_naive_one_forward_and_backward(name, names):
    layers = [Layer(number, names) for number in range(DEPTH)]
    x, dy = draw("x", SHAPE, "float32"), draw("dy", SHAPE, "float32")
    both = [getattr(cunorm, f"{name}_{way}") for way in ("forward", "backward")]
    (y, dx, params), (fused_y, fused_dx, fused_params) = (
        stack(*both, layers, x, dy) for stack in (naive, fused)
    )
    # Forward, the same float32 operations are done in the same order.
    np.testing.assert_array_equal(fused_y, y)
    # Backward, the naive stack rounds dx before it adds the stream's gradient: a rounding a layer,
    # which the layers before may multiply by some tens.
    pairs = [(fused_dx, dx, abs(dx).max())]
    for gradients, fused_gradients in zip(params, fused_params, strict=True):
        for got, right in zip(fused_gradients, gradients, strict=True):
            assert (got is None) == (right is None)
            if right is not None:
                pairs.append((got, right, abs(right).max() + abs(gradients[0]).max()))
    for got, right, scale in pairs:
        np.testing.assert_allclose(got, right, rtol=0, atol=100 * DEPTH * U * scale)


def test_the_fused_stack_stays_right_with_a_bfloat16_branch():
    """The sum is rounded once, to the stream's float32; the bfloat16 branch loses nothing more."""
    x, stream = draw("x", SHAPE, "bfloat16"), draw("residual", SHAPE, "float32")
    result = cunorm.add_rms_norm(x, stream)
    np.testing.assert_array_equal(result.residual, x.astype(np.float32) + stream)
    assert result.y.dtype == x.dtype
    np.testing.assert_array_equal(result.y, cunorm.rms_norm(result.residual, dtype=x.dtype))
