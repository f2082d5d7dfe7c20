# SPDX-License-Identifier: MIT
"""The picture to denoise, and a figure of the results."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cbook import get_sample_data
from matplotlib.figure import Figure
from matplotlib.image import imread
from numpy.typing import NDArray

Picture = NDArray[np.floating[Any]]  # (height, width, 3); black is 0 and white is 1

NAME = "grace_hopper.jpg"
_TOP, _LEFT, _HEIGHT, _WIDTH = 10, 66, 480, 400  # head and shoulders in the 600 x 512 picture
MAPS = 5


def picture(shrink: int) -> Picture:
    """Return Matplotlib's portrait; each square of `shrink` x `shrink` pixels becomes one pixel."""
    pixels = imread(get_sample_data(NAME, asfileobj=False)) / np.float32(255)
    height, width = _HEIGHT // shrink, _WIDTH // shrink
    pixels = pixels[_TOP : _TOP + height * shrink, _LEFT : _LEFT + width * shrink]
    return pixels.reshape(height, shrink, width, shrink, 3).mean(axis=(1, 3))


def decibels(result: Picture, clean: Picture) -> float:
    """Return the peak signal-to-noise ratio."""
    return float(-10 * np.log10(np.mean((result - clean) ** 2)))


class Shown(NamedTuple):
    """The contents of the figure."""

    clean: Picture
    noisy: Picture
    denoised: Picture
    gradient: Picture  # of the loss, with respect to the noisy picture
    maps: NDArray[np.floating[Any]]  # (height, width, channels), normalised
    losses: list[float]
    baseline: float  # the loss of a blur


def draw_figure(shown: Shown) -> Figure:
    """Draw pictures, gradient, losses and maps."""
    figure = Figure(figsize=(13, 6.6), layout="constrained")
    figure.suptitle("A residual block denoises a picture: every group norm + SiLU by cunorm")
    axes = figure.subplots(2, MAPS)
    for column, name in enumerate(("clean", "noisy", "denoised")):
        image = getattr(shown, name)
        quality = "" if name == "clean" else f", {decibels(image, shown.clean):.1f} dB"
        _show(axes[0, column], image.clip(0, 1), name + quality)
    gradient = shown.gradient.sum(axis=-1)
    limit = np.quantile(abs(gradient), 0.995)
    colours = {"cmap": "RdBu_r", "vmin": -limit, "vmax": limit}
    _show(axes[0, 3], gradient, "d loss / d noisy picture", **colours)
    _draw_losses(axes[0, 4], shown)
    # Show the channel that varies most in each fifth of the channels.
    spread = shown.maps.std(axis=(0, 1))
    fifths = np.array_split(np.arange(spread.size), MAPS)
    for panel, fifth in zip(axes[1], fifths, strict=True):
        if fifth.size:
            channel = fifth[np.argmax(spread[fifth])]
            title = f"gn2 + SiLU, channel {channel}"
            _show(panel, shown.maps[..., channel], title, cmap="magma")
        panel.axis("off")
    return figure


def _show(axes: Axes, image: NDArray[Any], title: str, **colours: Any) -> None:
    axes.imshow(image, interpolation="nearest", **colours)
    axes.set_title(title, fontsize=10)
    axes.axis("off")


def _draw_losses(axes: Axes, shown: Shown) -> None:
    axes.semilogy(shown.losses, color="tab:blue", linewidth=1, label="model")
    axes.axhline(shown.baseline, color="black", linestyle="--", linewidth=1, label="best blur")
    axes.set_title("mean squared error", fontsize=10)
    axes.set_xlabel("step")
    axes.set_box_aspect(_HEIGHT / _WIDTH)
    axes.yaxis.tick_right()
    axes.grid(alpha=0.3, which="both")
    axes.legend()
