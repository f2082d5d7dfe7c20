# SPDX-License-Identifier: MIT
"""How contestants take turns, on either device."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

FEWEST_ROUNDS = 5


@dataclass(frozen=True)
class Turn:
    """What a device makes of a contestant's calls: something that times a turn of them."""

    seconds: Callable[[], float]  # of a call, over one turn
    host_seconds: float | None = None  # that a call keeps the host, where that is another time


def take_turns(turns: dict[str, Turn], seconds: float) -> dict[str, list[float]]:
    """Return what calls took in each round; the order is drawn anew for each.

    What one leaves in the caches is the next one's gain, so none has a fixed place.
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
