# SPDX-License-Identifier: MIT
"""The model: an embedding, layers of attention and MLP on a residual stream, and a head.

The norm before a sublayer adds the previous branch to the residual stream and normalises the sum,
in one call of cunorm; so does the last norm. The backward passes the gradient of the stream from
norm to norm as `d_residual`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

import cunorm

from .layers import Array, Arrays, Attention, Mlp, linear, linear_backward


class Shape(NamedTuple):
    """The sizes of a model; `width` is a multiple of `heads`."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    context: int


class Saved(NamedTuple):
    """The arrays for the backward: of each sublayer and its norm, and of the last norm."""

    sublayers: list[tuple[cunorm.NormForward, Any]]
    final: cunorm.NormForward


class Model:
    """A model; an optimizer changes the arrays of `parameters` in place.

    `xp` is the module numpy or cupy; `dtype` is the dtype of all arrays but indices.
    """

    def __init__(self, shape: Shape, rng: np.random.Generator, xp: Any, dtype: Any) -> None:
        self.shape, self._xp, self._rng, self._dtype = shape, xp, rng, dtype
        width, mask = shape.width, self._causal_mask()
        self._own = {
            "embedding": self._draw(shape.vocabulary, width, scale=1.0),
            "position": self._draw(shape.context, width, scale=1.0),
            "final_norm": self._ones(width),
            "head": self._draw(width, shape.vocabulary),
        }
        self._sublayers: list[Attention | Mlp] = []
        for _ in range(shape.layers):
            self._sublayers.append(Attention(self._attention_parameters(), shape.heads, mask))
            self._sublayers.append(Mlp(self._mlp_parameters()))
        self.parameters = dict(self._own)
        for number, sublayer in enumerate(self._sublayers):
            self.parameters |= _numbered(number, sublayer.parameters)

    def loss(self, inputs: Array, targets: Array) -> float:
        """Return the mean cross-entropy of the targets, in nats per character."""
        logits, _ = self.forward(inputs)
        return self._cross_entropy(logits, targets)[0]

    def loss_and_gradients(self, inputs: Array, targets: Array) -> tuple[float, Arrays]:
        """Return the loss and its gradients, by the names of the parameters."""
        logits, saved = self.forward(inputs)
        loss, d_logits = self._cross_entropy(logits, targets)
        return loss, self.backward(d_logits, inputs, saved)

    def forward(self, inputs: Array) -> tuple[Array, Saved]:
        """Return logits, (batch, time, vocabulary), for inputs of (batch, time)."""
        own, sublayers = self._own, []
        branch = own["embedding"][inputs]
        # The stream begins as the positions, expanded to all texts with stride 0.
        stream = self._xp.broadcast_to(own["position"][: inputs.shape[1]], branch.shape)
        for sublayer in self._sublayers:
            weight = sublayer.parameters["norm"]
            norm = cunorm.rms_norm_forward(branch, weight, residual=stream)
            stream = norm.residual
            branch, saved = sublayer.forward(norm.y)
            sublayers.append((norm, saved))
        final = cunorm.rms_norm_forward(branch, own["final_norm"], residual=stream)
        return linear(final.y, own["head"]), Saved(sublayers, final)

    def backward(self, d_logits: Array, inputs: Array, saved: Saved) -> Arrays:
        """Return the gradients, by the names of the parameters."""
        own, final, grads = self._own, saved.final, {}
        d_y, grads["head"] = linear_backward(d_logits, final.y, own["head"])
        norm_grads = cunorm.rms_norm_backward(
            d_y, final.residual, own["final_norm"], rstd=final.rstd
        )
        grads["final_norm"] = norm_grads.dweight
        for number, sublayer in reversed(list(enumerate(self._sublayers))):
            norm, saved_by_sublayer = saved.sublayers[number]
            # dx is the gradient of the branch, dresidual the gradient of the stream. They are one
            # array if both have the same dtype.
            d_stream = norm_grads.dresidual
            d_y, sublayer_grads = sublayer.backward(norm_grads.dx, saved_by_sublayer)
            weight = sublayer.parameters["norm"]
            norm_grads = cunorm.rms_norm_backward(
                d_y, norm.residual, weight, rstd=norm.rstd, d_residual=d_stream
            )
            grads |= _numbered(number, {**sublayer_grads, "norm": norm_grads.dweight})
        d_rows = norm_grads.dx.reshape(-1, self.shape.width)
        grads["embedding"] = self._one_hot(inputs).reshape(-1, self.shape.vocabulary).T @ d_rows
        grads["position"] = self._xp.zeros_like(own["position"])
        grads["position"][: inputs.shape[1]] = norm_grads.dresidual.sum(axis=0)
        return grads

    def _cross_entropy(self, logits: Array, targets: Array) -> tuple[float, Array]:
        """Return the mean cross-entropy and the gradient of the logits."""
        shifted = logits - logits.max(axis=-1, keepdims=True)
        log_probabilities = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
        wanted = self._one_hot(targets)
        loss = -(wanted * log_probabilities).sum() / targets.size
        return float(loss), (np.exp(log_probabilities) - wanted) / targets.size

    def _one_hot(self, ids: Array) -> Array:
        return (ids[..., None] == self._xp.arange(self.shape.vocabulary)).astype(self._dtype)

    def _causal_mask(self) -> Array:
        """Return the mask of the scores: -inf where the key follows the query, else 0."""
        time = self._xp.arange(self.shape.context)
        return self._xp.where(time[:, None] < time, -np.inf, 0.0).astype(self._dtype)

    def _attention_parameters(self) -> Arrays:
        width, head_width = self.shape.width, self.shape.width // self.shape.heads
        return {
            "norm": self._ones(width),
            "qkv": self._draw(width, 3 * width),
            "q_norm": self._ones(head_width),
            "k_norm": self._ones(head_width),
            "out": self._draw(width, width),
        }

    def _mlp_parameters(self) -> Arrays:
        width = self.shape.width
        return {
            "norm": self._ones(width),
            "up": self._draw(width, 4 * width),
            "down": self._draw(4 * width, width),
        }

    def _draw(self, rows: int, columns: int, scale: float | None = None) -> Array:
        """Draw normal numbers; by default, a product with them keeps the size of its input."""
        scale = rows**-0.5 if scale is None else scale
        return self._xp.asarray(scale * self._rng.standard_normal((rows, columns)), self._dtype)

    def _ones(self, width: int) -> Array:
        return self._xp.ones(width, self._dtype)


def _numbered(number: int, arrays: Arrays) -> Arrays:
    """Prefix the names of a sublayer's arrays with its number."""
    return {f"{number}.{name}": array for name, array in arrays.items()}
