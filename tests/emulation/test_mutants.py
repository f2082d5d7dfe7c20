# SPDX-License-Identifier: MIT
"""Without any one of its barriers and guards, a kernel fails.

Each mutant is run with every kind of team, in blocks that walk three rows and more, in three orders
of blocks, warps and lanes, with every operand, by two norms: with center and without, a gate before
the norm and after it, one of groups of columns. In one of these runs it must give a wrong answer or
an EmulationError. Where a mutant compiles to the kernel's own code, its build does not have what is
mutated, and the mutant is not run.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest
from bounds import check_backward, check_forward

from cunorm._plan import Team

from .arrays import EPS, FAMILIES, Operands, saved
from .build import compile_kernel, compile_scheduler
from .emulator import ORDERS, EmulationError, unavailable
from .kernels import Emulated, emulate_backward, emulate_forward
from .mutants import Mutant, mutants
from .plans import Plan, emulated_source, team_of

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable())

# Widths by kind of team. The streamed rows are of two: wider and narrower than the threads reach
# with a pack each.
KINDS = {
    "warp teams": (FAMILIES["warp teams"],),
    "block team": (FAMILIES["block team"],),
    "streamed": (FAMILIES["streamed"], (300, FAMILIES["streamed"][1])),
}
# Mutants that no run can tell from the kernel, by kind of team and by name; and why.
_IN_THE_LOOP = "every pass over a streamed row and its sums is a loop over columns before the end"
EQUIVALENT = {
    "row_norm_forward": {},
    "row_norm_backward": {
        ("streamed", "load_pack: if (inside(column, end)) {"): _IN_THE_LOOP,
        ("streamed", "store: if (inside(column, end)) {"): _IN_THE_LOOP,
        ("streamed", "for_each_item: const bool live = inside(column, end);"): _IN_THE_LOOP,
    },
    "param_grad": {},
}
# Mutants of what no build of a kernel has; and why.
_OF_GROUPS = {"load_each: if (inside(column, end)) {": "only group norms load by the channel"}
UNUSED = {
    "row_norm_forward": _OF_GROUPS,
    "row_norm_backward": _OF_GROUPS,
    "param_grad": {
        **_OF_GROUPS,
        "for_each_item: const bool live = inside(column, end);": "nothing it adds needs clearing",
    },
}


# Arguments of cunorm.normalize.
NORMS: dict[str, dict[str, Any]] = {
    "of groups * gate": {"groups": 2, "gate_position": "post"},
    "centred, of x * gate": {"center": True, "gate_position": "pre"},
}


def run_forward(make: Operands, norm: dict[str, Any], plan: Plan) -> Emulated:
    """Run a forward with every operand, and hold it to the oracle."""
    x, residual, gate = (make.rows("float32") for _ in range(3))
    weight, bias = make.param("float32"), make.param("float32")
    options = {"residual": residual, "gate": gate, "eps": EPS, **norm}
    ran = emulate_forward(x, weight, bias, **options, plan=plan)
    check_forward(ran.result, x, weight, bias, **options)
    return ran


def run_backward(make: Operands, norm: dict[str, Any], plan: Plan) -> Emulated:
    """Run a backward with every operand, and hold it to the oracle."""
    dy, x, d_residual, gate = (make.rows("float32") for _ in range(4))
    weight, bias = make.param("float32"), make.param("float32")
    options = {"d_residual": d_residual, "gate": gate, **norm}
    out = {name: dy.copy() for name in ("dx", "dresidual", "dgate")}
    if "center" in norm:
        out |= {name: np.zeros(make.shape[-1:], "float32") for name in ("dweight", "dbias")}
    ran = emulate_backward(
        *(dy, x, weight, bias),
        **options,
        **saved(x, gate=gate, **norm),
        accumulate="dweight" in out,
        out=out,
        plan=plan,
    )
    check_backward(ran.result, dy, x, weight, bias, **options, eps=EPS)
    return ran


KERNELS = {
    "row_norm_forward": (run_forward, KINDS, 2),
    "row_norm_backward": (run_backward, KINDS, 2),
    # Its plan is always the same one; 50 blocks leave three partial sums and more to each thread.
    "param_grad": (run_backward, {"warp teams": KINDS["warp teams"]}, 50),
}


class Setting(NamedTuple):
    """How a kernel is run."""

    kernel: str
    width: int  # of a group
    team: Team | None
    norm: dict[str, Any]

    def run(self, **plan) -> Emulated:
        """Run in blocks that walk four times over their teams' rows, some of them three."""
        run_call, _, grid = KERNELS[self.kernel]
        width = self.width * self.norm.get("groups", 1)
        alone = run_call(Operands((1, 1, 1, width)), self.norm, Plan(team=self.team))
        teams = grid * team_of(alone.launch).rows_per_block
        make = Operands((1, 1, 4 * teams - teams // 2 - 1, width))
        return run_call(make, self.norm, Plan(team=self.team, grid=grid, **plan))


def settings(kernel: str, kind: str) -> Iterator[Setting]:
    """Yield how a kernel is run by a kind of team."""
    for (width, team), norm in product(KERNELS[kernel][1][kind], NORMS.values()):
        yield Setting(kernel, width, team, norm)


def outcome(kernel: str, kind: str, mutant: Mutant) -> str:
    """Return whether the mutant is "killed", has "survived" or is "unused"."""
    result = "unused"
    for setting in settings(kernel, kind):
        macros = setting.run().launches[kernel].build.macros
        texts = (emulated_source(kernel), mutant.text)
        builds = [compile_kernel(text, kernel, macros, compile_scheduler()) for text in texts]
        if builds[0].read_bytes() == builds[1].read_bytes():
            continue
        result = "survived"
        for order in ORDERS:
            try:
                setting.run(order=order, sources={kernel: mutant.text})
            except (AssertionError, EmulationError):
                return "killed"
    return result


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_mutant_fails_but_those_that_are_listed(kernel):
    survivors, nowhere = [], []
    for mutant in mutants(emulated_source(kernel)):
        outcomes = {kind: outcome(kernel, kind, mutant) for kind in KERNELS[kernel][1]}
        survivors += [(kind, mutant.name) for kind in outcomes if outcomes[kind] == "survived"]
        nowhere += [mutant.name] if set(outcomes.values()) == {"unused"} else []
    assert sorted(survivors) == sorted(EQUIVALENT[kernel])
    assert sorted(nowhere) == sorted(UNUSED[kernel])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_kernel_itself_passes_where_its_mutants_must_fail(kernel, order):
    for kind in KERNELS[kernel][1]:
        for setting in settings(kernel, kind):
            setting.run(order=order)


SOURCE = """
// Of a comment with inside(a, b) and __syncthreads(); there are no mutants.
__device__ inline bool inside(int index, int count) { return index < count; }
template <class T>
__device__ inline int look(const T* t, int i,
                           int n) {
  return inside(f(i), (n)) && inside(i, n) ? t[i] : 0;  // if inside(...)
}
extern "C" __global__ void kernel(const Arguments a) {
  __syncwarp(0xffffffffu); __syncthreads();
}
"""


def test_mutants_lack_one_barrier_or_guard_each():
    found = list(mutants(SOURCE))
    line = "return inside(f(i), (n)) && inside(i, n) ? t[i] : 0;  // if inside(...)"
    barriers = "__syncwarp(0xffffffffu); __syncthreads();"
    names = [f"kernel: {barriers}"] * 2 + [f"look: {line}"] * 2
    assert [mutant.name for mutant in found] == names
    changes = [
        (barriers, "; __syncthreads();"),
        (barriers, "__syncwarp(0xffffffffu); ;"),
        ("inside(f(i), (n)) &&", "true &&"),
        ("&& inside(i, n)", "&& true"),
    ]
    for mutant, (before, after) in zip(found, changes, strict=True):
        assert mutant.text == SOURCE.replace(before, after)
