# SPDX-License-Identifier: MIT
"""Programs of norms under JAX's transformations agree with plain formulas in float64.

Networks of 1 to 4 norms, their operands, the operands by which they are differentiated, and nested
transformations are drawn. `pytest -m exhaustive tests/fuzz` draws 3,200 programs; CUNORM_FUZZ_SEED
selects others. Several runs of a program follow each other in one process, because JAX may reuse
the traces of one run in the next run. A failing program is printed as a script.
"""

from __future__ import annotations

import os

import pytest

pytest.importorskip("jax", reason="JAX is not installed")

from tests.fuzz.jax_examples import in_process
from tests.fuzz.jax_programs import DERIVATIVES, LOOPS, OPS, REFUSED, SHARDED, WRAPS

SEED = int(os.environ.get("CUNORM_FUZZ_SEED", "0"))
PARTS, PROGRAMS = 16, 200  # of the exhaustive test: processes, and programs of each
KINDS = (
    *OPS,
    *DERIVATIVES,
    *SHARDED,
    *REFUSED,
    *(f"loop {loop}" for loop in LOOPS),
    *(f"{wrap} of a step" for wrap in WRAPS),
    *(f"{wrap} of all" for wrap in WRAPS),
    *(f"dtype {dtype}" for dtype in ("float16", "bfloat16", "float32", "float64")),
    *("operand weight", "operand bias", "operand gate", "x as gate", "x of another dtype"),
    *("residual stream", "residual h", "results y", "results stream", "stream of another dtype"),
    *("shared operands", "stacked operands", "sliced operands", "frozen operands"),
    *("threads", "constants", "jit of the derivative", "streams that are results"),
)


def test_programs_agree_with_formulas_in_float64():
    counts = in_process(0, (38, 43, 93, 118, 201, 303, 382, 430, 443, 622, 626))
    assert counts["gradients"] > 60
    assert counts["refusals"]
    assert not [kind for kind in KINDS if not counts.get(kind)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(PARTS))
def test_3_200_programs_agree_with_formulas_in_float64(part):
    """Only the first part runs kernels, because each program compiles some."""
    first = 100 + part * PROGRAMS
    counts = in_process(SEED, range(first, first + PROGRAMS), compiler=part == 0)
    print(counts)
    assert counts["programs"] > 0.9 * PROGRAMS, "too many programs are left out"
    missing = [kind for kind in KINDS if not counts.get(kind)]
    assert len(missing) < 3, "too many features are rare"
