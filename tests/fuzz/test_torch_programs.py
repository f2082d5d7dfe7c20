# SPDX-License-Identifier: MIT
"""Networks of norms under PyTorch's transforms have the results and gradients of formulas.

A program has norms of `tests.fuzz.torch_drawn.NORMS` and runs in one of `WAYS`. `WRAPS` change its
forward, `DYS` its incoming gradients, and `FORMS` the memory of its leaves. Tests check that all of
these are drawn. `pytest -m exhaustive` draws 3,072 programs; CUNORM_FUZZ_SEED selects others.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from tests.fuzz.torch_checks import Failed, check, compare, run, simplified  # noqa: E402
from tests.fuzz.torch_drawn import FEW, NORMS, draw  # noqa: E402
from tests.fuzz.torch_programs import FORMS, JOINS, Program, Step  # noqa: E402
from tests.fuzz.torch_ways import WAYS  # noqa: E402
from tests.fuzz.torch_wraps import DYS, WRAPS  # noqa: E402

SEED = int(os.environ.get("CUNORM_FUZZ_SEED", "0"))
PARTS = 8  # of the exhaustive test, for as many processes
PROGRAMS = 384  # in a part


def drawn_in(program):
    """Return counts of a program's features."""
    steps = program.steps
    made = [step.made if step.made != "function" else step.function for step in steps]
    joins = [step.join for step in steps]
    return Counter([program.way, *program.wraps, f"dy {program.dy}", *made, *joins]) + Counter(
        [program.dtype, *(f"view {form}" for _, form in program.forms)]
    )


def check_programs(seeds, *, few):
    """Check programs; return counts of what was drawn and of what was compared."""
    drawn, found = Counter(), Counter()
    for number in seeds:
        program = draw(number, few=few)
        drawn += drawn_in(program)
        found += run(program)
    assert found["others that would not pass"] > 0.85 * found["others of the shape"], found
    assert found["compared"] > 15 * found["unclear"], found
    assert found["compared"] > 1.5 * len(seeds), found
    assert found["refused by PyTorch itself"] < 0.03 * len(seeds), found
    return drawn, found


def missing(drawn, norms, wraps):
    """Return the features that no program had."""
    names = [*WAYS, *wraps, *norms, *JOINS, *(f"dy {dy}" for dy in DYS)]
    return {*names, *(f"view {form}" for form in FORMS)} - {*drawn}


def test_programs_have_the_results_of_formulas():
    drawn, _ = check_programs(range(3 * len(WAYS)), few=True)
    assert not missing(drawn, FEW, [wrap for wrap in WRAPS if wrap != "autocast"])


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
    drawn, _ = check_programs(range(first, first + PROGRAMS), few=False)
    assert not missing(drawn, NORMS, WRAPS)
    assert all(drawn[dtype] > 10 for dtype in ("float16", "bfloat16", "float32", "float64")), drawn


STEP = Step("rms_norm", "function", (("weight", "w1"),))


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


def test_a_failing_program_is_simplified_and_printed_as_a_script(monkeypatch):
    import cunorm.torch as ct

    good = ct.rms_norm
    monkeypatch.setattr(ct, "rms_norm", lambda x, *rest, **more: good(x, *rest, **more) * 1.01)
    program = Program(0, (Step("l2_norm"), STEP), wraps=("no_grad",), frozen=("w1",))
    simple, _ = simplified(program, Failed("y0 is off by"))
    assert simple == replace(program, steps=(replace(STEP, operands=()),), wraps=(), frozen=())
    with pytest.raises(AssertionError, match="As a script") as caught:
        run(program)
    script = str(caught.value).split("repository:\n")[1].split("\nIt was drawn")[0]
    with pytest.raises(Failed, match="y0 is off by"):
        exec(script, {})


def test_only_refusals_of_the_documentation_pass(monkeypatch):
    import cunorm.torch as ct

    def refuse(*arguments, **options):
        raise ValueError("rms_norm: not today")

    monkeypatch.setattr(ct, "rms_norm", refuse)
    with pytest.raises(Failed, match="not today"):
        check(Program(0, (STEP,)))
