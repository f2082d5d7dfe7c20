# SPDX-License-Identifier: MIT
"""The rows of the timings' CSV: one for each point and provider."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Environment:
    """The columns that all rows of a measurement share."""

    date: str
    commit: str  # with a plus if the tree had changes
    device: str  # the CPU's model and the number of cores in use, or the GPU
    driver: str  # the CUDA driver's version; empty on a CPU
    versions: str  # "cunorm 0.1.0; torch 2.13.0; ..."
    threads: int

    def __str__(self) -> str:
        driver = f", CUDA driver {self.driver}" if self.driver else ""
        return f"{self.device}{driver}\n{self.versions}\n{self.date}, commit {self.commit}"


@dataclass(frozen=True)
class Row(Environment):
    """One provider's times at one point, and the environment; None is an empty cell."""

    operator: str
    memory: str  # for a group norm, NHWC or NCHW
    direction: str
    dtype: str
    shape: str  # "4096x4096"
    provider: str
    bytes: int  # necessary reads and writes
    p20_us: float
    p50_us: float
    p80_us: float
    gb_per_s: float
    # Bytes per second relative to those of the copy. For all providers but cunorm-ungated, which
    # moves fewer bytes, this is the copy's p50 divided by the provider's.
    of_copy: float
    host_us: float | None  # host cost of a call
    error: float | None  # against the oracle, relative to the largest value; None for copies

    @property
    def point(self) -> tuple[str, str, str, str, str]:
        """The columns that identify the point."""
        return self.operator, self.memory, self.direction, self.dtype, self.shape

    @property
    def by_host_clock(self) -> bool:
        """Whether the times include host time: on a GPU, events time all providers but JAX's."""
        return bool(self.driver) and self.provider in ("jax", "cunorm-jax")
