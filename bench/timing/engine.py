# SPDX-License-Identifier: MIT
"""Check and time providers at a point, on a CPU or a GPU."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np

from bench.timing.arrays import as_host
from bench.timing.cases import Operands, dequantized, oracle, worst_error
from bench.timing.grid import Point
from bench.timing.operands import checked_shape, host_operands
from bench.timing.providers.base import VIEWS, Provider
from bench.timing.rows import Environment, Row

COPY = "copy"
HOST_ELEMENTS = 1 << 14  # on a CPU, the time of a call on no more elements is its host cost
FEWEST_ROUNDS = 5


@dataclass(frozen=True)
class Turn:
    """A timer of a contestant's calls."""

    seconds: Callable[[], float]  # makes one turn, and returns the seconds of a call
    host_seconds: float | None = None  # the host's seconds of a call, if they differ


class Device:
    """A CPU or a GPU, which also has `operands`, `upload`, `copies` and `turn`."""

    kind = ""
    note = ""
    name = ""  # the model
    driver = ""  # the version of CUDA's driver
    threads = 1  # threads that make calls

    def prepare(self, points: Iterable[Point]) -> None:
        """Compile the builds of the points, if the first calls, which are not timed, do not."""

    def versions(self) -> dict[str, str]:
        """Return versions of further software that it uses."""
        return {}

    def fitting(self, point: Point, contestants: int) -> Point:
        """Return the point, with fewer rows if the arrays of all contestants would not fit."""
        return point


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
    device: Any,
    point: Point,
    providers: Sequence[Provider],
    environment: Environment,
    seconds: float,
) -> tuple[list[Row], list[Failure]]:
    """Check every provider at a point, and time the correct ones in turns."""
    checked = replace(point, shape=checked_shape(point.shape, 1 + point.operator.modulated))
    errors, failures = check(device, checked, providers)
    usable = {provider.name: provider for provider in providers if provider.name in errors}
    sets = device.operands(point)
    turns = {COPY: device.turn(device.copies(point))}
    moved = dict.fromkeys(turns, point.bytes)
    for name, provider in usable.items():
        computed = provider.computes(point.operator)
        moved[name] = replace(point, operator=computed).bytes
        try:
            calls = provider.calls(computed, point.direction, view_all(provider, sets))
            turns[name] = device.turn(calls, provider.wait)
        except Exception as error:  # another library may raise anything
            failures.append(Failure(point, name, error))
    times = take_turns(turns, seconds)
    copied_per_second = point.bytes / float(np.median(times[COPY]))
    rows = []
    for name, spent in times.items():
        low, median, high = map(float, np.quantile(spent, (0.2, 0.5, 0.8)))
        host = turns[name].host_seconds
        if host is None and point.elements <= HOST_ELEMENTS:
            host = median
        row = Row(
            *astuple(environment),
            *point.columns,
            provider=name,
            bytes=moved[name],
            p20_us=1e6 * low,
            p50_us=1e6 * median,
            p80_us=1e6 * high,
            gb_per_s=1e-9 * moved[name] / median,
            of_copy=moved[name] / median / copied_per_second,
            host_us=None if host is None else 1e6 * host,
            error=errors.get(name),
        )
        rows.append(row)
    return rows, failures


def take_turns(turns: dict[str, Turn], seconds: float) -> dict[str, list[float]]:
    """Return the times of calls in each round; each round has a new random order.

    The order changes because a contestant may find data of the previous one in the caches.
    """
    times: dict[str, list[float]] = {name: [] for name in turns}
    contestants, order = list(turns.items()), random.Random(0)
    end, rounds = time.perf_counter() + seconds, 0
    while rounds < FEWEST_ROUNDS or time.perf_counter() < end:
        order.shuffle(contestants)
        for name, turn in contestants:
            times[name].append(turn.seconds())
        rounds += 1
    return times


def check(
    device: Any, point: Point, providers: Iterable[Provider]
) -> tuple[dict[str, float], list[Failure]]:
    """Compare providers with the oracle; return errors of correct ones, and failures."""
    host = host_operands(point.operator, point.dtype, point.shape)
    errors: dict[str, float] = {}
    failures = []
    expected: dict[str, dict[str, Any]] = {}
    for provider in providers:
        if not provider.supports(point.operator):
            continue
        computed, direction = provider.computes(point.operator), point.direction
        if computed.name not in expected:
            expected[computed.name] = oracle(computed, direction, host)
        try:
            sets = view_all(provider, [device.upload(host)])
            (call,) = provider.calls(computed, direction, sets)
            results = provider.results_by_name(computed, direction, call())
            found = {name: as_host(array) for name, array in results.items()}
            error = worst_error(dequantized(computed, found), expected[computed.name])
            if not error <= computed.tolerance(point.dtype):
                raise ArithmeticError(f"wrong by {error:.1e} of the largest value")
            errors[provider.name] = error
        except Exception as error:  # another library may raise anything
            failures.append(Failure(point, provider.name, error))
    return errors, failures


def failures_at(device: Any, point: Point, providers: Iterable[Provider]) -> int:
    """Check providers at a point, print their errors, and return the number of failures."""
    errors, failures = check(device, point, providers)
    for name, error in errors.items():
        print(f"{point}, {name}: error {error:.1e}")
    print(*failures, sep="\n", end="\n" if failures else "", flush=True)
    return len(failures)


def view_all(provider: Provider, sets: Iterable[Operands]) -> list[Operands]:
    """Return sets of operands as arrays that a provider takes."""
    view = VIEWS[provider.arrays]
    return [{name: view(array) for name, array in operands.items()} for operands in sets]
