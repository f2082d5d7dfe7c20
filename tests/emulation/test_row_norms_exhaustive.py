# SPDX-License-Identifier: MIT
"""Every combination of operands' dtypes at some width, every set of operands at every width, and
every formula: the products that the cover of `test_row_norms` samples.

Each group of cases runs in a process of its own, with a cache of its own: together they are more
libraries than one process can load, and than anyone wants to keep.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from os import environ
from tempfile import TemporaryDirectory

import pytest

from tests.support.covers import Case, everything
from tests.support.operands import WIDTHS

from .covered import (
    ACTIVATIONS,
    BACKWARD,
    DTYPES,
    FORWARD,
    NORM,
    OPTIONAL,
    check_backward_case,
    check_forward_case,
)
from .emulator import unavailable

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(bool(unavailable()), reason=unavailable()),
]

# Where dx and dresidual are asked for, and of which dtype; None: x's.
OUTPUTS = (("", None), ("dx", None), ("dresidual", None), *product(["dx dresidual"], DTYPES))
# Widths of rows that clusters share, odd ones too.
OF_CLUSTERS = (8193, 16384, 20001, 32768, 65536, 100003, 131072, 262144)
NO_GATE = {"gate": (None,), "gate_activation": (None,), "gate_position": (None,)}


def forward_types(x: str, stream: str | None) -> Iterator[Case]:
    """Yield all combinations of the other dtypes, for these of x and the residual stream."""
    factors = {name: FORWARD[name] for name in ("weight", "bias", "y", "center")}
    for case in everything(factors):
        yield {"x": x, "stream": stream, **case}


def backward_types(dy: str, x: str, outputs: str, dx: str | None) -> Iterator[Case]:
    """Yield all combinations of the other dtypes, for these of dy, x and the outputs."""
    factors = {
        "d_residual": OPTIONAL if outputs else (None,),
        "weight": OPTIONAL,
        "needs": (("weight", "bias"), ("weight",), ("bias",), ()),
        "center": (False, True),
    }
    for case in everything(factors):
        if "weight" in case["needs"] and case["weight"] is None:
            continue  # as without
        if outputs or case["needs"]:
            yield {"dy": dy, "x": x, "outputs": outputs, "dx": dx, **case}


def formulas(activation: str, position: str) -> Iterator[Case]:
    """Yield all norms with this gate, with and without each other operand; one set of dtypes."""
    factors = {name: NORM[name] for name in ("center", "groups", "round_before_weight")}
    factors |= {"weight": (None, "float32"), "weight_offset": (0.0, 1.0)}
    factors |= {"bias": (None, "float32"), "residual": (False, True)}
    gate = {"gate": "bfloat16", "gate_activation": activation, "gate_position": position}
    for case in everything(factors):
        if case["weight"] is not None or case["weight_offset"] == 0.0:
            yield case | gate


def forward_formulas(activation: str, position: str) -> Iterator[Case]:
    """Yield those of a forward: of bfloat16, or a stream of float32."""
    for case in formulas(activation, position):
        yield {"x": "bfloat16", "stream": "+ float32" if case["residual"] else None, **case}


def backward_formulas(activation: str, position: str) -> Iterator[Case]:
    """Yield those of a backward, for each set of gradients that there are beside dx."""
    for case, needs in product(formulas(activation, position), BACKWARD["needs"]):
        if all(case[name] for name in needs):
            stream = "float32" if case["residual"] else None
            x, dx = (stream or "bfloat16"), stream and "bfloat16"
            yield {"x": x, "dx": dx, "d_residual": stream, "needs": needs, **case}


def forward_gates(x: str, gate: str) -> Iterator[Case]:
    """Yield all combinations of the dtypes of the other arrays with rows."""
    factors = {name: FORWARD[name] for name in ("stream", "y", "gate_position", "center")}
    for case in everything(factors):
        yield {"x": x, "gate": gate, **case}


def backward_gates(x: str, gate: str) -> Iterator[Case]:
    """Yield all combinations of the dtypes of dy and dgate, with and without dx and dresidual."""
    factors = {name: BACKWARD[name] for name in ("dy", "outputs", "gate_position", "center")}
    for case in everything(factors | {"dgate": DTYPES}):
        yield {"x": x, "gate": gate, **case}


def arranged(cases: Iterator[Case], seed: object, factors: dict) -> Iterator[Case]:
    """Draw for each case what it does not say of the operands, of memory and of the launch."""
    draw = random.Random(repr(seed))
    for case in cases:
        yield {name: draw.choice(c) for name, c in factors.items()} | case


def run_in_a_process(check, cases: list[Case]) -> None:
    """Check all cases and report those that fail."""
    assert cases
    with (
        TemporaryDirectory() as folder,
        ProcessPoolExecutor(1, get_context("spawn"), _use_cache, (folder,)) as pool,
    ):
        failures = pool.submit(_failures, check, cases).result()
    assert not failures, f"{len(failures)} of {len(cases)} fail, such as\n" + failures[0]


def _use_cache(folder: str) -> None:
    environ["CUNORM_EMULATION_CACHE"] = folder


def _failures(check, cases: list[Case]) -> list[str]:
    failures = []
    for case in cases:
        try:
            check(case)
        except (AssertionError, RuntimeError) as error:
            failures.append(f"{case}\n{error}")
    return failures


@pytest.mark.parametrize("stream", FORWARD["stream"])
@pytest.mark.parametrize("x", DTYPES)
def test_forward_is_right_for_every_combination_of_dtypes(x, stream):
    cases = arranged(forward_types(x, stream), (x, stream), FORWARD | NO_GATE)
    run_in_a_process(check_forward_case, list(cases))


@pytest.mark.parametrize(("outputs", "dx"), OUTPUTS)
@pytest.mark.parametrize("x", DTYPES)
@pytest.mark.parametrize("dy", DTYPES)
def test_backward_is_right_for_every_combination_of_dtypes(dy, x, outputs, dx):
    others = BACKWARD | NO_GATE | {"bias": DTYPES}
    cases = arranged(backward_types(dy, x, outputs, dx), (dy, x, outputs, dx), others)
    run_in_a_process(check_backward_case, list(cases))


@pytest.mark.parametrize(
    ("width", "features"),
    [
        *((width, FORWARD["features"]) for width in WIDTHS),
        *((w, ("clusters",)) for w in OF_CLUSTERS),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_set_of_operands_is_right_at_every_width(dtype, width, features):
    one = {"width": (width,), "center": (False, True), "gate": (None, dtype)}
    told = {"features": features}
    optional = dict.fromkeys(("weight", "bias"), (None, dtype))
    forward = everything(
        {"x": (dtype,), "y": (dtype,), "stream": (None, f"+ {dtype}"), **optional, **one}
    )
    run_in_a_process(check_forward_case, list(arranged(forward, width, FORWARD | told)))
    backward = (
        case
        for case in everything(
            {
                **{"dy": (dtype,), "x": (dtype,), "dx": (None,), "d_residual": (None, dtype)},
                **{"outputs": ("dx", "dresidual", "dx dresidual"), "dgate": (None,)},
                **{"needs": (("weight", "bias", "gate"), ())},
                **optional,
                **one,
            }
        )
        if case["gate"] is None or case["outputs"] == "dx"
    )
    run_in_a_process(check_backward_case, list(arranged(backward, width, BACKWARD | told)))


@pytest.mark.parametrize("position", NORM["gate_position"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_forward_is_right_for_every_formula(activation, position):
    cases = forward_formulas(activation, position)
    others = FORWARD | {"y": ("float32",)}
    run_in_a_process(check_forward_case, list(arranged(cases, (activation, position), others)))


@pytest.mark.parametrize("position", NORM["gate_position"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_backward_is_right_for_every_formula(activation, position):
    cases = backward_formulas(activation, position)
    others = BACKWARD | {"dy": ("float32",), "dgate": ("float32",)}
    run_in_a_process(check_backward_case, list(arranged(cases, (activation, position), others)))


@pytest.mark.parametrize("gate", DTYPES)
@pytest.mark.parametrize("x", DTYPES)
def test_forward_is_right_for_every_dtype_of_a_gate(x, gate):
    cases = arranged(forward_gates(x, gate), (x, gate), FORWARD)
    run_in_a_process(check_forward_case, list(cases))


@pytest.mark.parametrize("gate", DTYPES)
@pytest.mark.parametrize("x", DTYPES)
def test_backward_is_right_for_every_dtype_of_a_gate(x, gate):
    others = BACKWARD | {"needs": [needs for needs in BACKWARD["needs"] if "gate" in needs]}
    cases = arranged(backward_gates(x, gate), (x, gate), others)
    run_in_a_process(check_backward_case, list(cases))
