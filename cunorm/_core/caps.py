# SPDX-License-Identifier: MIT
"""The capabilities of a device, on which launch plans depend, and the GPU features that plans use.

The tests interpret the PTX of kernels that use features. No GPU has run these kernels yet. The
environment variable `CUNORM_FEATURES` lists the features to use, or is `none`.
"""

import os
from typing import NamedTuple

_VARIABLE = "CUNORM_FEATURES"
PORTABLE_CLUSTER = 8  # the cluster size, in blocks, that every GPU with clusters supports
# A backward uses at most this number of multiprocessors, so that the memory for partial sums can
# be planned before the GPU is known. Today's GPUs have fewer.
MAX_SMS = 256
MIN_ASYNC_COPY_BYTES = 4


class Features(NamedTuple):
    clusters: bool = False  # blocks share a row or groups, so they need not read x twice
    async_copies: bool = False  # tiles or later rows go to shared memory during other work
    largest_cluster: int = 16  # in blocks; it is halved until the GPU has room for a cluster
    programmatic_launches: bool = False  # a kernel starts early and waits for the previous launch


class GpuCaps(NamedTuple):
    sm_count: int
    compute_capability: str  # for example "90", which is 9.0
    max_threads_per_sm: int
    shared_memory_per_block_optin: int  # the most bytes for a block
    shared_memory_per_sm: int
    l2_bytes: int
    features: Features


class CpuCaps(NamedTuple):
    last_cache_bytes: int


Caps = CpuCaps | GpuCaps

NONE = Features()
# The lowest compute capability with each feature, and those that use it by default; 90 is 9.0.
MIN_CAPABILITY = {"clusters": 90, "async_copies": 80, "programmatic_launches": 90}
_BY_DEFAULT = {
    "clusters": range(90, 110),
    "async_copies": range(80, 1000),
    "programmatic_launches": range(90, 1000),
}


def features_of(compute_capability: str) -> Features:
    """Return the features that plans for a GPU use; the compute capability "90" is 9.0."""
    named, number = _named(), int(compute_capability)

    def is_used(name: str) -> bool:
        if named is None:
            return number in _BY_DEFAULT[name]
        return name in named and number >= MIN_CAPABILITY[name]

    return Features(**{name: is_used(name) for name in MIN_CAPABILITY})


def describe_feature(name: str) -> str:
    """Describe the GPUs on which a feature is used, and how the feature was tested."""
    named, since, used = _named(), MIN_CAPABILITY[name] / 10, _BY_DEFAULT[name]
    if named is not None:
        state = f"on from compute capability {since}" if name in named else "off"
        return f"{state}: {_VARIABLE}={os.environ[_VARIABLE]}"
    which = f"{since} and later" if used.stop == 1000 else f"{since} to below {used.stop / 10}"
    return (
        f"on for compute capability {which}; tested by interpreting the kernels' PTX, not yet by a "
        f"run on a GPU ({_VARIABLE}=none turns it off)"
    )


def _named() -> set[str] | None:
    """Return the features that the environment variable names, or None if it is not set."""
    names = {name.strip() for name in os.environ.get(_VARIABLE, "").split(",")} - {""}
    features = names - {"none"}
    if unknown := features - set(MIN_CAPABILITY):
        raise ValueError(
            f"{_VARIABLE} names {min(unknown)!r}, expected 'none' or some of "
            f"{', '.join(MIN_CAPABILITY)}"
        )
    if features and features != names:
        raise ValueError(f"{_VARIABLE} names 'none' beside {min(features)!r}, expected one of them")
    return features if names else None
