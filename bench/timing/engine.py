# SPDX-License-Identifier: MIT
"""Check and time providers at a point, on a CPU or a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import numpy as np

from bench.timing.arrays import as_host
from bench.timing.cases import (
    TOLERANCE,
    Call,
    Operands,
    checked_shape,
    host_operands,
    oracle,
    worst_error,
)
from bench.timing.grid import Point
from bench.timing.machine import Environment
from bench.timing.providers import Provider
from bench.timing.providers.base import VIEWS
from bench.timing.rows import Row
from bench.timing.turns import Turn, take_turns

COPY = "copy"
HOST_ELEMENTS = 1 << 14  # on a CPU, the time of a call on no more elements is its host cost


class Device(Protocol):
    """A CPU or a GPU that holds operands and times calls."""

    kind: str
    note: str
    threads: int

    @property
    def name(self) -> str:
        """The model of the device."""

    @property
    def driver(self) -> str:
        """The version of CUDA's driver; empty on a CPU."""

    @property
    def versions(self) -> dict[str, str]:
        """Versions of further software that it uses."""

    def prepare(self, points: Iterable[Point]) -> None:
        """Compile the builds of the points."""

    def fitting(self, point: Point, contestants: int) -> Point:
        """Return the point, with fewer rows if its arrays would not fit the memory."""

    def operands(self, point: Point) -> list[Operands]:
        """Return the sets of operands that the calls rotate through."""

    def upload(self, host: Operands) -> Operands:
        """Copy arrays of the host to the device."""

    def copies(self, point: Point) -> list[Call]:
        """Return for each set a copy that moves as many bytes as a call."""

    def turn(self, calls: list[Call], wait: Callable[[Any], Any] | None = None) -> Turn:
        """Warm up, and return the turn of the calls."""


@dataclass(frozen=True)
class Failure:
    """A provider that failed at a point, and its error."""

    point: Point
    provider: str
    error: Exception

    @property
    def is_ours(self) -> bool:
        """Whether cunorm or the engine failed, and not another library."""
        return self.provider == COPY or self.provider.startswith("cunorm")

    def __str__(self) -> str:
        text = " ".join(str(self.error).split())[:300]
        return f"FAILED {self.point}, {self.provider}: {type(self.error).__name__}: {text}"


def time_point(
    device: Device,
    point: Point,
    providers: Sequence[Provider],
    environment: Environment,
    seconds: float,
) -> tuple[list[Row], list[Failure]]:
    """Check every provider at a point, and time the correct ones in turns."""
    errors, failures = check(device, point, providers)
    usable = [provider for provider in providers if provider.name in errors]
    point = device.fitting(point, 1 + len(usable))
    sets = device.operands(point)
    turns = {COPY: device.turn(device.copies(point))}
    for provider in usable:
        try:
            calls = provider.calls(point.operator, point.direction, view_all(provider, sets))
            turns[provider.name] = device.turn(calls, provider.wait)
        except Exception as error:  # another library may raise anything
            failures.append(Failure(point, provider.name, error))
    times = take_turns(turns, seconds)
    by_name = {provider.name: provider for provider in usable}
    rate = point.bytes / float(np.median(times[COPY]))
    rows = []
    for name, spent in times.items():
        timed = point
        if name in by_name:
            timed = point.with_operator(by_name[name].computes(point.operator))
        rows.append(_row(environment, point, name, timed.bytes, spent, turns[name], rate))
    return [replace(row, error=errors.get(row.provider)) for row in rows], failures


def check(
    device: Device, point: Point, providers: Iterable[Provider]
) -> tuple[dict[str, float], list[Failure]]:
    """Check providers on some rows or samples; return errors of correct ones, and failures."""
    small = replace(point, shape=checked_shape(point.shape))
    host = host_operands(small.operator, small.dtype, small.shape)
    errors: dict[str, float] = {}
    failures = []
    expected: dict[str, dict[str, Any]] = {}
    for provider in providers:
        if not provider.supports(small.operator, small.direction, small.dtype):
            continue
        try:
            error = _error(device, small, provider, host, expected)
            if not error <= TOLERANCE[small.dtype]:
                raise ArithmeticError(f"wrong by {error:.1e} of the largest value")
            errors[provider.name] = error
        except Exception as error:  # another library may raise anything
            failures.append(Failure(point, provider.name, error))
    return errors, failures


def _error(
    device: Device,
    point: Point,
    provider: Provider,
    host: Operands,
    expected: dict[str, dict[str, Any]],
) -> float:
    """Return a provider's error; cache the oracle's results in `expected`."""
    computed, direction = provider.computes(point.operator), point.direction
    if computed.name not in expected:
        expected[computed.name] = oracle(computed, direction, host)
    (call,) = provider.calls(point.operator, direction, view_all(provider, [device.upload(host)]))
    results = provider.results_by_name(computed, direction, call())
    results = {name: as_host(array) for name, array in results.items()}
    return worst_error(results, expected[computed.name])


def view_all(provider: Provider, sets: Iterable[Operands]) -> list[Operands]:
    """Return sets of operands as arrays that a provider takes."""
    view = VIEWS[provider.arrays]
    return [{name: view(array) for name, array in operands.items()} for operands in sets]


def _row(
    environment: Environment,
    point: Point,
    provider: str,
    moved: int,
    spent: Sequence[float],
    turn: Turn,
    copied_per_second: float,
) -> Row:
    low, median, high = (float(t) for t in np.quantile(spent, (0.2, 0.5, 0.8)))
    host = turn.host_seconds
    if host is None and point.elements <= HOST_ELEMENTS:
        host = median
    return Row(
        **asdict(environment),
        operator=point.operator.name,
        memory=point.operator.memory,
        direction=point.direction,
        dtype=point.dtype,
        shape=point.shape_text,
        provider=provider,
        bytes=moved,
        p20_us=1e6 * low,
        p50_us=1e6 * median,
        p80_us=1e6 * high,
        gb_per_s=1e-9 * moved / median,
        of_copy=moved / median / copied_per_second,
        host_us=None if host is None else 1e6 * host,
        error=None,
    )
