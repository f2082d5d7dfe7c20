# SPDX-License-Identifier: MIT
"""A model with norms, trained by one process on whole batches or by several on parts of them.

As a script, one of two processes: it trains under DistributedDataParallel and under FSDP2, and
writes the parameters that each came to.

Usage: ``python -m tests.support.torch_ranks RANK FOLDER``
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import cunorm.torch

WIDTH, LAYERS, ROWS, STEPS, RATE = 24, 3, 10, 2, 0.5
RANKS = 2


class Layer(torch.nn.Module):
    """A linear layer after the norm of the stream."""

    def __init__(self):
        super().__init__()
        self.norm = cunorm.torch.AddRMSNorm(WIDTH, eps=1e-6)
        self.linear = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x, stream):
        y, stream = self.norm(x, stream)
        return self.linear(y), stream


class Stack(torch.nn.Module):
    """Layers on a residual stream, and a last norm."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(LAYERS))
        self.last = cunorm.torch.RMSNorm(WIDTH, eps=1e-6)

    def forward(self, x):
        stream = None
        for layer in self.layers:
            x, stream = layer(x, stream)
        return self.last(x + stream)


def model():
    """Return the same float64 model each time."""
    torch.manual_seed(0)
    return Stack().double()


def batches():
    """Return for each step what is read and what is to come of it."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(STEPS, 2, ROWS, WIDTH, generator=generator, dtype=torch.float64)


def train(network, rank=0, ranks=1):
    """Train on every batch, of several processes each on its own rows."""
    optimizer = torch.optim.SGD(network.parameters(), lr=RATE)
    for given, wanted in batches()[..., rank::ranks, :]:
        optimizer.zero_grad()
        (network(given) - wanted).square().mean().backward()
        optimizer.step()


def main():
    """Train twice, and write the parameters."""
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    store = dist.FileStore(str(folder / "store"), RANKS)
    told = {"rank": rank, "world_size": RANKS, "timeout": timedelta(seconds=60)}
    dist.init_process_group("gloo", store=store, **told)
    copied = DistributedDataParallel(model())
    train(copied, rank, RANKS)
    sharded = model()
    for part in (*sharded.layers, sharded):
        fully_shard(part)
    train(sharded, rank, RANKS)
    trained = {
        "DistributedDataParallel": list(copied.module.parameters()),
        "fully_shard": [one.full_tensor() for one in sharded.parameters()],
    }
    torch.save(trained, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
