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

    def __init__(self, number):
        self.matrix = draw(f"matrix {number}", (96, 96), "float64") / np.sqrt(96)
        self.weight, self.bias = (
            optional(name, 96, "float32") + np.float32(0.01 * number) for name in ("weight", "bias")
        )

    def forward(self, q):
        return np.tanh(q.astype(np.float64) @ self.matrix).astype(np.float32)

    def backward(self, dp, q):
        out = np.tanh(q.astype(np.float64) @ self.matrix)
        return ((dp * (1 - out**2)) @ self.matrix.T).astype(np.float32)


def parameters(layer, name):
    return (layer.weight,) if name == "rms_norm" else (layer.weight, layer.bias)


def statistics(forward):
    return {"rstd": forward.rstd} | ({} if forward.mean is None else {"mean": forward.mean})


def naive(name, layers, x, dy):
    """x_k = f_k(norm(x_{k-1})) + x_{k-1}, and back."""
    forward, backward = (getattr(cunorm, f"{name}_{way}") for way in ("forward", "backward"))
    streams, norms = [x], []
    for layer in layers:
        norms.append(forward(streams[-1], *parameters(layer, name)))
        streams.append(layer.forward(norms[-1].y) + streams[-1])
    gradients, d_stream = [], dy
    for layer, stream, norm in reversed(list(zip(layers, streams, norms, strict=False))):
        d_norm = layer.backward(d_stream, norm.y)
        grads = backward(d_norm, stream, *parameters(layer, name), **statistics(norm))
        d_stream = grads.dx + d_stream
        gradients.append((grads.dweight, grads.dbias))
    return streams[-1], d_stream, gradients


def fused(name, layers, x, dy):
    """p_0 = x, r_0 absent; q_k, r_k = add_norm(p_{k-1}, r_{k-1}), p_k = f_k(q_k); and back."""
    forward, backward = (getattr(cunorm, f"{name}_{way}") for way in ("forward", "backward"))
    branch, stream, norms = x, None, []
    for layer in layers:
        parts = {"residual": stream} if norms else {"residual_dtype": x.dtype}
        norms.append(forward(branch, *parameters(layer, name), **parts))
        branch, stream = layer.forward(norms[-1].y), norms[-1].residual
    gradients, d_branch, d_stream = [], dy, dy
    for layer, norm in reversed(list(zip(layers, norms, strict=True))):
        d_norm = layer.backward(d_branch, norm.y)
        grads = backward(
            d_norm,
            norm.residual,
            *parameters(layer, name),
            **statistics(norm),
            d_residual=d_stream,
        )
        d_branch, d_stream = grads.dx, grads.dresidual
        gradients.append((grads.dweight, grads.dbias))
    return branch + stream, d_branch, gradients


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_the_fused_stack_is_the_naive_one_forward_and_backward(name):
    layers = [Layer(number) for number in range(DEPTH)]
    x, dy = draw("x", SHAPE, "float32"), draw("dy", SHAPE, "float32")
    (y, dx, params), (fused_y, fused_dx, fused_params) = (
        stack(name, layers, x, dy) for stack in (naive, fused)
    )
    # Forward, the same float32 operations are done in the same order.
    np.testing.assert_array_equal(fused_y, y)
    # Backward, the naive stack rounds dx before it adds the stream's gradient: a rounding a layer,
    # which the layers before may multiply by some tens.
    np.testing.assert_allclose(fused_dx, dx, rtol=0, atol=100 * DEPTH * U * abs(dx).max())
    for (dweight, dbias), (fused_dweight, fused_dbias) in zip(params, fused_params, strict=True):
        scale = 100 * DEPTH * U * abs(dweight).max()
        np.testing.assert_allclose(fused_dweight, dweight, rtol=0, atol=scale)
        assert (dbias is None) == (name == "rms_norm")
        if dbias is not None:
            np.testing.assert_allclose(
                fused_dbias, dbias, rtol=0, atol=scale + U * abs(dbias).max()
            )


def test_the_fused_stack_stays_right_with_a_bfloat16_branch():
    """The sum is rounded once, to the stream's float32; the bfloat16 branch loses nothing more."""
    x = draw("x", SHAPE, "bfloat16")
    stream = draw("residual", SHAPE, "float32")
    result = cunorm.add_rms_norm(x, stream)
    np.testing.assert_array_equal(result.residual, x.astype(np.float32) + stream)
    assert result.y.dtype == x.dtype
    np.testing.assert_array_equal(result.y, cunorm.rms_norm(result.residual, dtype=x.dtype))
