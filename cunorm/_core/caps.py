# SPDX-License-Identifier: MIT
"""What launch plans know of a device, and which features of a GPU they use.

Every test of the features passes where the PTX of the kernels is interpreted: in four orders of
threads, with copies as early and as late as they may be, with races looked for. That is no run on a
GPU: `CUNORM_FEATURES=none` in the environment turns them off, a list of names turns on those alone.
Without them long rows and large samples are read twice, and rows loaded when they are needed.
"""

from __future__ import annotations

import os
from typing import NamedTuple

VARIABLE = "CUNORM_FEATURES"
OFF = "none"
# Blocks of a cluster that every GPU with clusters takes.
PORTABLE_CLUSTER = 8
# Multiprocessors that a backward keeps busy at most: no GPU had more when this was written, and
# so memory for partial sums can be planned before the GPU is known.
MOST_SMS = 256
# Bytes of an asynchronous copy, at least.
LEAST_COPY = 4


class Features(NamedTuple):
    """Which features a plan uses."""

    clusters: bool = False  # blocks that share a row or groups and send each other their sums
    async_copies: bool = False  # of rows, while others are computed, and of samples
    largest_cluster: int = 16  # blocks; half as many, and so on, where the driver has no room


class GpuCaps(NamedTuple):
    """What a launch plan needs to know of a GPU."""

    sm_count: int
    compute_capability: str  # "90" is 9.0
    max_threads_per_sm: int
    shared_memory_per_block_optin: int  # bytes that a launch may give a block
    shared_memory_per_sm: int
    l2_bytes: int
    features: Features


class CpuCaps(NamedTuple):
    """What a launch plan needs to know of a CPU."""

    last_cache_bytes: int


Caps = CpuCaps | GpuCaps

NONE = Features()
# From which compute capability on a GPU has a feature, and where it is used by default; 90 is 9.0.
LEAST_CAPABILITY = {"clusters": 90, "async_copies": 80}
_BY_DEFAULT = {"clusters": range(90, 110), "async_copies": range(80, 1000)}


def features_of(compute_capability: str) -> Features:
    """Return the features that plans for a GPU use; "90" is the compute capability 9.0."""
    named, number = _named(), int(compute_capability)
    return Features(
        **{
            name: number in _BY_DEFAULT[name]
            if named is None
            else name in named and number >= least
            for name, least in LEAST_CAPABILITY.items()
        }
    )


def describe_feature(name: str) -> str:
    """Return on which GPUs a feature is used, and what shows that it is right."""
    named = _named()
    if named is not None and name not in named:
        return f"off: {VARIABLE}={os.environ[VARIABLE]}"
    since = _dotted(LEAST_CAPABILITY[name])
    if named is not None:
        return f"on from compute capability {since}: {VARIABLE}={os.environ[VARIABLE]}"
    used = _BY_DEFAULT[name]
    which = f"from {since} on" if used.stop == 1000 else f"{since} to below {_dotted(used.stop)}"
    return (
        f"on for compute capability {which}; shown by interpreting the kernels' PTX, not yet by a "
        f"run on a GPU ({VARIABLE}={OFF} turns it off)"
    )


def _named() -> set[str] | None:
    """Return the features that the environment names; None where it says nothing."""
    names = {name.strip() for name in os.environ.get(VARIABLE, "").split(",")} - {""}
    if unknown := names - set(LEAST_CAPABILITY) - {OFF}:
        raise ValueError(
            f"{VARIABLE} names {min(unknown)!r}, expected {OFF} or some of "
            f"{', '.join(LEAST_CAPABILITY)}"
        )
    if OFF in names and len(names) > 1:
        raise ValueError(
            f"{VARIABLE} names {OFF} beside {min(names - {OFF})!r}, expected one of them"
        )
    return names - {OFF} if names else None


def _dotted(number: int) -> str:
    return f"{number // 10}.{number % 10}"
