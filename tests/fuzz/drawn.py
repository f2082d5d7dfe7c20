# SPDX-License-Identifier: MIT
"""Strategies for cases. A case is a build, and the choices that are not compiled in.

`axes.py` lists what is drawn, and `python -m tests.fuzz.axes` counts it.
"""

from __future__ import annotations

from functools import cache
from math import prod
from typing import Any

from hypothesis import strategies as st

from tests.fuzz.views import is_reversed, result_views, views
from tests.support.case_covers import FACTORS, machine_builds
from tests.support.covers import Case
from tests.support.placed import GROUP_LAYOUTS, Samples

KERNELS = tuple(FACTORS)
_MOST = 15_000  # elements of x at most, so that the oracle is quick
_LONG = 60_000  # elements of x in long cases, in which cores share rows or samples
_EDGES = (1, 2, 31, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000, 1023, 1024, 1025, 2048, 4097)
_WIDTHS = st.one_of(st.integers(1, 70), st.sampled_from(_EDGES), st.integers(1, 5000))
_LONG_WIDTHS = st.sampled_from([20_000, 16_385, 24_704])
_SIZES = st.one_of(st.integers(1, 4), st.integers(1, 40), st.integers(1, 700))
_RESULTS = ("y", "residual", "rstd", "mean", "dx", "dresidual", "dgate", "dweight", "dbias")


# The values that `cases` chooses from.
EPS, OFFSETS, KINDS = (1e-5, 1e-3, 1.0), (0, 1, 2, 4, 7), ("numpy", "torch", "dlpack")
VALUES, SUMS = ("normal", "quarters", "tails", "equal", "zeros"), (None, "float32", "float64")
LENGTHS, GROUPS = (None, 1.0, 3.0), (1, 3, 4)


@cache
def builds_of(kernel: str, seeds: int) -> list[Case]:
    """Return the builds to draw from: those of a cover, and those of `seeds` larger covers."""
    more = (case for seed in range(seeds) for case in machine_builds(kernel, seed))
    plain = [*machine_builds(kernel), *more]
    some = plain[:: 2 if seeds else 4]
    return [*plain, *(_modulated(case, number) for number, case in enumerate(some))]


def _modulated(case: Case, number: int) -> Case:
    """Return a case whose parameters may vary over rows; of the gates, half are on the branch."""
    branch = {"gate_position": "branch"} if case.get("gate") and number % 2 else {}
    return case | branch | {"modulated": True}


@st.composite
def cases(draw: Any, kernel: str, builds: list[Case], *, with_long: bool = False) -> Case:
    """Draw a case of one of the builds; `with_long` makes some cases large."""
    case = {**draw(st.sampled_from(builds))}
    is_modulated = case.pop("modulated", False)
    is_long = with_long and draw(st.integers(0, 15)) == 15
    case = case | draw((_of_groups if "group" in kernel else _of_rows)(case, is_long))
    if is_modulated:
        case |= draw((_own_samples if "group" in kernel else _own_rows)(case))
    case["eps"] = draw(st.sampled_from(EPS))
    case["offset"] = draw(st.sampled_from([0, *OFFSETS]))
    if case.get("accumulate"):
        case["accumulate"] = draw(st.sampled_from([None, *SUMS]))
    if case.get("activation") != "relu":  # a rounding of the mean may cross relu's corner
        case["far"] = draw(st.booleans())
        case["values"] = draw(st.sampled_from(["normal", *VALUES]))
    in_memory = (*case["layouts"], *case["results"])
    if "given" not in case and draw(st.booleans()):
        case["given"] = tuple(name for name in _RESULTS if draw(st.booleans()))
    if not any(map(is_reversed, in_memory)):
        case["kind"] = draw(st.sampled_from(KINDS))
    if case.get("kind") == "dlpack":
        case |= {"given": ()} | dict.fromkeys(case.keys() & {"accumulate"})
    if kernel != "row_norm_forward":
        case["workspace"] = draw(st.booleans())
    return case


