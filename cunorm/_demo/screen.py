# SPDX-License-Identifier: MIT
"""What the demo shows: lines on standard output, and a bar of its builds on standard error."""

import os
import sys
from contextlib import nullcontext
from types import TracebackType
from typing import Any, TextIO

from cunorm._backends.pool import progress_bar

_BAR = "{n_fmt}/{total_fmt} builds |{bar:20}| {elapsed} {desc}"
_COLOURS = {"green": 32, "red": 31, "bold": 1, "dim": 2}


def is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty()


def has_colours() -> bool:
    """Whether standard output shows colours: by NO_COLOR, by FORCE_COLOR, else on a terminal."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return is_terminal(sys.stdout) and os.environ.get("TERM") != "dumb"


def coloured(text: str, colour: str) -> str:
    return f"\033[{_COLOURS[colour]}m{text}\033[0m" if has_colours() else text


class Screen:
    """Prints lines above a bar of so many builds; there is a bar on a terminal only."""

    def __init__(self, builds: int) -> None:
        self._is_watched = is_terminal(sys.stderr) and builds > 0
        bar = {"leave": False, "dynamic_ncols": True, "bar_format": _BAR}
        self._bar: Any = progress_bar(builds, **bar) if self._is_watched else None

    def __enter__(self) -> "Screen":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def line(self, text: str = "") -> None:
        with nullcontext() if self._bar is None else self._bar.external_write_mode():
            print(text, flush=True)

    def say(self, text: str) -> None:
        """Say what is done, beside the bar; nothing, by an empty text."""
        if self._bar is not None:
            self._bar.set_description_str(text)
        elif self._is_watched and text:  # without tqdm
            print(text, file=sys.stderr, flush=True)

    def step(self) -> None:
        if self._bar is not None:
            self._bar.update()
