# SPDX-License-Identifier: MIT
"""The timings on the screen: a table of the points, and geometric means."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from bench.timing.cases import OPERATORS
from bench.timing.rows import Row

Timed = dict[str, Row]  # one point's rows by provider

_GLUE = "\N{NO-BREAK SPACE}"  # keeps a figure on one line
_NOT_PEERS = ("copy", "cunorm-ungated")
_ORDER = {(operator.name, operator.memory): index for index, operator in enumerate(OPERATORS)}
_GATED = {operator.name for operator in OPERATORS if operator.gate_position}


def in_order(rows: Iterable[Row]) -> list[Row]:
    """Sort rows by operator and direction; the sort is stable."""
    return sorted(rows, key=lambda row: (_ORDER[row.operator, row.memory], row.direction[0] == "b"))


def table(rows: Sequence[Row]) -> str:
    """Return a line for each point, then geometric means over groups of points."""
    rows = in_order(rows)
    providers = list(dict.fromkeys(row.provider for row in rows))
    ours = [name for name in providers if name.startswith("cunorm")]
    base = "cunorm" if "cunorm" in ours else next(iter(ours), None)
    points: dict[tuple[str, ...], Timed] = {}
    for row in rows:
        points.setdefault(row.point, {})[row.provider] = row
    timed = [found for found in points.values() if base in found]
    if base is None or not timed:
        return "no point of cunorm's was timed"
    peers = [name for name in providers if name not in (base, *_NOT_PEERS)]
    lines = [_heading(base, peers), *(_line(found, base, peers) for found in timed)]
    if late := list(dict.fromkeys(row.provider for row in rows if row.by_host_clock)):
        lines.append(f"The times of {' and '.join(late)} include host time, other times do not.")
    lines += ["", "geometric means (worst points):"]
    for names, group in _groups(timed).items():
        line = f"{' '.join(names):44}".replace(" ", _GLUE) + f" {_means(group, base, peers)}"
        lines.append(_wrapped(line))
    return "\n".join(lines)


def _wrapped(line: str) -> str:
    """Wrap a line to the width of the screen, without splitting figures."""
    indent = 45 * " "
    pieces = textwrap.wrap(line, 120, subsequent_indent=indent, break_on_hyphens=False)
    return "\n".join(pieces).replace(_GLUE, " ")


def _heading(base: str, peers: Sequence[str]) -> str:
    names = "".join(f" {'× ' + name:>{_width(name)}}" for name in peers)
    return (
        f"{base}: p50 in µs, GB/s, share of a copy's speed; then others' times divided by its\n"
        f"time, and its time divided by that without the gate; NHWC: channels last in memory\n"
        f"{'operator':22} {'direction':9} {'dtype':8} {'shape':>14} {'µs':>10} {'GB/s':>7}"
        f" {'of copy':>7}{names} {'/ ungated':>9}".rstrip()
    )


def _width(name: str) -> int:
    return max(7, len(name) + 2)


def _line(found: Timed, base: str, peers: Sequence[str]) -> str:
    row = next(iter(found.values()))
    ours = found[base]
    cells = "".join(f" {_ratio(found, name, base):>{_width(name)}}" for name in peers)
    operator = f"{row.operator} {row.memory}".rstrip()
    return (
        f"{operator:22} {row.direction:9} {row.dtype:8} {row.shape:>14} {ours.p50_us:10.1f}"
        f" {ours.gb_per_s:7.1f} {ours.of_copy:7.2f}{cells}"
        f" {_ratio(found, base, 'cunorm-ungated'):>9}".rstrip()
    )


def _ratio(found: Timed, name: str, other: str) -> str:
    """Return one provider's time divided by another's; empty if either was not timed."""
    if name not in found or other not in found:
        return ""
    return f"{found[name].p50_us / found[other].p50_us:.2f}"


def _groups(timed: Iterable[Timed]) -> dict[tuple[str, str, str], list[Timed]]:
    """Group the points by operator, direction and dtype; then add groups over several operators.

    These are all gated row norms, all ungated row norms, and a group norm in both memory orders.
    """
    groups: dict[tuple[str, str, str], list[Timed]] = {}
    of_all: dict[tuple[str, str, str], list[Timed]] = {}
    for found in timed:
        row = next(iter(found.values()))
        label = f"{row.operator} {row.memory}".rstrip()
        groups.setdefault((label, row.direction, row.dtype), []).append(found)
        if row.memory:
            which = f"{row.operator} both"
        else:
            which = "all gated" if row.operator in _GATED else "all ungated"
        of_all.setdefault((which, row.direction, row.dtype), []).append(found)
    return groups | of_all


def _means(group: Sequence[Timed], base: str, peers: Sequence[str]) -> str:
    """Return the geometric means of a group, each with its worst point."""
    of_copy = [(found[base].of_copy, found[base].shape) for found in group]
    parts = [f"of copy {_mean_and_worst(of_copy, min)}"]
    for name in peers:
        if ratios := _ratios(group, name, base):
            parts.append(f"× {name} {_mean_and_worst(ratios, min)}")
    if ratios := _ratios(group, base, "cunorm-ungated"):
        parts.append(f"/ ungated {_mean_and_worst(ratios, max)}")
    return "; ".join(part.replace(" ", _GLUE) for part in parts)


def _ratios(group: Iterable[Timed], name: str, other: str) -> list[tuple[float, str]]:
    both = [found for found in group if name in found and other in found]
    return [(found[name].p50_us / found[other].p50_us, found[other].shape) for found in both]


def _mean_and_worst(ratios: Sequence[tuple[float, str]], worst: Callable[..., Any]) -> str:
    mean = statistics.geometric_mean(ratio for ratio, _ in ratios)
    ratio, shape = worst(ratios)
    return f"{mean:.2f} ({ratio:.2f} at {shape})"
