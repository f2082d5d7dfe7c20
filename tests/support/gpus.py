# SPDX-License-Identifier: MIT
"""Capabilities of GPUs, for launch plans without a GPU."""

from __future__ import annotations

from tests.support.internals import Features, GpuCaps, features_of

SM_COUNT = 132
L2_BYTES = 50 << 20
# The largest shared memory of a block, and of a multiprocessor, in KiB, from the "CUDA C++
# Programming Guide".
_SHARED = {
    "75": (64, 64),
    "80": (163, 164),
    "86": (99, 100),
    "89": (99, 100),
    "90": (227, 228),
    "100": (227, 228),
    "120": (99, 100),
}
ARCHITECTURES = tuple(_SHARED)


def limits_of(
    architecture: str, features: Features | None = None, sm_count: int = SM_COUNT
) -> GpuCaps:
    """Return the caps of a GPU, by default with its architecture's default features."""
    block, multiprocessor = (kib << 10 for kib in _SHARED[architecture])
    features = features_of(architecture) if features is None else features
    threads = (
        1024 if architecture == "75" else 2048 if architecture in ("80", "90", "100") else 1536
    )
    return GpuCaps(sm_count, architecture, threads, block, multiprocessor, L2_BYTES, features)
