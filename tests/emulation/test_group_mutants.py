# SPDX-License-Identifier: MIT
"""Without any one of their barriers and guards, the kernels of the group norms fail.

Each mutant is run by every kind of plan that reaches what it lacks, in three orders of blocks,
warps and lanes, with every operand. In one of these runs it must give a wrong answer or an
EmulationError.
"""

from __future__ import annotations

import ctypes

import pytest

from tests.support.group_bounds import check_group_backward, check_group_forward

from .emulator import ORDERS, EmulatedKernel, EmulationError, compile_emulated, unavailable
from .group_arrays import EPS, FAMILIES, Family, Operands, saved
from .group_kernels import Emulated, GroupPlan, emulate_group_backward, emulate_group_forward
from .mutants import switched
from .plans import emulated_source

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable())

SAMPLES = 3
# Mutants that no run can tell from the kernel, by kind of plan and by name; and why.
_WHOLE_TILES = "a block that makes all passes has threads for the channels of its tile alone"
_NONE_LEFT_OVER = "a tile's channels times the threads of each are the block's threads"
_ONE_CHANNEL = "a tile is of one channel, which there is"
_LOAD_EACH = "load_each: if (inside(column, end)) {"
_HAS_CHANNELS = (
    "has_channels: __device__ bool has_channels() const "
    "{ return inside(channel, extent.channels); }"
)
_WITH_STRIP = (
    "with_strip: with_channel(inside(thread, B::channel_threads) ? tile.first_channel + thread"
)
EQUIVALENT = {
    ("last, one launch", _LOAD_EACH): _WHOLE_TILES,
    ("last, one launch", _HAS_CHANNELS): _WHOLE_TILES,
    ("last, one launch, groups together", _LOAD_EACH): _WHOLE_TILES,
    ("last, one launch, groups together", _HAS_CHANNELS): _WHOLE_TILES,
    ("first, one launch, in warps", _HAS_CHANNELS): _NONE_LEFT_OVER,
    ("first, one launch, in warps", _WITH_STRIP): _NONE_LEFT_OVER,
    ("first, three launches, in a warp", _WITH_STRIP): _NONE_LEFT_OVER,
    ("first, three launches, in warps", _WITH_STRIP): _NONE_LEFT_OVER,
    ("first, three launches, in warps", _HAS_CHANNELS): _ONE_CHANNEL,
}
# Mutants of what no plan reaches; and why.
UNUSED = {
    "has_row: return inside(row, rows);": "group norms have no rows",
    "cluster_all_reduce: cluster_barrier();": "nor clusters",
    "end: if constexpr (blocks > 1) cluster_barrier();": "nor clusters",
}


def run_forward(family: Family, plan: GroupPlan) -> Emulated:
    """Run a forward with every operand, and hold it to the oracle."""
    make = Operands(family.of(SAMPLES))
    x, *parameters = make.x("float32"), make.param("float32"), make.param("float32")
    told = {"activation": "silu", "channel_axis": family.grid.channel_axis, "eps": EPS}
    operands = (x, family.groups, *parameters)
    ran = emulate_group_forward(*operands, **told, plan=plan)
    check_group_forward(ran.result, *operands, **told)
    return ran


def run_backward(family: Family, plan: GroupPlan) -> Emulated:
    """Run a backward with every operand, and hold it to the oracle."""
    make = Operands(family.of(SAMPLES))
    dy, x, *parameters = *(make.dy("float32"), make.x("float32")), *map(make.param, ["float32"] * 2)
    told = {"activation": "silu", "channel_axis": family.grid.channel_axis}
    operands = (dy, x, family.groups, *parameters)
    statistics = saved(x, family.groups, family.grid.channel_axis)
    ran = emulate_group_backward(*operands, **told, **statistics, plan=plan)
    check_group_backward(ran.result, *operands, **told, eps=EPS)
    return ran


KERNELS = {"group_norm_forward": run_forward, "group_norm_backward": run_backward}


class Switch:
    """The mutants of a kernel in the launches of a plan; they are compiled once for them all."""

    def __init__(self, kernel: str, family: Family) -> None:
        text, self.names = switched(emulated_source(kernel))
        self._run, self._family = KERNELS[kernel], family
        self._told = {"sources": {kernel: text}, **family.plan}
        ran = self.run()
        builds = {launch.build for launch in ran.launches if launch.build.kernel == kernel}
        self._libraries = [
            _library(compile_emulated(text, kernel, build.macros)) for build in builds
        ]

    def run(self, **plan) -> Emulated:
        return self._run(self._family, GroupPlan(**self._told, **plan))

    def reached(self, number: int) -> bool:
        """Return whether a run met what the mutant lacks."""
        flags = ctypes.c_bool * 256
        return any(flags.in_dll(one, "mutant_reached")[number] for one in self._libraries)

    def outcome(self, number: int) -> str:
        """Return whether a mutant is "killed", has "survived" or is "unused"."""
        if not self.reached(number):
            return "unused"
        self._set(number)
        try:
            for order in ORDERS:
                self.run(order=order)
        except (AssertionError, EmulationError):
            return "killed"
        finally:
            self._set(-1)
        return "survived"

    def _set(self, number: int) -> None:
        for library in self._libraries:
            ctypes.c_int.in_dll(library, "mutant").value = number


def _library(kernel: EmulatedKernel) -> ctypes.CDLL:
    return kernel._library


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_mutant_fails_but_those_that_are_listed(kernel):
    survivors, used, names = [], set(), []
    for kind, family in FAMILIES.items():
        switch = Switch(kernel, family)
        names = switch.names
        outcomes = [switch.outcome(number) for number in range(len(names))]
        survivors += [(kind, names[n]) for n, is_ in enumerate(outcomes) if is_ == "survived"]
        used |= {n for n, is_ in enumerate(outcomes) if is_ != "unused"}
    assert sorted(survivors) == sorted(EQUIVALENT)
    assert [name for n, name in enumerate(names) if n not in used] == sorted(UNUSED)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_kernel_itself_passes_where_its_mutants_must_fail(kernel, order):
    for family in FAMILIES.values():
        Switch(kernel, family).run(order=order)


SOURCE = """
// Of a comment with inside(a, b) there is no mutant.
__device__ inline bool inside(int index, int count) { return index < count; }
extern "C" __global__ void kernel(const Arguments a) {
  if (inside(f(1), (2))) __syncthreads();
}
"""


def test_a_switched_text_is_all_mutants():
    text, names = switched(SOURCE)
    line = "if (inside(f(1), (2))) __syncthreads();"
    assert names == [f"kernel: {line}"] * 2
    switch, rest = text.split("\n\n", 1)
    assert "bool without(int number)" in switch
    change = "if ((without(1) || inside(f(1), (2)))) { if (!without(0)) __syncthreads(); }"
    assert rest == SOURCE[1:].replace(line, change)
