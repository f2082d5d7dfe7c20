# SPDX-License-Identifier: MIT
"""Pairwise covers of operands, their dtypes, and options."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

from tests.support.covers import Case, pairwise
from tests.support.machines import machines
from tests.support.operands import DTYPES
from tests.support.placed import GROUP_LAYOUTS, ROW_LAYOUTS

NARROW = (None, "float32", "bfloat16")
ACTIVATIONS = ("silu", "gelu", "tanh", "relu", "sigmoid", "gelu_tanh", "identity")
_OF_NORM = {
    **{"center": (False, True), "c": (None, 1.0), "groups": (1, 3), "weight_offset": (0.0, 1.0)},
    **{"round_before_weight": (False, True), "gate_position": ("pre", "post")},
    **{"gate": (None, "float32", "bfloat16", "float16"), "gate_activation": ACTIVATIONS[:3]},
    **{"weight": NARROW, "bias": NARROW},
}
_OF_GROUPS = {"weight": NARROW, "bias": NARROW, "activation": (None, "silu", "gelu", "relu")}
FACTORS: dict[str, dict[str, Any]] = {
    "row_norm_forward": {
        **{"x": tuple(DTYPES), "y": NARROW, "in_place": (None, "x", "all")},
        "stream": (None, "+ float32", "as bfloat16", "+ bfloat16 as float32"),
        **_OF_NORM,
    },
    "row_norm_backward": {
        **{"x": tuple(DTYPES), "dy": (*NARROW[1:], "float16"), "d_residual": NARROW, "dx": NARROW},
        "needs": (("x", "weight", "bias", "gate"), ("x", "gate"), ("weight", "bias"), ("weight",)),
        **{"dgate": (None, "float32"), "accumulate": (None, "float32", "float64")},
        **{"in_place": (None, "dy"), **_OF_NORM},
    },
    "group_norm_forward": {
        **{"x": tuple(DTYPES), "y": NARROW, "in_place": (None, "x"), **_OF_GROUPS},
    },
    "group_norm_backward": {
        **{"x": tuple(DTYPES), "dy": NARROW[1:], "dx": NARROW, "in_place": (None, "dy", "x")},
        **{"needs": (("x", "weight", "bias"), ("x",), ("weight", "bias"), ("bias",))},
        **{"accumulate": (None, "float32", "float64"), **_OF_GROUPS},
    },
}


def cover(kernel: str, fixed: Mapping[str, Any], seed: int | None = None) -> list[Case]:
    """Return a cover of all pairs of choices; `fixed` replaces choices, a seed adds choices."""
    factors = choices_of(kernel, fixed, is_seeded=seed is not None)
    if seed is not None:
        factors = dict(random.Random(seed).sample(list(factors.items()), len(factors)))
    return [_legal(case) for case in pairwise(factors, relevant)]


def choices_of(kernel: str, fixed: Mapping[str, Any], *, is_seeded: bool) -> dict[str, Any]:
    """Return the choices of each factor; a seeded cover has more choices."""
    factors = {**FACTORS[kernel], **fixed}
    if not is_seeded:
        return factors
    activations = {"gate_activation": ACTIVATIONS, "activation": (None, *ACTIVATIONS[:-1])}
    more = dict.fromkeys(("weight", "bias", "gate", "d_residual", "dx", "y"), (None, *DTYPES))
    more |= activations | {"dy": tuple(DTYPES)}
    return {name: more.get(name, choices) for name, choices in factors.items()}


def _legal(case: Case) -> Case:
    """Return a valid case: a result written over an array has that array's dtype.

    If none of the operands in `needs` is present, add x to `needs`, so that there is a result.
    """
    more, needs = {}, case.get("needs", ("x",))
    if not any(name == "x" or case.get(name) for name in needs):
        more["needs"] = ("x", *needs)
    if case["in_place"] == "dy":
        more |= {"dx": case["dy"], "dgate": None}
    elif case["in_place"]:
        more |= {"dx": None, "y": None}
    return case | {name: choice for name, choice in more.items() if name in case}


def relevant(case: Case) -> Case:
    """Return the choices of a case, or of part of a case, that have an effect."""
    idle: set[str] = set()
    if not case.get("gate", True):
        idle |= {"gate_activation", "gate_position", "dgate", "form"}
    idle |= set() if case.get("weight", True) else {"weight_offset"}
    idle |= set() if not case.get("in_place") else {"y", "dx", "dgate"}
    needs = case.get("needs", ("x", "gate", "weight"))
    idle |= set() if "x" in needs else {"dx", "d_residual", "in_place"}
    idle |= set() if "gate" in needs else {"dgate"}
    idle |= set() if {"weight", "bias"} & set(needs) else {"accumulate"}
    return {name: choice for name, choice in case.items() if name not in idle}


def arranged(kernel: str, draw: random.Random, case: Case) -> Case:
    """Add the layout of arrays in memory, and whether their numbers are far from zero."""
    layouts = GROUP_LAYOUTS if "group" in kernel else ROW_LAYOUTS
    # In place, no two elements of an array may share memory.
    first = "contiguous" if case["in_place"] else draw.choice(["contiguous", *range(len(layouts))])
    arrangement = {"layouts": first, "offset": draw.choice([0, 0, 1, 2, 4])}
    # Far from zero, the rounding of the mean may move a number across the corner of relu.
    far = draw.choice([False, True]) and case.get("activation") != "relu"
    return case | arrangement | {"far": far}


# --- builds ---------------------------------------------------------------------------------------

LAYOUTS = {"channels_last": (True, False), "channel_axis": (-1, 1)}
# Factors that do not change a build have few choices here. `builds` chooses the activations.
_FIXED = {"in_place": (None,), "accumulate": (None, "float64")}
_OF_ROWS = _FIXED | {"c": (None,), "groups": (1,), "gate": NARROW, "gate_activation": ("silu",)}
_OF_GROUPS_BUILT = _FIXED | {"activation": (None, "silu"), "channels_last": (True, False)}


def builds(kernel: str, seed: int | None = None, **more: Any) -> Iterator[Case]:
    """Yield a cover of the factors that change a build; activations rotate from case to case."""
    fixed = _OF_GROUPS_BUILT if "group" in kernel else _OF_ROWS
    if "backward" in kernel and seed is None:  # no operand but dy may be float16
        fixed = fixed | {"x": ("bfloat16", "float32", "float64")}
    fixed = fixed | more
    fixed = {
        name: choices for name, choices in fixed.items() if name in FACTORS[kernel] | LAYOUTS | more
    }
    for number, case in enumerate(cover(kernel, fixed, seed)):
        for name in {"gate_activation", "activation"} & case.keys():
            case[name] = case[name] and ACTIVATIONS[number % len(ACTIVATIONS)]
        yield case


# --- all sets of gradients, on all instruction sets -----------------------------------------------


def subsets(*names: str) -> tuple[tuple[str, ...], ...]:
    """Return all subsets except the empty subset."""
    sizes = range(1, len(names) + 1)
    return tuple(found for size in sizes for found in combinations(names, size))


NEEDS = {
    "row_norm_backward": subsets("x", "weight", "bias", "gate"),
    "group_norm_backward": subsets("x", "weight", "bias"),
}
# A gate's position and `center`. With `needs` they decide what the passes over a row compute.
_FORMS = {
    "row_norm_forward": (("pre", True), ("pre", False), ("post", True)),
    "row_norm_backward": (("post", False), ("pre", False), ("post", True)),
}


def machine_builds(kernel: str, seed: int | None = None) -> list[Case]:
    """Cover the factors that change a build, all machines and, for a backward, all `needs`.

    Without a seed, a gate's position and `center` are one factor.
    """
    more: dict[str, Any] = {"machine": machines()}
    if kernel in NEEDS:
        more["needs"] = NEEDS[kernel]
    if kernel in _FORMS and seed is None:
        more |= {"gate_position": ("post",), "center": (False,), "form": _FORMS[kernel]}
        more["gate"] = ("float32", "bfloat16", None)
    found = []
    for case in builds(kernel, seed, **more):
        if "form" in case:
            case["gate_position"], case["center"] = case.pop("form")
        found.append(case)
    return found
