# SPDX-License-Identifier: MIT
"""Programs of norms under JAX's transformations agree with plain formulas in float64.

Networks of 1 to 4 norms, their operands, the operands by which they are differentiated, and nested
transformations are drawn. `pytest -m exhaustive tests/fuzz` draws 3,200 programs; CUNORM_FUZZ_SEED
selects others. Several runs of a program follow each other in one process, because JAX may reuse
the traces of one run in the next run. A failing program is printed as a script.
"""

from __future__ import annotations

import json
import os

import pytest

pytest.importorskip("jax", reason="JAX is not installed")

from tests.fuzz.jax_programs import DERIVATIVES, FORWARD, LOOPS, OPS, SECOND, SHARDED, WRAPS
from tests.support.processes import in_process
from tests.support.real_gpu import XLA_FLAGS

SEED = int(os.environ.get("CUNORM_FUZZ_SEED", "0"))
PARTS, PROGRAMS = 16, 200  # of the exhaustive test: processes, and programs of each
FLAGS = f"--xla_force_host_platform_device_count=4 {XLA_FLAGS}"
KINDS = (
    *(*OPS, *DERIVATIVES, *SHARDED, *FORWARD, *SECOND, *(f"loop {loop}" for loop in LOOPS)),
    *(f"{wrap} of {part}" for wrap in WRAPS for part in ("a step", "all")),
    *(f"dtype {dtype}" for dtype in ("float16", "bfloat16", "float32", "float64")),
    *("operand weight", "operand bias", "operand gate", "x as gate", "x of another dtype"),
    *("parameters of each row", "gate of the branch"),
    *("residual stream", "residual h", "results y", "results stream", "stream of another dtype"),
    *("shared operands", "stacked operands", "sliced operands", "frozen operands"),
    *("threads", "constants", "jit of the derivative", "streams that are results"),
)
WITHOUT_COMPILER = {"PATH": "", "CXX": "no-such-compiler"}  # then NumPy's reference runs


def counted(seed, numbers, environment):
    """Check programs in a separate process; return counts, and the features that were missing."""
    script = f"""import json
from tests.fuzz.jax_examples import check_all
print(json.dumps(check_all({seed}, {numbers!r})))
"""
    more = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": FLAGS, **environment}
    counts = json.loads(in_process(script, setup="", timeout=7200, **more).splitlines()[-1])
    return counts, [kind for kind in KINDS if not counts.get(kind)]


def test_programs_agree_with_formulas_in_float64():
    numbers = (166, 436, 662, 722, 806, 979, 1042, 1049, 1099, 1153, 1224)
    counts, missing = counted(0, numbers, WITHOUT_COMPILER)
    assert counts["derivatives"] > 60
    assert not missing


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(PARTS))
def test_3_200_programs_agree_with_formulas_in_float64(part):
    """Only the first part runs kernels, because each program compiles some."""
    first = 100 + part * PROGRAMS
    numbers = range(first, first + PROGRAMS)
    counts, missing = counted(SEED, numbers, WITHOUT_COMPILER if part else {})
    print(counts)
    assert counts["programs"] > 0.9 * PROGRAMS, "too many programs are left out"
    assert len(missing) < 3, "too many features are rare"
