# SPDX-License-Identifier: MIT
"""How the row-norm kernels are launched under emulation: as on a GPU, but for what a test changes.

Plan(grid=2, order="reverse") for two blocks of each group of columns, the last first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from cunorm._builds import Build, Launch
from cunorm._calls import Backward, Forward
from cunorm._features import NONE, Features
from cunorm._plan import ASYNC_COPIES, copies_rows, sums_pitch
from cunorm._sources import source_text
from cunorm._teams import Team

from .build import INCLUDE
from .emulator import EmulationResult, Order, compile_emulated
from .memory import Memory

H200_SM_COUNT = 132
SM_75_SM_COUNT = 40  # a T4's


@dataclass(frozen=True)
class Plan:
    """How a call's arrays lie in memory, and how its kernels are launched.

    Attributes
    ----------
    at, offset
        Where arrays lie, see `Memory`.
    order, seed
        In which order blocks, warps and lanes run.
    sm_count : int
        Multiprocessors of the GPU.
    features : Features
        What the GPU's plan may use.
    grid : int or None
        Blocks, or clusters, of the row norm for each group of columns, in place of the GPU's own
        number of them.
    team : Team or None
        How threads share the rows, in place of the GPU's own way.
    sources : mapping of str to str
        The texts of kernels, in place of the real ones.
    """

    at: Literal["end", "start"] = "end"
    offset: int | None = None
    order: Order = "forward"
    seed: int = 0
    sm_count: int = H200_SM_COUNT
    features: Features = NONE
    grid: int | None = None
    team: Team | None = None
    sources: Mapping[str, str] = field(default_factory=dict)

    def adapted(self, launch: Launch, call: Forward | Backward) -> Launch:
        """Return the launch with what is to be different."""
        walk, team = call.form.where.walk, self.team
        if team is not None:
            macros = call.form.types.macros()
            macros += team.macros(walk.width, walk.groups, min(call.access(), team.pack))
            parts = -(-walk.rows // team.rows_per_block)
            launch = Launch(
                Build(launch.build.kernel, macros),
                parts * walk.groups * team.cluster,
                team.threads,
                parts,
                sums_pitch(team, walk),
            )
        if self.grid is not None:
            blocks = self.grid * walk.groups * launch.build.cluster
            launch = replace(launch, grid=blocks, parts=self.grid)
        return self._with_copies(launch, call)

    def _with_copies(self, launch: Launch, call: Forward | Backward) -> Launch:
        """Return the launch with asynchronous copies where a plan of its own would have them."""
        if not isinstance(call, Backward):
            return launch
        rows, access = call.form.where.walk.rows, call.access()
        macros = tuple(macro for macro in launch.build.macros if macro not in ASYNC_COPIES)
        if self.features.async_copies and copies_rows(
            call.form.types, rows, team_of(launch), access, launch.parts
        ):
            macros += ASYNC_COPIES
        return replace(launch, build=Build(launch.build.kernel, macros))

    def run(
        self, launch: Launch, arguments: bytes, memory: Memory, names: set[str]
    ) -> EmulationResult:
        """Run a kernel, which may access the arrays of these names."""
        name, macros = launch.build.kernel, launch.build.macros
        kernel = compile_emulated(self.sources.get(name) or emulated_source(name), name, macros)
        return kernel.run(
            launch.grid,
            launch.block,
            arguments,
            cluster=launch.build.cluster,
            order=self.order,
            seed=self.seed,
            ranges=memory.ranges(names),
        )


USUAL = Plan()


def emulated_source(kernel: str) -> str:
    """Return the text of a kernel with every access to global memory checked and counted."""
    return source_text(kernel, (INCLUDE,))


def team_of(launch: Launch) -> Team:
    """Return how threads share the rows in a launch of a row norm."""
    macros = dict(launch.build.macros)
    return Team(*(int(macros[name.upper()]) for name in Team._fields))


def family(launch: Launch) -> str:
    """Return what kind of team that is."""
    team = team_of(launch)
    if team.packs == 0:
        return "streamed"
    if team.cluster > 1:
        return "cluster"
    return "warp teams" if team.threads_per_row <= 32 else "block team"
