# SPDX-License-Identifier: MIT
"""Without any one of its barriers and guards, and with another formula, a kernel fails.

Each mutant is run where the kernel itself meets what it lacks, by blocks that walk three rows and
more, or have some of the samples. In some order it must give a wrong answer, a store that is not to
a result, an error of the software GPU, or a race.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager
from itertools import product
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from tests import softgpu
from tests.emulation.calls import CALLS, Call
from tests.emulation.formulas import CLUSTERS, COPIES, FORMULAS, LARGE_CLUSTERS
from tests.emulation.machine import machine, needs_softgpu
from tests.emulation.mutants import NONE, NOTING, Formulas, Switch, switched
from tests.emulation.plans import FEATURES, GROUP_PLANS
from tests.support.internals import Launch, _cuda, source_text

pytestmark = needs_softgpu

# What a GPU does, and how else threads and copies may take turns.
ORDERS = (
    {},
    {"races": True},
    {"copies": "early"},
    *({"schedule": schedule} for schedule in ("reverse", "serial", "random")),
)


class Setting(NamedTuple):
    """A call in which a kernel's mutants are run, near zero and far from it, on what GPU."""

    kernel: str
    case: dict[str, Any]
    formulas: Formulas = MappingProxyType({})
    features: str = ""
    grid: int | None = None
    of: str = ""  # the call, where the kernel is not the call's own

    def machine(self, text: str) -> AbstractContextManager[list[Launch]]:
        return machine(self.features, self.grid, {self.kernel: text}, multiprocessors=1)

    def calls(self) -> list[Call]:
        make = CALLS[self.of or self.kernel]
        return [make(self.case | {"far": far}) for far in (False, True)[: 1 + bool(self.formulas)]]


EVERY = {"center": True, "c": 1.0, "weight_offset": 1.0, "gate": "float32"}
FORWARD = EVERY | {"x": "bfloat16", "y": "float32", "stream": "+ float32"}
BACKWARD = EVERY | {"d_residual": "float32", "dx": "bfloat16", "dgate": "float32"}
UNGATED = {"center": True, "stream": "+ float32", "d_residual": "float32"}
POST = {"shape": (3, 5, 13, 33), "gate_position": "post", "round_before_weight": True, "groups": 3}
PRE = {"shape": (3, 5, 13, 33), "gate_position": "pre", "groups": 3}
# What a case has beside every operand or but for the gate, wrong formulas, features, and the most
# blocks of a launch.
ROWS = {
    "post": (EVERY, POST, {}, "", 6),
    "pre": (EVERY, PRE, {}, "", 6),
    "block": (EVERY, {"shape": (2, 3, 2, 3100)}, {}, "", 2),
    "streamed": (EVERY, {"shape": (1, 1, 3, 16500)}, {}, "", 1),
    "cluster": (UNGATED, {"shape": (1, 1, 3, 8196), "groups": 3}, CLUSTERS, "clusters", 12),
    "large cluster": (UNGATED, {"shape": (1, 1, 3, 32772)}, LARGE_CLUSTERS, "clusters", 8),
}
# The most blocks of a group norm's launch, so that it has some of the samples.
CHUNKS = {"last, three launches": {"forward": 6, "backward": 10}}


def settings() -> Iterator[tuple[str, Setting]]:
    """Yield every setting, and its name."""
    for direction, every in (("forward", FORWARD), ("backward", BACKWARD)):
        kernel = f"row_norm_{direction}"
        for name, (operands, case, formulas, *told) in ROWS.items():
            formulas = formulas or FORMULAS.get((kernel, name), {})
            yield (
                name,
                Setting(kernel, (every if operands is EVERY else UNGATED) | case, formulas, *told),
            )
        for name, (samples, _) in GROUP_PLANS.items():
            kernel, case = (
                f"group_norm_{direction}",
                {"samples": samples._replace(samples=3), "eps": 0.5},
            )
            formulas, grid = FORMULAS.get((kernel, name), {}), CHUNKS.get(name, {}).get(direction)
            if samples.spatial:
                yield name, Setting(kernel, case, formulas, grid=grid)
    for name, shape in (
        ("copies of warps", (2, 3, 70, 100)),
        ("copies of blocks", (2, 3, 5, 1028)),
    ):
        case = BACKWARD | {"shape": shape, "gate_position": "pre"}
        yield name, Setting("row_norm_backward", case, COPIES, FEATURES)
    case, formulas = BACKWARD | POST, FORMULAS["param_grad", "accumulated"]
    accumulated = case | {"accumulate": "float32"}
    yield "accumulated", Setting("param_grad", accumulated, formulas, of="row_norm_backward")


SETTINGS = {(setting.kernel, name): setting for name, setting in settings()}
KERNELS = dict.fromkeys(kernel for kernel, _ in SETTINGS)
# Settings that are exhaustive; together, the others meet every mutant.
LONG = {
    ("row_norm_backward", "large cluster"),
    ("group_norm_forward", "last, three launches, tiles of channels"),
    ("group_norm_backward", "last, three launches, tiles of channels"),
    ("group_norm_backward", "first, three launches, in warps"),
}

