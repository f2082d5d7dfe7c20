# SPDX-License-Identifier: MIT
"""The attention of OLMo 2 in PyTorch, whose heads the processes of a group share."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn.functional import linear, scaled_dot_product_attention

import cunorm.torch as ct

# The axis that is split of each parameter: outputs of q, k and v, and inputs of out.
AXES = {"q": 0, "k": 0, "v": 0, "out": 1, "q_norm": 0, "k_norm": 0}
LIMIT = timedelta(seconds=60)  # for a process that waits for another
Arrays = dict[str, Tensor]


class _Copied(torch.autograd.Function):
    """Give every process the same x; add their gradients of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Tensor:
        dx = dx.clone()
        dist.all_reduce(dx)
        return dx


class _Added(torch.autograd.Function):
    """Add what all processes have; each gets the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        y = y.clone()
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy


def attention(x: Tensor, of: Arrays, width_of_head: int, group: Any = None) -> Tensor:
    """Return the causal attention of the heads of which `of` has the parameters.

    OLMo 2 normalises the queries of all heads together, and the keys: with a group, a process has
    only a part of these rows. (Rotary positions are left out.)
    """
    q = ct.rms_norm(linear(x, of["q"]), of["q_norm"], process_group=group)
    k = ct.rms_norm(linear(x, of["k"]), of["k_norm"], process_group=group)
    rows = (q, k, linear(x, of["v"]))
    heads = [one.unflatten(-1, (-1, width_of_head)).transpose(1, 2) for one in rows]
    mixed = scaled_dot_product_attention(*heads, is_causal=True)
    return linear(mixed.transpose(1, 2).flatten(-2), of["out"])


def differentiated(arrays: Arrays, width_of_head: int, group: Any = None) -> Arrays:
    """Return y and all gradients, of the whole layer or of this process's part of it."""
    leaves = {name: one.requires_grad_() for name, one in arrays.items() if name != "dy"}
    is_split = dist.is_initialized()
    x = _Copied.apply(leaves["x"]) if is_split else leaves["x"]
    y = attention(x, leaves, width_of_head, group)
    y = _Added.apply(y) if is_split else y
    found = torch.autograd.grad((y * arrays["dy"]).sum(), [*leaves.values()])
    return {"y": y.detach(), **{f"d{name}": one for name, one in zip(leaves, found, strict=True)}}


def run_next(number: int, *arguments: Any) -> None:
    """Run `run_as` in a process other than that of rank 0."""
    run_as(number + 1, *arguments)


def run_as(rank: int, ranks: int, folder: str, width_of_head: int, device: str) -> None:
    """Run a part of the layer that is in a file of the folder; save the results in another."""
    where = torch.device(device, rank) if device == "cuda" else torch.device(device)
    store = dist.FileStore(f"{folder}/store", ranks)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=LIMIT)
    whole = torch.load(Path(folder, "arrays"), map_location=where)
    own = {
        name: one.chunk(ranks, AXES[name])[rank].contiguous() if name in AXES else one
        for name, one in whole.items()
    }
    both = [differentiated(own, width_of_head, group) for group in (dist.group.WORLD, None)]
    torch.save(both, Path(folder, f"of_{rank}"))
    dist.destroy_process_group()


def joined(parts: list[Arrays]) -> Arrays:
    """Return whole results from those of all processes, which have y and dx alike."""
    axes = {f"d{name}": axis for name, axis in AXES.items()}
    return {
        name: torch.cat([part[name] for part in parts], axes[name]) if name in axes else one
        for name, one in parts[0].items()
    }
