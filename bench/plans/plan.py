# SPDX-License-Identifier: MIT
"""A launch, planned without a GPU: its build, and the layout of its arguments."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from bench.plans.model import Traffic
from cunorm._core.build import KernelBuild, Launch
from cunorm._core.dtypes import ALL_DTYPES, DType
from cunorm._core.tensor import WIDEST_ACCESS
from cunorm._row_norm.jvp_kernel import JvpTypes
from cunorm._row_norm.kernels import BackwardTypes, ForwardTypes

STREAMED, SEVERAL_ROWS, ONE_ROW = "streamed", "several rows a block", "one row a block"
COPIED_AHEAD = " copied ahead"  # suffix: rows are copied to shared memory
ONE_LAUNCH, TWO_LAUNCHES = "one launch", "two launches"
PARAM_GRAD, ANY_SHAPE = "param_grad", "any"
_PASSES = ("find", "combine", "write")
_TYPES = {dtype.cuda: dtype for dtype in ALL_DTYPES.values()}

# In the order of `struct Arguments`: the names of arrays as large as x, the distance of their
# pointers (the sizes and strides of rows or lines follow each), and how many pointers come after.
_LAYOUTS = {
    "row_norm_forward": (ForwardTypes.lines(), 6 * 8, 4),
    "row_norm_backward": (tuple(n for n in BackwardTypes.lines() if n != "branch"), 6 * 8, 6),
    "group_norm_forward": (("x", "y"), 3 * 8, 5),
    "group_norm_backward": (("dy", "x", "dx"), 3 * 8, 7),
    "row_norm_jvp": (JvpTypes.lines(), 6 * 8, 6),
    "group_norm_jvp": (("x", "x_tangent", "y_tangent"), 3 * 8, 7),
    "param_grad": ((), 8, 4),
}
# Builds with one of these macros have another struct before it: its size, its pointers, and which
# of them are those of arrays as large as x.
_BASES = {
    "SEGMENT_AXES": (26 * 8, (7 * 8, 13 * 8, 19 * 8, 25 * 8), {"branch": 19 * 8}),
    "Q_T": (15 * 8, (0, 6 * 8), {"q": 0}),
}
_NO_BASE: tuple[int, tuple[int, ...], dict[str, int]] = (0, (), {})
_WRITTEN = ("q", "y", "residual_out", "dx", "dresidual", "dgate", "y_tangent")


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
    def row_width(self) -> int:
        """The elements of a row of a row norm."""
        return self.number("WIDTH")

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
        (names, step), (first, _, of_base) = self._layout, self._base
        slots = of_base | {name: first + index * step for index, name in enumerate(names)}
        if self.macros.get("WRITES_Y") == "false":  # its type is there all the same
            del slots["y"]
        types = {name: _TYPES.get(self.macros[f"{name.upper()}_T"]) for name in slots}
        return {slot: (name, dtype) for name, slot in slots.items() if (dtype := types[name])}

    @property
    def _base(self) -> tuple[int, tuple[int, ...], dict[str, int]]:
        """What `_BASES` has for the build."""
        return next((base for macro, base in _BASES.items() if macro in self.macros), _NO_BASE)

    @property
    def _layout(self) -> tuple[tuple[str, ...], int]:
        """The names of arrays as large as x, and the distance of their pointers."""
        names, step, _ = _LAYOUTS[self.build.kernel]
        return names, step + 8 * self.is_strided  # and the step from column to column

    @property
    def is_strided(self) -> bool:
        """Whether rows lie side by side: then a block's threads share its rows."""
        return "STRIDED_ROWS" in self.macros

    @property
    def pack_rows(self) -> int:
        """The rows of a thread."""
        return self.number("PACK") if self.is_strided else 1

    @property
    def pointers(self) -> frozenset[int]:
        """The offsets of all pointers in the arguments."""
        (names, step), others = self._layout, _LAYOUTS[self.build.kernel][2]
        first, of_base, _ = self._base
        parameters = sorted(self.parameters)
        rest = max(parameters) + (parameters[1] - parameters[0])
        rests = range(rest, rest + 8 * (others - 2), 8)
        of_arrays = range(first, first + len(names) * step, step)
        return frozenset((*of_base, *of_arrays, *parameters, *rests))

    @property
    def parameters(self) -> frozenset[int]:
        """The offsets of weight and bias, the first pointers after those of large arrays."""
        names, step = self._layout
        first = self._base[0] + len(names) * step
        apart = 6 * 8 if "PARAMETER_AXES" in self.macros else 8
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
