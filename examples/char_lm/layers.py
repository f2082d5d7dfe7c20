# SPDX-License-Identifier: MIT
"""The two kinds of sublayer, attention and MLP, each with a backward written by hand.

The only state of a sublayer is `parameters`, a dictionary of arrays that includes the weight of the
norm before the sublayer. `forward` takes y, the norm's result, of shape (batch, time, width). It
returns the branch and the arrays that `backward` needs. `backward` returns the gradients of y and,
by name, of the parameters. NumPy's functions take CuPy arrays, too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

import cunorm

Array = Any  # of NumPy or CuPy
Arrays = dict[str, Array]


def linear(x: Array, matrix: Array) -> Array:
    """Return x @ matrix, as one product of all rows."""
    return (x.reshape(-1, x.shape[-1]) @ matrix).reshape(*x.shape[:-1], -1)


def linear_backward(d_out: Array, x: Array, matrix: Array) -> tuple[Array, Array]:
    """Return the gradients of x and of the matrix."""
    d_matrix = x.reshape(-1, x.shape[-1]).T @ d_out.reshape(-1, d_out.shape[-1])
    return linear(d_out, matrix.T), d_matrix


class Mlp:
    """branch = relu(y @ up)**2 @ down.

    The square of relu is cheap and has a continuous derivative (So et al., arXiv:2109.08668).
    """

    def __init__(self, parameters: Arrays) -> None:
        self.parameters = parameters

    def forward(self, y: Array) -> tuple[Array, tuple[Array, Array]]:
        """Return the branch and the arrays for backward."""
        positive = np.maximum(linear(y, self.parameters["up"]), 0)
        return linear(positive**2, self.parameters["down"]), (y, positive)

    def backward(self, d_branch: Array, saved: tuple[Array, Array]) -> tuple[Array, Arrays]:
        """Return the gradients of y and of the parameters."""
        y, positive = saved
        d_square, d_down = linear_backward(d_branch, positive**2, self.parameters["down"])
        d_y, d_up = linear_backward(2 * positive * d_square, y, self.parameters["up"])
        return d_y, {"up": d_up, "down": d_down}


class Attended(NamedTuple):
    """The arrays for the backward of attention."""

    y: Array
    qkv: Array  # (batch, time, 3, heads, head width)
    q: cunorm.NormForward  # of (batch, time, heads, head width)
    k: cunorm.NormForward
    weights: Array  # (batch, heads, queries, keys)
    mixed: Array  # (batch, time, width)


class Attention:
    """Causal attention, with an RMSNorm of each head's queries and keys ("qk-norm").

    For each head, q, k and v are columns of y @ qkv, and q and k are normalised::

        q, k, v = norm(part 0 of y @ qkv), norm(part 1), part 2
        branch = concatenate(softmax(q @ k.T / sqrt(head width)) @ v of each head) @ out
    """

    def __init__(self, parameters: Arrays, heads: int, mask: Array) -> None:
        """Add `mask`, (context, context), to the scores: -inf where the key follows the query."""
        self.parameters, self.heads, self.mask = parameters, heads, mask

    def forward(self, y: Array) -> tuple[Array, Attended]:
        """Return the branch and the arrays for backward."""
        batch, time, width = y.shape
        qkv = linear(y, self.parameters["qkv"]).reshape(batch, time, 3, self.heads, -1)
        # Queries and keys are strided views of qkv, which cunorm reads without a copy.
        q = cunorm.rms_norm_forward(qkv[:, :, 0], self.parameters["q_norm"])
        k = cunorm.rms_norm_forward(qkv[:, :, 1], self.parameters["k_norm"])
        scores = by_head(q.y) @ transposed(by_head(k.y)) * head_scale(qkv)
        weights = softmax(scores + self.mask[:time, :time])
        mixed = by_time(weights @ by_head(qkv[:, :, 2])).reshape(batch, time, width)
        return linear(mixed, self.parameters["out"]), Attended(y, qkv, q, k, weights, mixed)

    def backward(self, d_branch: Array, saved: Attended) -> tuple[Array, Arrays]:
        """Return the gradients of y and of the parameters."""
        y, qkv, q, k, weights, mixed = saved
        d_mixed, d_out = linear_backward(d_branch, mixed, self.parameters["out"])
        d_mixed = by_head(d_mixed.reshape(q.y.shape))
        d_weights = d_mixed @ transposed(by_head(qkv[:, :, 2]))
        d_scores = softmax_backward(d_weights, weights) * head_scale(qkv)

        d_qkv = np.empty_like(qkv)
        d_qkv[:, :, 2] = by_time(transposed(weights) @ d_mixed)
        d_q = by_time(d_scores @ by_head(k.y))
        d_k = by_time(transposed(d_scores) @ by_head(q.y))
        grads = {"out": d_out}
        for index, name, d_part, norm in ((0, "q_norm", d_q, q), (1, "k_norm", d_k, k)):
            # The call reads a view of qkv and writes to a view of d_qkv.
            grads[name] = cunorm.rms_norm_backward(
                d_part,
                qkv[:, :, index],
                self.parameters[name],
                rstd=norm.rstd,
                out=cunorm.NormGrads(dx=d_qkv[:, :, index]),
            ).dweight
        d_rows = d_qkv.reshape(*y.shape[:2], -1)
        d_y, grads["qkv"] = linear_backward(d_rows, y, self.parameters["qkv"])
        return d_y, grads


def head_scale(qkv: Array) -> float:
    """Return the scale of the products of queries and keys."""
    return float(qkv.shape[-1]) ** -0.5


def by_head(array: Array) -> Array:
    """View (batch, time, heads, width) as (batch, heads, time, width)."""
    return array.transpose(0, 2, 1, 3)


def by_time(array: Array) -> Array:
    """View (batch, heads, time, width) as (batch, time, heads, width)."""
    return array.transpose(0, 2, 1, 3)


def transposed(array: Array) -> Array:
    """Transpose the last two axes, as a view."""
    return array.swapaxes(-1, -2)


def softmax(scores: Array) -> Array:
    """Return probabilities along the last axis."""
    exponentials = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def softmax_backward(d_probabilities: Array, probabilities: Array) -> Array:
    """Return the gradient of the scores."""
    weighted = d_probabilities * probabilities
    return weighted - probabilities * weighted.sum(axis=-1, keepdims=True)
