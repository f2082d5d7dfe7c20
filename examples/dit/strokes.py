# SPDX-License-Identifier: MIT
"""The pictures that the diffusion transformer learns: strokes in four directions."""

from __future__ import annotations

import torch
from torch import Tensor

SIDE = 8
NAMES = ("across", "down", "rising", "falling")
_DIRECTIONS = ((0, 1), (1, 0), (0.5, 0.5), (0.5, -0.5))  # of the step across a stroke: x and y


def strokes(label: Tensor, generator: torch.Generator) -> Tensor:
    """Return a picture for each label: a soft stroke at a random place, from -1 to 1."""
    place = torch.rand(label.shape, generator=generator) * 4 - 2
    return _pictures(label, place)


def _pictures(label: Tensor, place: Tensor) -> Tensor:
    steps = torch.arange(SIDE) - (SIDE - 1) / 2
    across, down = torch.tensor(_DIRECTIONS)[label].T[..., None, None]
    distance = across * steps + down * steps[:, None] - place[:, None, None]
    return 2 * torch.exp(-(distance**2)) - 1


def nearest(pictures: Tensor) -> Tensor:
    """Return for each picture the label of the stroke, at any place, that is nearest to it."""
    places = torch.linspace(-2, 2, 17)
    label = torch.arange(len(NAMES)).repeat_interleave(len(places))
    every = _pictures(label, places.repeat(len(NAMES)))
    return label[torch.cdist(pictures.flatten(1), every.flatten(1)).argmin(1)]
