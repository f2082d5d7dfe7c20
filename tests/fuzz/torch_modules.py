# SPDX-License-Identifier: MIT
"""Modules of the fuzzer's networks: those of cunorm.torch, and norms that it replaces."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

import cunorm.torch as ct

CHANNELS, WIDTH = 4, 8
FORMULA_OF = {  # for each module: the function with its formula
    **dict.fromkeys(
        ("RMSNorm", "GatedRMSNorm", "nn.RMSNorm", "Llama", "Gemma", "Gated"), "rms_norm"
    ),
    **{"LayerNorm": "layer_norm", "nn.LayerNorm": "layer_norm", "AddRMSNorm": "add_rms_norm"},
    **{"GroupNorm": "group_norm", "nn.GroupNorm": "group_norm", "Biased": "normalize"},
}


class Llama(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def rows(self, x: Any) -> Any:
        promoted = x.to(torch.promote_types(x.dtype, torch.float32))
        return promoted * torch.rsqrt(promoted.square().mean(-1, keepdim=True) + self.eps)

    def forward(self, x: Any) -> Any:
        return self.weight * self.rows(x).to(x.dtype)


class Gemma(Llama):
    def forward(self, x: Any) -> Any:
        rows = self.rows(x)
        return (rows * (1.0 + self.weight.to(rows.dtype))).to(x.dtype)


class Biased(Llama):
    """RMSNorm of diffusers, with bias=True."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__(width, eps)
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Any) -> Any:
        return (self.rows(x) * self.weight + self.bias).to(x.dtype)


class Gated(Llama):
    def forward(self, x: Any, gate: Any = None) -> Any:
        g = 1.0 if gate is None else functional.silu(gate.to(self.rows(x).dtype))
        return (self.weight * self.rows(x) * g).to(x.dtype)


def module_of(made: str, options: dict[str, Any]) -> Any:
    """Return the module named `made`; `options` are those of the function with its formula."""
    groups, axis = options.pop("num_groups", 1), options.pop("axis", -1)
    eps = options.get("eps", 1e-5)
    if made == "GroupNorm":
        return ct.GroupNorm(groups, CHANNELS, **options)
    if hasattr(ct, made):
        return getattr(ct, made)((CHANNELS, WIDTH)[axis:], **options)
    if made == "nn.GroupNorm":
        return nn.GroupNorm(groups, CHANNELS, eps=eps)
    if made.startswith("nn."):
        return getattr(nn, made[3:])(WIDTH, eps=eps)
    return globals()[made](WIDTH, eps)
