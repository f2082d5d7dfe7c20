# SPDX-License-Identifier: MIT
"""The list of everything that the fuzzer draws; `python -m tests.fuzz.axes` counts its draws.

An axis is a property of a case, with the values that it may have. Sizes and memory layouts have
too many values to list, and are counted by kind.
"""

from __future__ import annotations

import sys
from collections import Counter
from math import prod
from typing import Any

from tests.fuzz import drawn
from tests.fuzz.drawn import KERNELS, SUMS, builds_of, cases
from tests.fuzz.views import is_expanded, is_reversed
from tests.support.case_covers import ACTIVATIONS, NEEDS, choices_of
from tests.support.cases import DEFAULTS
from tests.support.covers import Case
from tests.support.machines import machines

_BOTH = (False, True)
_MEMORY = ("contiguous", "strided", "reversed", "expanded")
_SIZES = ("1", "a pack or less", "some packs", "shared by cores")
_PACK = 128  # the most elements of a CPU's pack; packs of row norms have 64
_SHARED = {"row": 16_384, "group": 32_768}  # cores may share a row, or samples, with more elements
_ALL = {
    **{"machine": machines(), "eps": drawn.EPS, "offset": drawn.OFFSETS, "values": drawn.VALUES},
    **{"far": _BOTH, "kind": drawn.KINDS, "workspace": _BOTH, "size": _SIZES},
    **{"given": ("all but statistics", "none", "some"), "inputs": _MEMORY, "results": _MEMORY[:3]},
}
_OWN = ("one", "one, with axes", "some", "each")  # rows of a parameter
_GATES = ("like x", *_OWN, *(f"{own}, scalar" for own in _OWN))
_POSITIONS = ("pre", "post", "branch")
_OF_ROWS = _ALL | {
    **{"leading axes": (0, 1, 2, 3, 4), "axes of a row": (1, 2, 3), "groups": drawn.GROUPS},
    **{"c": drawn.LENGTHS, "gate_activation": ACTIVATIONS},
    **{
        "rows of weight": _OWN,
        "rows of bias": _OWN,
        "gate_position": _POSITIONS,
        "rows of gate": _GATES,
    },
}
_OF_GROUPS = _ALL | {
    **{"activation": (None, *ACTIVATIONS), "channels_last": _BOTH, "channel_axis": (-1, 1)},
    **{"samples": ("1", "some"), "axes of positions": (0, 1, 2, 3, 4)},
    **{"rows of weight": _OWN[:2] + _OWN[3:], "rows of bias": _OWN[:2] + _OWN[3:]},
}
_IDLE = ("in_place",)  # not drawn: a relation sets it


def axes(kernel: str) -> dict[str, tuple[Any, ...]]:
    """Return the values of each axis of a kernel's cases."""
    found = choices_of(kernel, _OF_GROUPS if "group" in kernel else _OF_ROWS, is_seeded=True)
    if kernel == "row_norm_forward":
        del found["workspace"]  # this kernel uses no workspace
    if kernel in NEEDS:
        found |= {"needs": NEEDS[kernel], "accumulate": SUMS, "names an absent operand": _BOTH}
    found["gate_activation" if "row" in kernel else "activation"] = (None, *ACTIVATIONS)
    return {name: values for name, values in found.items() if name not in _IDLE}


def values_of(kernel: str, case: Case) -> dict[str, Any]:
    """Return the value of each axis of a case."""
    case = DEFAULTS | case
    found = {name: case[name] for name in axes(kernel) if name in case}
    found |= {"inputs": _memory(case["layouts"][0]), "results": _memory(case["results"][0])}
    given = case["given"]
    found["given"] = "all but statistics" if given is None else "some" if given else "none"
    if "needs" in found:
        absent = (name for name in case["needs"] if name != "x" and not case.get(name))
        found["names an absent operand"] = any(absent)
    found |= {f"rows of {name}": _rows_of(case[f"{name}_own"]) for name in ("weight", "bias")}
    if "row" in kernel:
        own = case["gate_own"]
        scalar = ", scalar" if (own or "").endswith("scalar") else ""
        found["rows of gate"] = _GATES[0] if own is None else _rows_of(own) + scalar
        if not case["gate"]:
            found["gate_activation"] = None
        leading, row = case["shape"][: case["axis"]], case["shape"][case["axis"] :]
        found |= {"leading axes": len(leading), "axes of a row": len(row)}
        found["size"] = _size(prod(row), prod(row) > _SHARED["row"])
    else:
        samples = case["samples"]
        found |= {"channels_last": samples.channels_last, "channel_axis": samples.channel_axis}
        found |= {"samples": "1" if samples.samples == 1 else "some"}
        found["axes of positions"] = len(samples.spatial)
        line = samples.channels if samples.channels_last else prod(samples.spatial)
        found["size"] = _size(line, prod(samples.shape) > _SHARED["group"])
    return found


def _rows_of(own: str | None) -> str:
    """Return how many rows a parameter has, given the axes along which it has its own."""
    flags = (own or "").removesuffix(" scalar")
    if "1" not in flags:
        return _OWN[1] if flags else _OWN[0]
    return _OWN[2] if "0" in flags else _OWN[3]


def _memory(layout: Any) -> str:
    if is_expanded(layout):
        return "expanded"
    if is_reversed(layout):
        return "reversed"
    if isinstance(layout, str):
        return layout if layout == "contiguous" else "strided"
    is_plain = layout.order == (*range(len(layout.order)),) and not any(layout.gaps)
    return "contiguous" if is_plain and set(layout.steps) <= {1} else "strided"


def _size(line: int, is_shared: bool) -> str:
    if is_shared:
        return _SIZES[3]
    return _SIZES[0] if line == 1 else _SIZES[1] if line <= _PACK else _SIZES[2]


class Counts(Counter[tuple[str, Any]]):
    """How many cases of a kernel had each value of each axis."""

    def __init__(self, kernel: str) -> None:
        super().__init__()
        self.kernel, self.axes = kernel, axes(kernel)

    def add(self, case: Case) -> None:
        """Count a case; each of its values must be listed."""
        found = values_of(self.kernel, case)
        assert found.keys() == self.axes.keys(), found.keys() ^ self.axes.keys()
        for axis, value in found.items():
            assert value in self.axes[axis], f"{axis} is {value!r}, which is not listed"
            self[axis, value] += 1

    def missing(self) -> list[tuple[str, Any]]:
        """Return the values that no case had."""
        listed = [(axis, value) for axis, some in self.axes.items() for value in some]
        return [one for one in listed if not self[one]]

    def table(self) -> str:
        lines = [
            f"## {self.kernel}",
            "",
            "| axis | values, and how many cases have each |",
            "|---|---|",
        ]
        for axis, values in self.axes.items():
            named = {v: "+".join(v) if isinstance(v, tuple) else str(v) for v in values}
            each = ", ".join(f"{name}: {self[axis, value]}" for value, name in named.items())
            lines.append(f"| {axis} | {each} |")
        return "\n".join(lines) + "\n"


def count_draws(kernel: str, number: int) -> Counts:
    """Draw and count cases, without making their calls."""
    from hypothesis import given, seed, settings

    from tests.fuzz.test_examples import common

    counts = Counts(kernel)
    drawn_cases = given(cases(kernel, builds_of(kernel, 5), with_long=True))
    seed(0)(settings(common, max_examples=number)(drawn_cases(lambda case: counts.add(case))))()
    return counts


if __name__ == "__main__":
    for one in KERNELS:
        print(count_draws(one, int(sys.argv[1]) if len(sys.argv) > 1 else 1000).table())