# Mutants that no run can tell from the kernel, by setting; and why.
_LOOP = "every pass over a streamed row and its sums is a loop over columns before the end"
_WHOLE = "a tile's threads are those of its channels, which there are"
_NONE_LEFT = "a tile's channels times the threads of each are the block's threads"
_HAS_CHANNELS = (
    "has_channels: __device__ bool has_channels() const "
    "{ return inside(channel, extent.channels); }"
)
_LIVE = "for_each_item: const bool live = inside(column, end);"
_LOAD_EACH = "load_each: if (inside(column, end)) {"
_WITH_STRIP = (
    "with_strip: with_channel(inside(thread, B::channel_threads) ? tile.first_channel + thread"
)
EQUIVALENT: dict[Any, dict[str, str]] = {
    ("group_norm_forward", "last, three launches, tiles of channels"): {
        _LOAD_EACH: "what it reads of groups that there are not is in the workspace, and not used"
    },
    "streamed": dict.fromkeys(
        (_LIVE, "load_pack: if (inside(column, end)) {", "store: if (inside(column, end)) {"), _LOOP
    ),
    "accumulated": {_LIVE: "nothing it adds needs clearing"},
    "last, one launch": dict.fromkeys((_LOAD_EACH, _HAS_CHANNELS), _WHOLE),
    "last, one launch, linear": dict.fromkeys((_LOAD_EACH, _HAS_CHANNELS), _WHOLE),
    "last, one launch, groups together": dict.fromkeys((_LOAD_EACH, _HAS_CHANNELS), _WHOLE),
    "last, three launches": {_LOAD_EACH: _WHOLE},
    "first, one launch, in warps": dict.fromkeys((_HAS_CHANNELS, _WITH_STRIP), _NONE_LEFT),
    "first, three launches, in a warp": {_WITH_STRIP: _NONE_LEFT},
    "first, three launches, in warps": {
        _WITH_STRIP: _NONE_LEFT,
        _HAS_CHANNELS: "a tile is of one channel, which there is",
    },
}
# Barriers and guards of what no run of a kernel meets; and why.
_ROWS_ALONE = {
    "has_row: return inside(row, rows);": "group norms have no rows",
    "cluster_all_reduce: cluster_barrier();": "nor clusters",
    "end: if constexpr (blocks > 1) cluster_barrier();": "nor clusters",
}
_OF_GROUPS = {_LOAD_EACH: "only group norms load by the channel"}
UNUSED = {
    **dict.fromkeys(("row_norm_forward", "row_norm_backward", "param_grad"), _OF_GROUPS),
    **dict.fromkeys(("group_norm_forward", "group_norm_backward"), _ROWS_ALONE),
}


def equivalent(kernel: str, name: str) -> set[str]:
    return set(EQUIVALENT.get((kernel, name)) or EQUIVALENT.get(name, ()))


# What the software GPU says of a kernel that it stops: in which, and where.
_OF_A_KERNEL = re.compile(r"\bkernel \w+[,:].*\n.*PTX line \d+: ")


def is_seen(calls: list[Call], switch: Switch, number: int, orders: tuple) -> bool:
    """Whether some of the orders shows that a mutant is not the kernel."""
    for order, call in product(orders, calls):
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


def outcome(setting: Setting, known: Collection[str]) -> tuple[set[str], set[str]]:
    """Return the mutants that no run tells from the kernel, which passes, and those not met.

    Of those that are known to be equivalent, one order is tried.
    """
    text, names = switched(source_text(setting.kernel), setting.formulas)
    with setting.machine(text) as launches:
        calls = setting.calls()
        calls[0].check()
        builds = {launch.build for launch in launches if launch.build.kernel == setting.kernel}
        switch = Switch([_cuda._loaded.get((build, 0)) for build in builds])
        for order in ORDERS:
            with switch.at(NONE if order else NOTING), softgpu.settings(**order):
                calls[-1].check()
        met = switch.met()
        left = set()
        for number in met:
            orders = ORDERS[:1] if names[number] in known else ORDERS
            if not is_seen(calls, switch, number, orders):
                left.add(names[number])
    return left, {name for number, name in enumerate(names) if number not in met}


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_mutant_fails_but_those_that_are_listed(kernel):
    unused = []
    for (of, name), setting in SETTINGS.items():
        if of == kernel and (of, name) not in LONG:
            left, not_met = outcome(setting, equivalent(kernel, name))
            assert left == equivalent(kernel, name), name
            unused.append(not_met)
    assert set.intersection(*unused) == set(UNUSED[kernel])


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kernel", "name"), sorted(LONG))
def test_every_mutant_fails_in_more_plans(kernel, name):
    left, _ = outcome(SETTINGS[kernel, name], equivalent(kernel, name))
    assert left == equivalent(kernel, name)


SOURCE = """
// Of a comment with inside(a, b) and __syncthreads(); there are no mutants.
__device__ inline bool inside(int index, int count) { return index < count; }
extern "C" __global__ void kernel(int* t, int n) {
  if (inside(f(n), (n))) t[0] = 1;  // if inside(...)
  cluster_barrier();
}
"""
CHANGES = {
    "t[0] = 1;": "{ if (without(1)) { t[0] = 2; } else { { if (without(0)) { ; } else "
    "{ t[0] = 1; } } } }",
    "cluster_barrier();": "{ if (!without(2)) cluster_barrier(); }",
    "inside(f(n), (n))": "(without(3) || inside(f(n), (n)))",
}


def test_a_text_is_all_mutants():
    text, names = switched(SOURCE, {"t[0] = 1;": (";", "t[0] = 2;")})
    for part, change in CHANGES.items():
        assert text.count(change) == 1
        text = text.replace(change, part)
    assert text.endswith(SOURCE[1:])
    guard = "kernel: if (inside(f(n), (n))) t[0] = 1;  // if inside(...)"
    formulas = ["t[0] = 1; -> ;", "t[0] = 1; -> t[0] = 2;"]
    assert names == [*formulas, "kernel: cluster_barrier();", guard]