@st.composite
def _of_rows(draw: Any, case: Case, is_long: bool) -> Case:
    width, groups = draw(_WIDTHS), draw(st.sampled_from([1, 1, *GROUPS]))
    if is_long:
        width, groups = draw(_LONG_WIDTHS), 1
    row, most = [width], _LONG if is_long else _MOST
    if groups == 1 and not is_long:
        row = [*draw(st.lists(st.integers(1, 4), max_size=2)), width]
    leading: list[int] = []
    for size in draw(st.lists(_SIZES, max_size=4)):
        leading.append(max(1, min(size, most // (prod(leading) * prod(row) * groups))))
    shape = (*leading, *row)
    more = {"shape": shape, "axis": -len(row), "groups": groups}
    more["c"] = draw(st.sampled_from(LENGTHS))
    return more | draw(_layouts(len(leading), len(shape), 3 if groups == 1 else 2))


@st.composite
def _of_groups(draw: Any, case: Case, is_long: bool) -> Case:
    groups, depth = draw(st.integers(1, 9)), draw(st.one_of(st.integers(1, 8), st.integers(1, 70)))
    positions: list[int] = []
    for size in draw(st.lists(_SIZES, max_size=4)):
        positions.append(max(1, min(size, _MOST // (prod(positions) * groups * depth))))
    if is_long:  # more positions than one core takes at a time
        positions = [*positions[:3], -(-_LONG // (2 * prod(positions[:3]) * groups * depth))]
    most = max(1, _MOST // (prod(positions) * groups * depth))
    samples = min(draw(st.sampled_from([1, 2, 3, 20])), 2 if is_long else most)
    axis = draw(st.sampled_from([-1, 1]))
    sizes = (tuple(positions), groups * depth, groups)
    drawn = Samples(samples, *sizes, case["channels_last"], axis)
    memory = draw(st.sampled_from(["contiguous", "named", "any"]))
    if memory == "contiguous":
        return {"samples": drawn, "layouts": ("contiguous",), "results": ("contiguous",)}
    if memory == "named":
        layouts = draw(st.lists(st.sampled_from(GROUP_LAYOUTS), min_size=3, max_size=3))
        apart = GROUP_LAYOUTS[:-1] if min(prod(positions), drawn.channels) > 1 else ("contiguous",)
        results = draw(st.lists(st.sampled_from(apart), min_size=2, max_size=2))
        return {"samples": drawn, "layouts": tuple(layouts), "results": tuple(results)}
    # No results are given, because their layout would have to follow from the drawn strides of x.
    return {"samples": drawn, "given": ()} | draw(_layouts(0, len(drawn.shape), 0))


@st.composite
def _own_rows(draw: Any, case: Case) -> Case:
    """Draw along which leading axes parameters, and a gate on the branch, have rows of their own.

    In each of at most three runs of axes, all axes of a parameter are alike. As strides do, groups
    count as one run.
    """
    leading = len(case["shape"]) + case["axis"]
    first = draw(st.integers(0, leading))
    second = draw(st.integers(first, leading)) if case["groups"] == 1 else leading
    lengths, found = (first, second - first, leading - second), {}
    for name in ("weight", "bias", "gate"):
        flags = "".join(draw(st.sampled_from("01")) * length for length in lengths)
        own = draw(st.sampled_from([None, flags, flags, flags.lstrip("0")]))
        scalar = draw(st.sampled_from(["", " scalar"]))
        if name != "gate":
            found["weight_own" if name == "weight" else "bias_own"] = own
        elif case["gate"] and case["gate_position"] == "branch":
            found["gate_own"] = own if own is None else own + scalar
    return found


@st.composite
def _own_samples(draw: Any, case: Case) -> Case:
    own = st.sampled_from([None, "0", "1", "1"])
    return {"weight_own": draw(own), "bias_own": draw(own)}


@st.composite
def _layouts(draw: Any, leading: int, axes: int, most: int) -> Case:
    inputs = draw(st.lists(views(leading, axes), min_size=4, max_size=4))
    results = draw(st.lists(result_views(leading, axes, most), min_size=2, max_size=2))
    return {"layouts": tuple(inputs), "results": tuple(results)}
