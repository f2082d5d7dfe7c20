# SPDX-License-Identifier: MIT
"""A Transformer like Llama and Qwen that uses only torch.nn and does not import cunorm.

For each layer, with x of shape (batch, time, width)::

    x = x + attention(rms_norm(x))          with queries and keys of each head normalised
    x = x + down(silu(up(rms_norm(x))))
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

EPS = 1e-6


class Shape(NamedTuple):
    """The sizes of a model; `width` is a multiple of `heads`."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    context: int


class Attention(nn.Module):
    """Causal attention, with an RMSNorm of each head's queries and keys ("qk-norm")."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.q_norm = nn.RMSNorm(width // heads, eps=EPS)
        self.k_norm = nn.RMSNorm(width // heads, eps=EPS)

    def forward(self, y: Tensor) -> Tensor:
        """Return the branch, of y's shape."""
        # q, k and v are views of one array; cunorm reads such views without a copy.
        q, k, v = self.qkv(y).unflatten(-1, (3, self.heads, -1)).movedim(2, 0)
        q, k, v = (part.transpose(1, 2) for part in (self.q_norm(q), self.k_norm(k), v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Layer(nn.Module):
    """Attention and an MLP: each reads the normalised stream, and adds its result to the stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width, eps=EPS)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.RMSNorm(width, eps=EPS)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the stream after this layer."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(functional.silu(self.up(self.mlp_norm(x))))


class Model(nn.Module):
    """Embeddings of characters and positions, layers, a last norm, and a head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.characters = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.layers = nn.ModuleList(Layer(shape.width, shape.heads) for _ in range(shape.layers))
        self.last_norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits; ids are (batch, time), logits (batch, time, vocabulary)."""
        x = self.characters(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.last_norm(x))
