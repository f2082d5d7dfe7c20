# SPDX-License-Identifier: MIT
"""What the examples' pictures have in common: their colours, and how they are saved."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

# Okabe and Ito's blue and vermilion, which most colour-blind people can tell apart.
OTHER, CUNORM = "#0072b2", "#d55e00"


def save_picture(figure: Figure, path: Path) -> None:
    """Write a figure as a PNG and print where it is."""
    figure.savefig(path, format="png", dpi=120)
    print(f"picture: {path}")
