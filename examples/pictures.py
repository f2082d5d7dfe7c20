# SPDX-License-Identifier: MIT
"""The colours of the examples' pictures, and the function that saves a picture."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

# Most colour-blind people can tell these two apart: blue and vermilion by Okabe and Ito.
OTHER, CUNORM = "#0072b2", "#d55e00"


def save_picture(figure: Figure, path: Path) -> None:
    """Write a figure as a PNG and print where it is."""
    figure.savefig(path, format="png", dpi=120)
    print(f"picture: {path}")
