# SPDX-License-Identifier: MIT
"""The bytes that the row norms move by an H200's plans, beside those that they must.

As a table, from the root of the source tree: PYTHONPATH=.:tests python -m emulation.traffic
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from cunorm._features import NONE, Features
from tests.support.operands import DTYPES

from .arrays import Operands, saved
from .kernels import Emulated, emulate_backward, emulate_forward
from .plans import Plan, family

WIDTHS = (1000, 4096, 16384, 65536)
WITH_CLUSTERS, WIDTHS_OF_CLUSTERS = Features(clusters=True), (32768, 65536)
# Arguments of cunorm.normalize.
NORMS: dict[str, dict[str, Any]] = {
    "rms_norm": {},
    "layer_norm": {"center": True},
}
GATED_NORMS: dict[str, dict[str, Any]] = {
    "rms_norm * gate": {"gate_position": "post"},
    "layer_norm(x * gate)": {"gate_position": "pre", "center": True},
}
GROUPED_NORMS: dict[str, dict[str, Any]] = {
    "rms_norm of groups": {"groups": 3},
    "rms_norm of groups * gate": {"groups": 3, "gate_position": "post"},
}
# The arrays with rows of each operator, each of which must be moved once.
OPERANDS = {
    "forward": ("x", "y"),
    "forward + residual": ("x", "residual", "y", "new_residual"),
    "forward + gate": ("x", "gate", "y"),
    "forward + residual + gate": ("x", "residual", "gate", "y", "new_residual"),
    "backward": ("dy", "x", "dx"),
    "backward + d_residual": ("dy", "x", "d_residual", "dx"),
    "backward + gate": ("dy", "x", "gate", "dx", "dgate"),
    "backward + d_residual + gate": ("dy", "x", "d_residual", "gate", "dx", "dgate"),
}
# Their dtypes. The last of either direction: a stream of float32 in a network of bfloat16.
CALLS = {
    **{
        f"{name} {dtype}": dict.fromkeys(operands, dtype)
        for name, operands in OPERANDS.items()
        for dtype in ("bfloat16", "float32")
    },
    "forward + residual mixed": {
        "x": "bfloat16",
        "residual": "float32",
        "y": "bfloat16",
        "new_residual": "float32",
    },
    "backward + d_residual mixed": {
        "dy": "bfloat16",
        "x": "float32",
        "d_residual": "float32",
        "dx": "bfloat16",
        "dresidual": "float32",
    },
}


class Traffic(NamedTuple):
    """What one call moved.

    Attributes
    ----------
    rows, rows_limit : int
        Bytes of the arrays with rows, each access counted; and what they must be. If rows are
        streamed, what the row's sums are over is read again for the results: of a forward what is
        normalised (the new residual stream, or x) and a gate before the norm; of a backward dy, x
        and gate.
    others : dict of str to int
        Bytes of the other arrays, counted once: parameters, statistics and partial sums.
    """

    norm: str
    call: str
    width: int  # of a group
    family: str
    rows: int
    rows_limit: int
    others: dict[str, int]


def calls() -> Iterator[tuple[str, str, int]]:
    """Yield norms, calls of them and widths.

    Every norm has all calls that are not gated, and all widths. Of gated ones each call has each
    width once: before the norm and after it take turns. Groups are of one width alone.
    """
    for (call, dtypes), width in product(CALLS.items(), WIDTHS):
        if "gate" not in dtypes:
            yield from ((norm, call, width) for norm in NORMS)
            continue
        turn = WIDTHS.index(width) + list(CALLS).index(call)
        yield list(GATED_NORMS)[turn % len(GATED_NORMS)], call, width
    for norm, options in GROUPED_NORMS.items():
        for call, dtypes in CALLS.items():
            if ("gate" in dtypes) == ("gate_position" in options) and "residual" not in call:
                yield norm, call, WIDTHS[0]


def calls_in_clusters() -> Iterator[tuple[str, str, int]]:
    """Yield each call once, to be run where clusters are used: norms and widths take turns."""
    for turn, (call, dtypes) in enumerate(CALLS.items()):
        norms = list(GATED_NORMS if "gate" in dtypes else NORMS)
        yield norms[turn % 2], call, WIDTHS_OF_CLUSTERS[turn // 2 % 2]


def traffic(norm: str, call: str, width: int, features: Features = NONE) -> Traffic:
    """Run a call by a plan that may use these features, and count."""
    dtypes, options = CALLS[call], (NORMS | GATED_NORMS | GROUPED_NORMS)[norm]
    make = Operands((1, 1, max(2, 16_000 // width), width * options.get("groups", 1)))
    run = _forward if "y" in dtypes else _backward
    ran = run(make, dtypes, options, Plan(features=features))
    moved = next(iter(ran.moved.values()))
    sizes = {name: DTYPES[dtype].itemsize for name, dtype in dtypes.items()}
    must = sum(sizes.values())
    if family(ran.launch) == "streamed":
        must += sum(sizes[name] for name in _read_again(dtypes, options))
    others: dict[str, int] = {}
    for result in ran.moved.values():
        for name, count in result.distinct.items():
            if name not in dtypes and count:
                others[name] = others.get(name, 0) + count
    return Traffic(
        *(norm, call, width, family(ran.launch)),
        rows=sum(moved.bytes[name] for name in dtypes),
        rows_limit=must * int(np.prod(make.shape)),
        others=others,
    )


def _read_again(dtypes: dict[str, str], options: dict[str, Any]) -> set[str]:
    if "dy" in dtypes:
        return {"dy", "x", "gate"} & dtypes.keys()
    stream = "new_residual" if "residual" in dtypes else "x"
    return {stream, "gate"} if options.get("gate_position") == "pre" else {stream}


def _forward(
    make: Operands, dtypes: dict[str, str], options: dict[str, Any], plan: Plan
) -> Emulated:
    rows = {name: make.rows(dtypes[name]) for name in ("residual", "gate") if name in dtypes}
    x, weight = make.rows(dtypes["x"]), make.param(dtypes["x"])
    bias = make.param(dtypes["x"]) if "center" in options else None
    return emulate_forward(x, weight, bias, **rows, **options, plan=plan)


def _backward(
    make: Operands, dtypes: dict[str, str], options: dict[str, Any], plan: Plan
) -> Emulated:
    rows = {name: make.rows(dtypes[name]) for name in ("d_residual", "gate") if name in dtypes}
    dy, x, weight = make.rows(dtypes["dy"]), make.rows(dtypes["x"]), make.param(dtypes["dy"])
    bias = make.param(dtypes["dy"]) if "center" in options else None
    statistics = saved(x, gate=rows.get("gate"), **options)
    return emulate_backward(
        dy, x, weight, bias, x_dtype=dtypes["dx"], **rows, **options, **statistics, plan=plan
    )


def table() -> Iterator[str]:
    """Yield a line for every call, norm and width."""
    yield f"{'norm':27}{'call':37}{'width':>5}  {'team':12}{'moved / must':14}others, distinct KB"
    every = [(*one, NONE) for one in calls()]
    every += [(*one, WITH_CLUSTERS) for one in calls_in_clusters()]
    for norm, call, width, features in every:
        t = traffic(norm, call, width, features)
        others = ", ".join(f"{name} {count / 1e3:.1f}" for name, count in t.others.items())
        share = f"{t.rows / t.rows_limit:.4f}"
        yield f"{norm:27}{call:37}{width:5}  {t.family:12}{share:14}{others}"


if __name__ == "__main__":
    for line in table():
        print(line)
