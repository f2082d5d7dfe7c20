# SPDX-License-Identifier: MIT
"""The turns of contestants, on a CPU or a GPU."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

FEWEST_ROUNDS = 5


@dataclass(frozen=True)
class Turn:
    """A timer of a contestant's calls."""

    seconds: Callable[[], float]  # makes one turn, and returns the seconds of a call
    host_seconds: float | None = None  # the host's seconds of a call, if they differ


def take_turns(turns: dict[str, Turn], seconds: float) -> dict[str, list[float]]:
    """Return the times of calls in each round; each round has a new random order.

    The order changes because a contestant may find data of the previous one in the caches.
    """
    times: dict[str, list[float]] = {name: [] for name in turns}
    contestants = list(turns.items())
    order = random.Random(0)
    end = time.perf_counter() + seconds
    rounds = 0
    while rounds < FEWEST_ROUNDS or time.perf_counter() < end:
        order.shuffle(contestants)
        for name, turn in contestants:
            times[name].append(turn.seconds())
        rounds += 1
    return times
