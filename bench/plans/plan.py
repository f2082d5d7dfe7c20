# SPDX-License-Identifier: MIT
"""A launch, planned without a GPU: its build, and the layout of its arguments."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from bench.plans.model import Traffic
from cunorm._core.build import KernelBuild, Launch
from cunorm._core.dtypes import DTYPES, DType
from cunorm._core.tensor import WIDEST_ACCESS
from cunorm._row_norm.kernels import BackwardTypes, ForwardTypes

STREAMED, SEVERAL_ROWS, ONE_ROW = "streamed", "several rows a block", "one row a block"
COPIED_AHEAD = " copied ahead"  # suffix: rows are copied to shared memory
ONE_LAUNCH, TWO_LAUNCHES = "one launch", "two launches"
PARAM_GRAD, ANY_SHAPE = "param_grad", "any"
_PASSES = ("find", "combine", "write")
_TYPES = {dtype.cuda: dtype for dtype in DTYPES.values()}

# In the order of `struct Arguments`: the names of arrays as large as x, the distance of their
# pointers (the sizes and strides of rows or lines follow each), and how many pointers come after.
_LAYOUTS = {
    "row_norm_forward": (ForwardTypes.lines(), 6 * 8, 4),
    "row_norm_backward": (tuple(n for n in BackwardTypes.lines() if n != "branch"), 6 * 8, 6),
    "group_norm_forward": (("x", "y"), 3 * 8, 5),
    "group_norm_backward": (("dy", "x", "dx"), 3 * 8, 7),
    "param_grad": ((), 8, 4),
}
# In a backward with segments, `struct SegmentArguments` comes first.
_SEGMENTS, _OWN_POINTERS, _BRANCH = 26 * 8, (7 * 8, 13 * 8, 25 * 8), 19 * 8
_WRITTEN = ("y", "residual_out", "dx", "dresidual", "dgate")


@dataclass(frozen=True)
class Plan:
    """A launch of a call on a GPU; the call's arrays are aligned."""

    architecture: str
    features: str  # joined by "+"; "" for the default features
    operator: str
    memory: str
    direction: str
    dtype: str
    shape: str  # a row's width, or a sample's channels, height and width
    count: str  # rows or samples of x; "" if they have `ELEMENTS` in all
    launch: Launch
    rows: int  # or samples of x
    chunk: int  # samples of one launch of a group norm
    param_grad: Launch | None  # the launch that adds up the partial sums
    before: Plan | None  # the first launch, if this is the second

    @property
    def build(self) -> KernelBuild:
        """What is compiled."""
        return self.launch.build

    @cached_property
    def macros(self) -> dict[str, str]:
        """The macros of the build."""
        return dict(self.build.macros)

    def number(self, macro: str, default: int = 1) -> int:
        """Return the number that a macro of the build has."""
        return int(self.macros.get(macro, default))

    @cached_property
    def regime(self) -> str:
        """How threads share rows or samples."""
        return regime(self.build)

    @property
    def step(self) -> str:
        """The passes of a launch, if a call has two launches."""
        if self.regime != TWO_LAUNCHES:
            return ""
        return "+".join(name for name in _PASSES if self.macros[name.upper()] == "true")

    @property
    def threads(self) -> int:
        """The threads of a block."""
        if self.regime == PARAM_GRAD:
            return self.number("COLUMN_THREADS") * self.number("PART_THREADS")
        return self.number("THREADS")

    @cached_property
    def row_operands(self) -> dict[int, tuple[str, DType]]:
        """The names and dtypes of arrays as large as x, by the offsets of their pointers."""
        names, step, _ = _LAYOUTS[self.build.kernel]
        types = [_TYPES.get(self.macros[f"{name.upper()}_T"]) for name in names]
        named = enumerate(zip(names, types, strict=True))
        found = {
            self._first + index * step: (name, dtype) for index, (name, dtype) in named if dtype
        }
        branch = _TYPES.get(self.macros.get("BRANCH_T", ""))
        return found | ({_BRANCH: ("branch", branch)} if branch else {})

    @property
    def _first(self) -> int:
        """The offset of the first array as large as x."""
        return _SEGMENTS if "SEGMENT_AXES" in self.macros else 0

    @property
    def pointers(self) -> frozenset[int]:
        """The offsets of all pointers in the arguments."""
        names, step, others = _LAYOUTS[self.build.kernel]
        end = self._first + len(names) * step
        parameters = sorted(self.parameters)
        rest = max(parameters) + (parameters[1] - parameters[0])
        of_segments = (*_OWN_POINTERS, _BRANCH) if self._first else ()
        rests = range(rest, rest + 8 * (others - 2), 8)
        return frozenset((*of_segments, *range(self._first, end, step), *parameters, *rests))

    @property
    def parameters(self) -> frozenset[int]:
        """The offsets of weight and bias, the first pointers after those of large arrays."""
        names, step, _ = _LAYOUTS[self.build.kernel]
        first, apart = (
            self._first + len(names) * step,
            6 * 8 if "PARAMETER_AXES" in self.macros else 8,
        )
        return frozenset((first, first + apart))

    @property
    def traffic(self) -> Traffic:
        """The necessary bytes of the launch for each element of x."""
        sizes = [(name in _WRITTEN, dtype.itemsize) for name, dtype in self.row_operands.values()]
        return Traffic(*(sum(size for wrote, size in sizes if wrote == one) for one in (0, 1)))

    @property
    def planned_bytes(self) -> int:
        """The bytes of the narrowest access to an array as large as x; 0 without such arrays."""
        sizes = [self.number("PACK") * dtype.itemsize for _, dtype in self.row_operands.values()]
        return min(WIDEST_ACCESS, *sizes) if sizes else 0


def regime(build: KernelBuild) -> str:
    """Return how threads share rows or samples."""
    macros = dict(build.macros)
    if build.kernel == PARAM_GRAD:
        return PARAM_GRAD
    if build.kernel.startswith("group_norm"):
        if macros["FIND"] != macros["WRITE"]:
            return TWO_LAUNCHES
        return ONE_LAUNCH if macros["CLUSTER"] == "1" else f"cluster of {macros['CLUSTER']}"
    threads, of_row = int(macros["THREADS"]), int(macros["THREADS_PER_ROW"])
    if int(macros["WIDTH"]) > of_row * int(macros["PACK"]) * int(macros["PACKS"]):
        sharing = STREAMED
    elif of_row > threads:
        sharing = f"cluster of {of_row // threads}"
    else:
        sharing = SEVERAL_ROWS if of_row < threads else ONE_ROW
    return sharing + (COPIED_AHEAD if int(macros.get("STAGES", 0)) else "")
