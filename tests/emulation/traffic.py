# SPDX-License-Identifier: MIT
"""The bytes that the row norms move by an H200's plans, beside those that they must.

As a table, from the root of the source tree: PYTHONPATH=.:tests python -m emulation.traffic
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import numpy as np
from operands import DTYPES

from .arrays import Operands, saved
from .kernels import Emulated, emulate_backward, emulate_forward, family

WIDTHS = (1000, 4096, 16384, 65536)
NORMS = {"rms_norm": False, "layer_norm": True}  # and whether they center
FORWARD, FORWARD_RESIDUAL = ("x", "y"), ("x", "residual", "y", "new_residual")
BACKWARD, BACKWARD_RESIDUAL = ("dy", "x", "dx"), ("dy", "x", "d_residual", "dx")
# The arrays with rows of each operator, each of which must be moved once, and their dtypes. The
# last of either direction: a stream of float32 in a network of bfloat16.
CALLS = {
    **{
        f"{name} {dtype}": dict.fromkeys(operands, dtype)
        for name, operands in {
            "forward": FORWARD,
            "forward + residual": FORWARD_RESIDUAL,
            "backward": BACKWARD,
            "backward + d_residual": BACKWARD_RESIDUAL,
        }.items()
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
        Bytes of the arrays with rows, each access counted; and what they must be, with one more
        reading of what the row's sums are over, if rows are streamed.
    others : dict of str to int
        Bytes of the other arrays, counted once: parameters, statistics and partial sums.
    """

    norm: str
    call: str
    width: int
    family: str
    rows: int
    rows_limit: int
    others: dict[str, int]


def traffic(norm: str, call: str, width: int) -> Traffic:
    """Run a call and count."""
    dtypes, center = CALLS[call], NORMS[norm]
    make = Operands((1, 1, max(3, 20_000 // width), width))
    run = _forward if "y" in dtypes else _backward
    ran = run(make, dtypes, center)
    moved = next(iter(ran.moved.values()))
    sizes = {name: DTYPES[dtype].itemsize for name, dtype in dtypes.items()}
    again = {"x", "dy"} if "dy" in dtypes else {"new_residual" if "residual" in dtypes else "x"}
    must = sum(sizes.values())
    if family(ran.launch) == "streamed":
        must += sum(sizes[name] for name in again)
    others: dict[str, int] = {}
    for result in ran.moved.values():
        for name, count in result.distinct.items():
            if name not in dtypes:
                others[name] = others.get(name, 0) + count
    return Traffic(
        *(norm, call, width, family(ran.launch)),
        rows=sum(moved.bytes[name] for name in dtypes),
        rows_limit=must * int(np.prod(make.shape)),
        others=others,
    )


def _forward(make: Operands, dtypes: dict[str, str], center: bool) -> Emulated:
    x = make.rows(dtypes["x"])
    residual = make.rows(dtypes["residual"]) if "residual" in dtypes else None
    weight = make.param(dtypes["x"])
    bias = make.param(dtypes["x"]) if center else None
    return emulate_forward(x, weight, bias, residual=residual, center=center)


def _backward(make: Operands, dtypes: dict[str, str], center: bool) -> Emulated:
    dy, x = make.rows(dtypes["dy"]), make.rows(dtypes["x"])
    d_residual = make.rows(dtypes["d_residual"]) if "d_residual" in dtypes else None
    weight = make.param(dtypes["dy"])
    bias = make.param(dtypes["dy"]) if center else None
    options = {"d_residual": d_residual, "x_dtype": dtypes["dx"], "center": center}
    return emulate_backward(dy, x, weight, bias, **options, **saved(x, center=center))


def table() -> Iterator[str]:
    """Yield a line for every call, norm and width."""
    yield f"{'norm':12}{'call':32}{'width':>5}  {'team':12}{'moved / must':14}others, distinct KB"
    for call, norm, width in product(CALLS, NORMS, WIDTHS):
        t = traffic(norm, call, width)
        others = ", ".join(f"{name} {count / 1e3:.1f}" for name, count in t.others.items())
        share = f"{t.rows / t.rows_limit:.4f}"
        yield f"{norm:12}{call:32}{width:5}  {t.family:12}{share:14}{others}"


if __name__ == "__main__":
    for line in table():
        print(line)
