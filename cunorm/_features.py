# SPDX-License-Identifier: MIT
"""What a launch plan may use of a GPU beyond what all of them have.

Launching such a kernel is the one thing that no machine without a GPU can show. So a feature is
used by default once a run on a GPU has passed its tests, whose results are in `bench/results`;
before, `CUNORM_FEATURES=clusters,async_copies` in the environment turns it on. Without it, plans
take the road below: rows are read twice, and loaded when they are needed.
"""

from __future__ import annotations

import os
from typing import NamedTuple

VARIABLE = "CUNORM_FEATURES"


class Features(NamedTuple):
    """Which features a plan uses."""

    clusters: bool = False  # blocks that share a row and read each other's shared memory
    async_copies: bool = False  # rows on their way to shared memory while others are computed


NONE = Features()
LEAST_CAPABILITY = {"clusters": 90, "async_copies": 80}  # 90 is 9.0
# What has passed on a GPU, by its compute capability.
PROVEN: dict[str, Features] = {}


def features_of(compute_capability: str) -> Features:
    """Return the features that plans for a GPU use; "90" is the compute capability 9.0."""
    asked, number = _asked(), int(compute_capability)
    proven = PROVEN.get(compute_capability, NONE)._asdict()
    return Features(
        **{
            name: (proven[name] or name in asked) and number >= least
            for name, least in LEAST_CAPABILITY.items()
        }
    )


def _asked() -> set[str]:
    names = {name.strip() for name in os.environ.get(VARIABLE, "").split(",")} - {""}
    if unknown := names - set(Features._fields):
        raise ValueError(
            f"{VARIABLE} names {min(unknown)!r}, expected some of {', '.join(Features._fields)}"
        )
    return names


def described(name: str) -> str:
    """Return on which GPUs a feature is used."""
    proven = [number for number, features in PROVEN.items() if getattr(features, name)]
    if name in _asked():
        return f"used from compute capability {_dotted(LEAST_CAPABILITY[name])} on: {VARIABLE}"
    if proven:
        return f"used with compute capability {', '.join(_dotted(int(n)) for n in proven)}"
    return f"not used: no run on a GPU has passed with it yet; {VARIABLE}={name} turns it on"


def _dotted(number: int) -> str:
    return f"{number // 10}.{number % 10}"
