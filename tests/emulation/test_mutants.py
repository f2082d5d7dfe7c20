# SPDX-License-Identifier: MIT
"""A kernel without one of its barriers or guards fails some call.

Each mutant runs in the calls whose kernel reaches the missing part, until a call fails: until some
order of threads gives a wrong result, a store outside of the results, an error of the software GPU,
or a race. In these calls, each block of a row norm walks three or more rows.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import pytest

from tests import softgpu
from tests.emulation.machine import machine, needs_softgpu
from tests.emulation.mutants import NONE, NOTING, Switch, switched
from tests.emulation.plans import FEATURES, GROUP_PLANS
from tests.support.cases import call_of
from tests.support.internals import _cuda, source_text

pytestmark = needs_softgpu

# The usual order of threads, that order with races checked, and other orders of threads and copies.
ORDERS = (
    {},
    {"races": True},
    {"copies": "early"},
    *({"schedule": schedule} for schedule in ("reverse", "serial", "random")),
)


class Setting(NamedTuple):
    """A call that runs a kernel's mutants, the GPU's features, and the limit of blocks."""

    kernel: str
    case: dict[str, Any]
    features: str = ""
    grid: int | None = None
    spared: int = 0  # bytes of shared memory that tiles must not use
    alone: bool = True  # whether a group norm's block may have a multiprocessor to itself


EVERY = {"center": True, "c": 1.0, "weight_offset": 1.0, "gate": "float32"}
FORWARD = EVERY | {"x": "bfloat16", "y": "float32", "stream": "+ float32"}
BACKWARD = EVERY | {"d_residual": "float32", "dx": "bfloat16", "dgate": "float32"}
UNGATED = {"center": True, "stream": "+ float32", "d_residual": "float32"}
OF_WARPS = {"shape": (3, 5, 13, 33), "round_before_weight": True, "groups": 3}
ROWS = [
    (EVERY, OF_WARPS, "", 6),
    (EVERY, {"shape": (2, 3, 2, 3100)}, "", 2),
    (EVERY, {"shape": (1, 1, 3, 16500)}, "", 1),
    (UNGATED, {"shape": (1, 1, 3, 12004)}, "clusters", 8),
    (UNGATED, {"shape": (1, 1, 3, 20004)}, "clusters", 8),
]
COPIES = [(2, 3, 70, 100), (2, 3, 5, 1028)]  # shapes of rows that are copied ahead


def settings() -> list[Setting]:
    found = []
    for direction, all_operands in (("forward", FORWARD), ("backward", BACKWARD)):
        for operands, case, *rest in ROWS:
            case = (all_operands if operands is EVERY else operands) | case
            found.append(Setting(f"row_norm_{direction}", case, *rest))
        for name, plan in GROUP_PLANS.items():
            case = {"samples": plan.samples._replace(samples=3), "eps": 0.5}
            grid = 1 if "two launches" in name else None  # each launch has one sample
            if plan.samples.spatial:
                kernel = f"group_norm_{direction}"
                found.append(Setting(kernel, case, plan.features, grid, plan.spared, plan.alone))
    for shape in COPIES:
        case = BACKWARD | {"shape": shape, "gate_position": "pre"}
        found.append(Setting("row_norm_backward", case, FEATURES))
    case = BACKWARD | OF_WARPS | {"accumulate": "float32"}
    found.append(Setting("param_grad", case, "programmatic_launches"))
    return found


# Barriers and guards that no call of a kernel needs, with the reason.
_OF_COLUMNS = {
    "load_pack: return load_where<B>(inside(column, end), row + column);": "for_each_pack "
    "guards the packs of rows, and tiles have guards of their own",
    "for_each_part: f(PartAt{column, inside(column, end)});": "as above",
}
_OF_ROWS = _OF_COLUMNS | {
    "begin: cluster_begun();": "group norms sum by other functions",
    "cluster_all_reduce: if (turn == 0) wait_for_cluster();": "as above",
    "cluster_all_reduce: __syncwarp();  // the warp reads all values before it sends again": (
        "as above"
    ),
    "cluster_all_reduce: wait_for_arrivals(arrivals, turn / 2 % 2);": "as above",
    "block_all_reduce: __syncthreads();": "as above",
}
UNNEEDED = {
    "row_norm_forward": _OF_COLUMNS,
    "row_norm_backward": _OF_COLUMNS,
    "param_grad": {},
    "group_norm_forward": _OF_ROWS,
    "group_norm_backward": _OF_ROWS
    | {
        "hand_on_moments: __syncthreads();": "only the forward calls this",
        "for_each_group: __syncwarp();": "lane 0 writes the only part, and reads it",
    },
}

# The error of a kernel that the software GPU stops.
_OF_A_KERNEL = re.compile(r"\bkernel \w+[,:].*\n.*PTX line \d+: ")


def detected(setting: Setting, wanted: set[str]) -> set[str]:
    """Return the mutants among `wanted` that are reached and fail; the kernel itself must pass."""
    kernel, case, features, grid, spared, alone = setting
    text, names = switched(source_text(kernel))
    call = call_of("row_norm_backward" if kernel == "param_grad" else kernel, case)
    sources = {kernel: text}
    with machine(features, grid, sources, spared, alone=alone, multiprocessors=1) as launches:
        call.check()
        builds = {launch.build for launch in launches if launch.build.kernel == kernel}
        switch = Switch([_cuda.loaded.values.get((build, 0)) for build in builds])
        with switch.at(NOTING):
            call.check()
        left = {number for number in switch.reached() if names[number] in wanted}
        found: set[str] = set()
        for order in ORDERS:
            failed = {number for number in left if fails(call, switch, number, order)}
            if failed:
                with switch.at(NONE), softgpu.settings(**order):
                    call.check()
            found, left = found | {names[number] for number in failed}, left - failed
        return found


def fails(call: Any, switch: Switch, number: int, order: dict[str, Any]) -> bool:
    with switch.at(number), softgpu.settings(**order):
        try:
            call.check()
        except AssertionError:
            return True
        except RuntimeError as error:
            if not _OF_A_KERNEL.search(str(error)):
                raise
            return True
    return False


def left_of(kernel: str, wanted: set[str]) -> set[str]:
    """Return the wanted mutants of a kernel that no call detects."""
    for setting in settings():
        if setting.kernel == kernel:
            wanted = wanted - detected(setting, wanted)
    return wanted


@pytest.mark.parametrize("kernel", UNNEEDED)
def test_a_kernel_without_one_barrier_or_guard_fails_some_call(kernel):
    names, unneeded = set(switched(source_text(kernel))[1]), set(UNNEEDED[kernel])
    assert unneeded <= names
    assert not left_of(kernel, names - unneeded)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kernel", UNNEEDED)
def test_a_kernel_without_an_unneeded_barrier_or_guard_fails_no_call(kernel):
    """Each unneeded part is left out of every call that reaches it, in every order of threads."""
    unneeded = set(UNNEEDED[kernel])
    assert left_of(kernel, unneeded) == unneeded


SOURCE = """
// A comment with inside(a, b) and __syncthreads(); has no mutants.
__device__ inline bool inside(int index, int count) { return index < count; }
extern "C" __global__ void kernel(int* t, int n) {
  if (inside(f(n), (n))) t[0] = 1;  // if inside(...)
  wait_for_cluster();
}
"""
CHANGES = {
    "wait_for_cluster();": "{ if (!without(0)) wait_for_cluster(); }",
    "inside(f(n), (n))": "(without(1) || inside(f(n), (n)))",
}


def test_one_text_contains_all_mutants():
    text, names = switched(SOURCE)
    for part, change in CHANGES.items():
        assert text.count(change) == 1
        text = text.replace(change, part)
    assert text.endswith(SOURCE[1:])
    guard = "kernel: if (inside(f(n), (n))) t[0] = 1;  // if inside(...)"
    assert names == ["kernel: wait_for_cluster();", guard]
