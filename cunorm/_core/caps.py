# SPDX-License-Identifier: MIT
"""The caps of a device, which launch plans depend on, and the features of a GPU that they use.

The features are tested by interpreting the kernels' PTX: in four orders of threads, with copies as
early and as late as they may be, and with a search for races. That is no run on a GPU:
`CUNORM_FEATURES=none` in the environment turns them off, a list of names turns on those alone.
Without them long rows and large samples are read twice, and rows are loaded when they are needed.
"""

from __future__ import annotations

import os
from typing import NamedTuple

VARIABLE = "CUNORM_FEATURES"
OFF = "none"
PORTABLE_CLUSTER = 8  # blocks of a cluster that every GPU with clusters takes
# Multiprocessors that a backward uses at most: no GPU had more when this was written, and so memory
# for partial sums can be planned before the GPU is known.
MOST_SMS = 256
LEAST_COPY = 4  # bytes of an asynchronous copy, at least


class Features(NamedTuple):
    """The features that a plan uses."""

    clusters: bool = False  # blocks that share a row or groups and send each other their sums
    async_copies: bool = False  # of rows, while others are computed, and of samples
    largest_cluster: int = 16  # blocks; half as many, and so on, where the driver has no room


class GpuCaps(NamedTuple):
    """What a launch plan depends on in a GPU."""

    sm_count: int
    compute_capability: str  # "90" is 9.0
    max_threads_per_sm: int
    shared_memory_per_block_optin: int  # bytes that a launch may give a block
    shared_memory_per_sm: int
    l2_bytes: int
    features: Features


class CpuCaps(NamedTuple):
    """What a launch plan depends on in a CPU."""

    last_cache_bytes: int


Caps = CpuCaps | GpuCaps

NONE = Features()
# From which compute capability on a GPU has a feature, and where it is used by default; 90 is 9.0.
LEAST_CAPABILITY = {"clusters": 90, "async_copies": 80}
_BY_DEFAULT = {"clusters": range(90, 110), "async_copies": range(80, 1000)}


def features_of(compute_capability: str) -> Features:
    """Return the features that plans for a GPU use; "90" is the compute capability 9.0."""
    named, number = _named(), int(compute_capability)

    def is_used(name: str) -> bool:
        if named is None:
            return number in _BY_DEFAULT[name]
        return name in named and number >= LEAST_CAPABILITY[name]

    return Features(clusters=is_used("clusters"), async_copies=is_used("async_copies"))


def describe_feature(name: str) -> str:
    """Return a text: on which GPUs a feature is used, and how it was tested."""
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
    """Return the features that the environment names, None without the variable."""
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
