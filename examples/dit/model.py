# SPDX-License-Identifier: MIT
"""A diffusion transformer (DiT) with adaLN-Zero: the condition of a sample modulates all norms.

For each block, with x of shape (batch, tokens, width), the condition gives six vectors for each
sample: shift, scale and gate, for each of two branches::

    x = x + gate_1 * attention(layer_norm(x) * (1 + scale_1) + shift_1)
    x = x + gate_2 * mlp(layer_norm(x) * (1 + scale_2) + shift_2)

A norm and the addition before it are one function, so that cunorm can fuse them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import cunorm.torch

EPS = 1e-6
PATCH = 2  # a token is a square of 2x2 pixels

# Takes branch, gate, x, scale and shift, and returns the norm of the new x, and that x.
AddNorm = Callable[..., tuple[Tensor, Tensor]]


def plain(
    branch: Tensor | None, gate: Tensor | None, x: Tensor, scale: Tensor, shift: Tensor
) -> tuple[Tensor, Tensor]:
    """Add a gated branch and apply a modulated norm with PyTorch's operations."""
    if branch is not None:
        x = x + branch * gate
    return functional.layer_norm(x, x.shape[-1:], eps=EPS) * (1 + scale) + shift, x


def fused(
    branch: Tensor | None, gate: Tensor | None, x: Tensor, scale: Tensor, shift: Tensor
) -> tuple[Tensor, Tensor]:
    """Add a gated branch and apply a modulated norm, in one call of cunorm."""
    options: dict[str, Any] = {"weight_offset": 1.0, "eps": EPS}
    if branch is None:
        return cunorm.torch.layer_norm(x, scale, shift, **options), x
    options |= {"gate": gate, "gate_activation": "identity", "gate_position": "branch"}
    return cunorm.torch.add_layer_norm(branch, x, scale, shift, **options)


class Block(nn.Module):
    """Attention, an MLP, and the layer that makes the six vectors."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.modulation = zero_linear(width, 6 * width)

    def forward(
        self, branch: Tensor | None, gate: Tensor | None, x: Tensor, to: Tensor, add_norm: AddNorm
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the branch of the MLP, its gate and the stream: the next norm adds them."""
        # The six vectors are views of one array; cunorm reads such views without a copy.
        shift, scale, next_gate, *of_mlp = self.modulation(to).chunk(6, dim=-1)
        y, x = add_norm(branch, gate, x, scale, shift)
        shift, scale, gate = of_mlp
        y, x = add_norm(self.attention(y), next_gate, x, scale, shift)
        return self.down(functional.gelu(self.up(y), approximate="tanh")), gate, x

    def attention(self, y: Tensor) -> Tensor:
        """Return the branch of attention, in which each token sees all others."""
        q, k, v = self.qkv(y).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Model(nn.Module):
    """Embeddings of patches, positions, times and classes; blocks; the last norm and layer."""

    def __init__(self, side: int, classes: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.patches = nn.Linear(PATCH**2, width)
        self.positions = nn.Parameter(0.1 * torch.randn((side // PATCH) ** 2, width))
        self.times = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.classes = nn.Embedding(classes, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.modulation, self.last = zero_linear(width, 2 * width), zero_linear(width, PATCH**2)

    def forward(self, images: Tensor, time: Tensor, label: Tensor, add_norm: AddNorm) -> Tensor:
        """Return velocities; images and they are (batch, side, side), time and label (batch,)."""
        patches = functional.pixel_unshuffle(images[:, None], PATCH).flatten(2).transpose(1, 2)
        x = self.patches(patches) + self.positions
        waves = time[:, None] * torch.logspace(0, 2, x.shape[-1] // 2, device=x.device)
        to = self.times(torch.cat([waves.sin(), waves.cos()], dim=-1)) + self.classes(label)
        to = functional.silu(to)[:, None]  # (batch, 1, width): the same for all tokens of a sample
        branch = gate = None
        for block in self.blocks:
            branch, gate, x = block(branch, gate, x, to, add_norm)
        shift, scale = self.modulation(to).chunk(2, dim=-1)
        y, _ = add_norm(branch, gate, x, scale, shift)
        side = images.shape[-1] // PATCH
        patches = self.last(y).transpose(1, 2).unflatten(2, (side, side))
        return functional.pixel_shuffle(patches, PATCH)[:, 0]


def zero_linear(inputs: int, outputs: int) -> nn.Linear:
    """Return a layer that begins with zeros, so that each block begins as the identity."""
    layer = nn.Linear(inputs, outputs)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer
