# SPDX-License-Identifier: MIT
"""Train a one-step generator of points in PyTorch by MeanFlow's loss, with the norms of cunorm.

A model u(z, r, t) learns the mean velocity of a flow between the times r and t, from noise at 1 to
data at 0 (Geng et al., "Mean Flows for One-step Generative Modeling", arXiv:2505.13447). With
z = (1 - t) * x + t * noise and v = noise - x, the target of u is v - (t - r) * du/dt, where du/dt
is the jvp of u with the tangents (v, 0, 1), without a gradient. So each step of training
differentiates the norms twice: forwards for du/dt, and backwards for the gradient. Times scale and
shift each RMS norm and gate each branch (adaLN-Zero), so modulated weights and gates have tangents,
too. A new point is noise - u(noise, 0, 1). The script prints and draws how new points compare with
data, and exits with 1 if their distance is not much smaller than that of noise.

Usage: ``python examples/torch_meanflow.py --output torch_meanflow.png``
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import numpy as np
import torch
from devices import torch_device
from meanflow.report import COMPARED, QUICK, Points, batch, command_line, report, weights
from options import parse
from torch import Tensor, nn
from torch.nn import functional

import cunorm.torch


class Block(nn.Module):
    """An MLP, and the layer that makes shift, scale and gate of each point."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.modulation = zero_linear(width, 3 * width)

    def forward(
        self, branch: Tensor | None, gate: Tensor | None, x: Tensor, to: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the branch of the MLP, its gate and the stream: the next norm adds them."""
        shift, scale, next_gate = self.modulation(to).chunk(3, dim=-1)
        y, x = add_norm(branch, gate, x, scale, shift)
        return self.down(functional.silu(self.up(y))), next_gate, x


class Model(nn.Module):
    """The mean velocity u of points z from the times r to t."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.points, self.times = nn.Linear(2, width), nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.modulation, self.last = zero_linear(width, 2 * width), zero_linear(width, 2)

    def forward(self, z: Tensor, r: Tensor, t: Tensor) -> Tensor:
        """Return u; z and it have the shape (batch, 2), r and t (batch,)."""
        frequencies = torch.logspace(-0.5, 0.5, self.times.in_features // 4, device=z.device)
        waves = torch.cat([t[:, None] * frequencies, (t - r)[:, None] * frequencies], dim=-1)
        to = functional.silu(self.times(torch.cat([waves.sin(), waves.cos()], dim=-1)))
        branch, gate, x = None, None, self.points(z)
        for block in self.blocks:
            branch, gate, x = block(branch, gate, x, to)
        shift, scale = self.modulation(to).chunk(2, dim=-1)
        y, _ = add_norm(branch, gate, x, scale, shift)
        return self.last(y)


def add_norm(
    branch: Tensor | None, gate: Tensor | None, x: Tensor, scale: Tensor, shift: Tensor
) -> tuple[Tensor, Tensor]:
    """Add a gated branch, and normalise and modulate the sum, in one call; return also the sum."""
    options: dict[str, Any] = {"bias": shift, "weight_offset": 1.0}
    if branch is None:
        return cunorm.torch.rms_norm(x, scale, **options), x
    options |= {"gate": gate, "gate_activation": "identity", "gate_position": "branch"}
    return cunorm.torch.add_rms_norm(branch, x, scale, **options)


def zero_linear(inputs: int, outputs: int) -> nn.Linear:
    """Return a layer that begins with zeros."""
    layer = nn.Linear(inputs, outputs)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def loss(model: Model, data: Tensor, noise: Tensor, times: Tensor) -> Tensor:
    """Return the loss of MeanFlow; times are r and t, of shape (batch, 2)."""
    r, t = times.unbind(-1)
    z, v = (1 - t)[:, None] * data + t[:, None] * noise, noise - data
    tangents = (v, torch.zeros_like(r), torch.ones_like(t))
    u, change = torch.func.jvp(model, (z, r, t), tangents)
    target = (v - (t - r)[:, None] * change).detach()
    square = ((u - target) ** 2).sum(-1)
    return (square * weights(square.detach())).mean()


def train(model: Model, rng: np.random.Generator, options: argparse.Namespace) -> list[float]:
    """Train a model, and return the losses; the rate falls from its peak to 0."""
    optimizer = torch.optim.Adam(model.parameters(), lr=options.rate, betas=(0.9, 0.99))
    falling = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    losses = []
    for _ in range(options.steps):
        given = (torch.from_numpy(one).to(options.device) for one in batch(rng, options.batch))
        value = loss(model, *given)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        falling.step()
        losses.append(value.detach())
    return torch.stack(losses).tolist()


@torch.no_grad()
def new_points(model: Model, noise: Points, device: str) -> Points:
    """Move noise to data by one evaluation of the model."""
    z = torch.from_numpy(noise).to(device)
    r, t = torch.zeros(len(z), device=device), torch.ones(len(z), device=device)
    points: Points = (z - model(z, r, t)).cpu().numpy()
    return points


def main(argv: list[str] | None = None) -> int:
    """Train, draw new points, and compare them with data; return the exit status."""
    parser = command_line(__doc__.partition("\n")[0], steps=600)
    options = parse(parser, argv, picture="torch_meanflow.png", quick=QUICK)
    if options.width % 4:
        parser.error(f"--width is {options.width}, expected a multiple of 4")
    options.device = torch_device(parser, options.device)
    # On several threads, a small model is slow if other programs use the same cores.
    torch.set_num_threads(1)
    cunorm.set_num_threads(1)
    torch.manual_seed(options.seed)
    rng = np.random.default_rng(options.seed)
    model = Model(options.width, options.blocks).to(options.device)
    start = time.perf_counter()
    losses = train(model, rng, options)
    print(f"{time.perf_counter() - start:.1f} s for {options.steps} steps")
    noise = rng.standard_normal((COMPARED, 2)).astype(np.float32)
    return report(new_points(model, noise, options.device), noise, losses, options)


if __name__ == "__main__":
    sys.exit(main())
