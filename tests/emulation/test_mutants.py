# SPDX-License-Identifier: MIT
"""Without any one of its barriers and guards, a kernel fails.

Each mutant is run with every kind of team, in blocks, or clusters of them, that walk three rows and
more, in three orders of blocks, warps and lanes, with every operand, by two norms: with center and
without, a gate before the norm and after it, one of groups of columns. In one of these runs it must
give a wrong answer or an EmulationError. A mutant is run where the kernel itself meets what it
lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest

from cunorm._builds import Build
from tests.support.bounds import check_backward, check_forward

from .arrays import EPS, FAMILIES, Operands, saved
from .emulator import ORDERS, EmulationError, Order, compile_emulated, unavailable
from .kernels import Emulated, emulate_backward, emulate_forward
from .mutants import Switch, switched
from .plans import Plan, emulated_source, team_of

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable())

# Widths by kind of team. The streamed rows are of two: wider and narrower than the threads reach
# with a pack each.
KINDS = {
    "warp teams": (FAMILIES["warp teams"],),
    "block team": (FAMILIES["block team"],),
    "cluster": (FAMILIES["cluster"],),
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
    "param_grad": {
        (
            "warp teams",
            "for_each_item: const bool live = inside(column, end);",
        ): "nothing it adds needs clearing",
    },
}
# Mutants of what no run of a kernel meets; and why.
_OF_GROUPS = {"load_each: if (inside(column, end)) {": "only group norms load by the channel"}
_OF_COPIES = dict.fromkeys(
    (
        "take: async_wait<1>();",
        "copy: if (!inside(column, end)) continue;",
        "take: if (inside(team.column(i), end))",
        "copy_row: const index_t end = inside(row_of_group, arguments.rows) ? row_width(arguments) "
        ": 0;",
    ),
    "no run here copies rows ahead; test_async_copies.py has these",
)
UNUSED = {
    "row_norm_forward": _OF_GROUPS,
    "row_norm_backward": _OF_GROUPS | _OF_COPIES,
    "param_grad": _OF_GROUPS,
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
    """How the text that is all mutants of a kernel is run, and as which build."""

    run_call: Callable[..., Emulated]
    make: Operands
    norm: dict[str, Any]
    plan: Plan
    build: Build

    def run(self, order: Order) -> Emulated:
        return self.run_call(self.make, self.norm, replace(self.plan, order=order))

    def fails(self) -> bool:
        """Whether one of the orders shows a wrong answer or an EmulationError."""
        for order in ORDERS:
            try:
                self.run(order)
            except (AssertionError, EmulationError):
                return True
        return False


def settings(kernel: str, kind: str) -> Iterator[Setting]:
    """Yield how a kernel is run: its blocks walk four times over their rows, some of them three."""
    run_call, kinds, grid = KERNELS[kernel]
    for (width, team), norm in product(kinds[kind], NORMS.values()):
        columns = width * norm.get("groups", 1)
        plan = Plan(team=team, sources={kernel: text_and_names(kernel)[0]})
        alone = run_call(Operands((1, 1, 1, columns)), norm, plan)
        teams = grid * team_of(alone.launch).rows_per_block
        make = Operands((1, 1, 4 * teams - teams // 2 - 1, columns))
        build = alone.launches[kernel].build
        yield Setting(run_call, make, norm, replace(plan, grid=grid), build)


@cache
def text_and_names(kernel: str) -> tuple[str, list[str]]:
    """Return the text that is all mutants of a kernel, and their names."""
    return switched(emulated_source(kernel))


def outcomes(kernel: str, kind: str) -> list[str]:
    """Return whether each mutant is "killed", has "survived" or is "unused"."""
    text, names = text_and_names(kernel)
    result = ["unused" for _ in names]
    for setting in settings(kernel, kind):
        switch = Switch([compile_emulated(text, kernel, setting.build.macros)._library])
        setting.run("forward")
        for number, known in enumerate(result):
            if known != "killed" and switch.reached(number):
                with switch.at(number):
                    result[number] = "killed" if setting.fails() else "survived"
    return result


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_mutant_fails_but_those_that_are_listed(kernel):
    _, names = text_and_names(kernel)
    survivors, unused = [], set(range(len(names)))
    for kind in KERNELS[kernel][1]:
        found = outcomes(kernel, kind)
        survivors += [(kind, names[n]) for n, is_ in enumerate(found) if is_ == "survived"]
        unused &= {n for n, is_ in enumerate(found) if is_ == "unused"}
    assert sorted(survivors) == sorted(EQUIVALENT[kernel])
    assert sorted(names[n] for n in unused) == sorted(UNUSED[kernel])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_kernel_itself_passes_where_its_mutants_must_fail(kernel, order):
    for kind in KERNELS[kernel][1]:
        for setting in settings(kernel, kind):
            setting.run(order)


SOURCE = """
// Of a comment with inside(a, b) and __syncthreads(); there are no mutants.
__device__ inline bool inside(int index, int count) { return index < count; }
__device__ inline void cluster_barrier() { emulation_cluster_barrier(); }
template <class T>
__device__ inline int look(const T* t, int i,
                           int n) {
  return inside(f(i), (n)) && inside(i, n) ? t[i] : 0;  // if inside(...)
}
extern "C" __global__ void kernel(const Arguments a) {
  __syncwarp(0xffffffffu); __syncthreads();
  if (n > 0) cluster_barrier(); async_wait<(n > 1) ? 1 : 0>();
}
"""


def test_mutants_lack_one_barrier_or_guard_each():
    text, names = switched(SOURCE)
    guards = ["inside(f(i), (n))", "inside(i, n)"]
    barriers = ["__syncwarp(0xffffffffu);", "__syncthreads();"]
    barriers += ["cluster_barrier();", "async_wait<(n > 1) ? 1 : 0>();"]
    lines = ["__syncwarp(0xffffffffu); __syncthreads();"] * 2
    lines += ["if (n > 0) cluster_barrier(); async_wait<(n > 1) ? 1 : 0>();"] * 2
    looks = "look: return inside(f(i), (n)) && inside(i, n) ? t[i] : 0;  // if inside(...)"
    assert names == [*(f"kernel: {line}" for line in lines), looks, looks]
    changes = [f"{{ if (!without({n})) {barrier} }}" for n, barrier in enumerate(barriers)]
    changes += [f"(without({n}) || {guard})" for n, guard in enumerate(guards, len(barriers))]
    _, rest = text.split("\n\n", 1)
    for change, part in zip(changes, barriers + guards, strict=True):
        assert rest.count(change) == 1
        rest = rest.replace(change, part)
    assert rest == SOURCE[1:]
