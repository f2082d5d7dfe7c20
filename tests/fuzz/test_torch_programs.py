# SPDX-License-Identifier: MIT
"""Networks of norms under PyTorch's transforms have the results and gradients of formulas.

A program has norms of `tests.fuzz.torch_drawn.NORMS` and runs in one of `WAYS`. `WRAPS` change its
forward, `DYS` its incoming gradients, and `FORMS` the memory of its leaves. Tests check that all of
these are drawn. `pytest -m exhaustive` draws 3,072 programs; CUNORM_FUZZ_SEED selects others.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import cunorm.torch as ct  # noqa: E402
from tests.fuzz.torch_checks import Failed, check, compare, run  # noqa: E402
from tests.fuzz.torch_drawn import FEW, NORMS, draw  # noqa: E402
from tests.fuzz.torch_programs import FORMS, JOINS, Program, Step  # noqa: E402
from tests.fuzz.torch_ways import WAYS  # noqa: E402
from tests.fuzz.torch_wraps import DYS, WRAPS  # noqa: E402

SEED = int(os.environ.get("CUNORM_FUZZ_SEED", "0"))
PARTS = 8  # of the exhaustive test, for as many processes
PROGRAMS = 384  # in a part


def features(program):
    """Return the features of a program, some of them twice."""
    made = [step.made if step.made != "function" else step.function for step in program.steps]
    joins = [step.join for step in program.steps]
    views = [f"view {form}" for form in program.forms.values()]
    kinds = [
        f"{name} of kind {one[0]}" for step in program.steps for name, one in step.operands.items()
    ]
    gates = [f"gate {step.options.get('gate_position')}" for step in program.steps]
    made += [program.dtype, *views, *kinds, *gates]
    return [program.way, *program.wraps, f"dy {program.dy}", *made, *joins]


def check_programs(seeds, norms, wraps, *, few):
    """Check programs, which have all norms and wraps between them; return counts of features."""
    drawn, found = Counter(), Counter()
    for number in seeds:
        program = draw(number, few=few)
        drawn.update(features(program))
        found += run(program)
    assert found["others that would not pass"] > 0.85 * found["others of the shape"], found
    assert found["compared"] > 15 * found["unclear"], found
    assert found["compared"] > 1.5 * len(seeds), found
    assert found["refused by PyTorch itself"] < 0.03 * len(seeds), found
    names = {*WAYS, *wraps, *norms, *JOINS, *(f"dy {dy}" for dy in DYS)}
    names |= {f"{name} of kind {kind}" for name in ("weight", "bias") for kind in "wtsmcn"}
    names |= {"gate branch", *(f"gate of kind {kind}" for kind in ("gd" if few else "gwtsmd"))}
    assert not {*names, *(f"view {form}" for form in FORMS)} - {*drawn}
    return drawn


def test_programs_have_the_results_of_formulas():
    few = range(513, 513 + 29)  # few programs that have all features
    check_programs(few, FEW, {*WRAPS} - {"autocast"}, few=True)


@pytest.mark.parametrize("way", WAYS)
def test_each_norm_alone_has_the_results_of_its_formula(way):
    """Each way runs every second norm, and the next way runs the norms between."""
    found, number = Counter(), [*WAYS].index(way)
    norms = [*enumerate(FEW)][number % 2 :: 2]
    for turn, norm in norms[:2] if way == "compiled" else norms:  # compiling takes long
        found += run(draw(number + turn * len(WAYS), few=True, norm=norm))
    assert found["compared"] or found["empty"] or found.total() == len(norms), found


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(PARTS))
def test_3_072_programs_have_the_results_of_formulas(part):
    first = (SEED * PARTS + part + 1) * PROGRAMS
    drawn = check_programs(range(first, first + PROGRAMS), NORMS, WRAPS, few=False)
    assert all(drawn[dtype] > 10 for dtype in ("float16", "bfloat16", "float32", "float64")), drawn


STEP = Step("rms_norm", "function", {"weight": "w1"}, {})


def test_a_wrong_result_fails():
    """Wrong results are zero, those of another leaf, inexact, missing, or of another dtype."""
    right = {"d x": torch.tensor([1.0, 2.0], dtype=torch.float64), "d w1": torch.ones(2).double()}
    near = {name: one.float() for name, one in right.items()}
    assert compare(near, near, right)["compared"] == 2
    wrong = [{n: torch.zeros(2) for n in near}, dict.fromkeys(near, near["d w1"])]
    wrong += [{n: one * 1.001 for n, one in near.items()}, {"d x": near["d x"]}, right]
    for found in wrong:
        with pytest.raises(Failed):
            compare(found, near, right)


def test_a_wrong_norm_fails_and_its_program_is_printed_as_a_script(monkeypatch):
    good = ct.rms_norm
    monkeypatch.setattr(ct, "rms_norm", lambda x, *rest, **more: good(x, *rest, **more) * 1.01)
    with pytest.raises(AssertionError, match="As a script") as caught:
        run(Program(0, (Step("l2_norm", "function", {}, {}), STEP), wraps=("no_grad",)))
    with pytest.raises(Failed, match="y0 is off by"):
        exec(str(caught.value).split("repository:\n")[1], {})


def test_only_refusals_of_the_documentation_pass(monkeypatch):
    def refuse(*arguments, **options):
        raise ValueError("rms_norm: not today")

    monkeypatch.setattr(ct, "rms_norm", refuse)
    with pytest.raises(Failed, match="not today"):
        check(Program(0, (STEP,)))
