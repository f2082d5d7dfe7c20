# SPDX-License-Identifier: MIT
"""A launch, planned without a GPU: its build, and the layout of its arguments."""

from __future__ import annotations

from typing import NamedTuple

from bench.plans.model import Traffic
from cunorm._core.build import KernelBuild, Launch
from cunorm._core.dtypes import DTYPES, DType
from cunorm._core.tensor import WIDEST_ACCESS
from cunorm._row_norm.kernels import BackwardTypes, ForwardTypes

STREAMED, SEVERAL_ROWS, ONE_ROW = "streamed", "several rows a block", "one row a block"
COPIED_AHEAD = " copied ahead"  # suffix: rows are copied to shared memory
ONE_LAUNCH, TWO_LAUNCHES = "one launch", "two launches"
PARAM_GRAD, ANY_SHAPE = "param_grad", "any"

_TYPES = {dtype.cuda: dtype for dtype in DTYPES.values()}


class Rows(NamedTuple):
    """The arrays as large as x in a kernel's arguments, and the distance of their pointers."""

    names: tuple[str, ...]
    step: int


# In the order of `struct Arguments`: the sizes and strides of rows or lines follow each pointer.
_ROW_OPERANDS = {
    "row_norm_forward": Rows(ForwardTypes.lines(), 6 * 8),
    "row_norm_backward": Rows(BackwardTypes.lines(), 6 * 8),
    "group_norm_forward": Rows(("x", "y"), 3 * 8),
    "group_norm_backward": Rows(("dy", "x", "dx"), 3 * 8),
    "param_grad": Rows((), 0),
}
_WRITTEN = ("y", "residual_out", "dx", "dresidual", "dgate")
_PARAMETERS = 2  # weight and bias are the first of the other pointers
_OTHER_POINTERS = {
    "row_norm_forward": 4,
    "row_norm_backward": 6,
    "group_norm_forward": 5,
    "group_norm_backward": 7,
    "param_grad": 4,
}


class Plan(NamedTuple):
    """A launch of a call on a GPU; the call's arrays are aligned."""

    architecture: str
    features: str  # joined by "+"; "" for the default features
    operator: str
    memory: str
    direction: str
    dtype: str
    shape: str  # a row's width, or a sample's channels, height and width
    count: str  # rows or samples of x; "" if they have `ELEMENTS` in all
    regime: str
    step: str  # the passes of a launch, if a call has two launches
    rows: int  # of x; 0 for group norms and their param_grad
    grid: int
    shared: int  # bytes of a block's dynamic shared memory
    parts: int  # rows of partial sums that a backward writes for each parameter
    sums_pitch: int  # elements from one row of partial sums to the next
    param_grad: Launch | None  # the launch that adds up the partial sums
    build: KernelBuild
    samples: int = 0  # of a group norm's x
    chunk: int = 0  # samples of one launch
    before: Plan | None = None  # the first launch, if this is the second

    @property
    def threads(self) -> int:
        """The threads of a block."""
        if self.regime == PARAM_GRAD:
            return self.number("COLUMN_THREADS") * self.number("PART_THREADS")
        return self.number("THREADS")

    def number(self, macro: str, default: int = 1) -> int:
        """Return the number that a macro of the build has."""
        return int(dict(self.build.macros).get(macro, default))

    def row_operands(self) -> dict[int, tuple[str, DType]]:
        """Return the names and dtypes of arrays as large as x, by the offsets of their pointers."""
        names, step = _ROW_OPERANDS[self.build.kernel]
        macros = dict(self.build.macros)
        types = {name: _TYPES.get(macros[f"{name.upper()}_T"]) for name in names}
        return {
            index * step: (name, dtype)
            for index, (name, dtype) in enumerate(types.items())
            if dtype is not None
        }

    def pointers(self) -> frozenset[int]:
        """Return the offsets of all pointers in the arguments."""
        names, step = _ROW_OPERANDS[self.build.kernel]
        end = len(names) * step
        others = range(end, end + 8 * _OTHER_POINTERS[self.build.kernel], 8)
        return frozenset((*range(0, end, step or 1), *others))

    def parameters(self) -> frozenset[int]:
        """Return the offsets of weight and bias."""
        names, step = _ROW_OPERANDS[self.build.kernel]
        return frozenset(len(names) * step + 8 * index for index in range(_PARAMETERS))

    def traffic(self) -> Traffic:
        """Return the necessary bytes of the launch for each element of x."""
        operands = self.row_operands().values()
        writes = sum(dtype.itemsize for name, dtype in operands if name in _WRITTEN)
        return Traffic(sum(dtype.itemsize for _, dtype in operands) - writes, writes)

    @property
    def is_row_norm(self) -> bool:
        """Whether it is a row norm's main kernel."""
        return self.build.kernel.startswith("row_norm")

    @property
    def stages(self) -> int:
        """Rows of each team that are copied to shared memory while the team computes one."""
        return staged_rows(dict(self.build.macros))

    @property
    def rows_at_once(self) -> float:
        """The rows that all blocks of the launch walk at a time."""
        return self.grid * self.threads / self.number("THREADS_PER_ROW")

    def aligned_bytes(self, itemsize: int) -> int:
        """Return the bytes of the widest access that the alignment of rows or lines allows."""
        sizes = list(map(int, self.shape.split("x")))
        line = sizes[0] if self.memory != "NCHW" else sizes[1] * sizes[2]
        return min(WIDEST_ACCESS, (line & -line) * itemsize)

    def access_bytes(self, itemsize: int) -> int:
        """Return the planned bytes of an access to an array as large as x, from its itemsize."""
        return min(WIDEST_ACCESS, self.number("PACK") * itemsize)


def regime(build: KernelBuild) -> str:
    """Return how threads share rows or samples."""
    macros = dict(build.macros)
    if build.kernel == "param_grad":
        return PARAM_GRAD
    if build.kernel.startswith("group_norm"):
        if macros["FIND"] != macros["WRITE"]:
            return TWO_LAUNCHES
        return ONE_LAUNCH if macros["CLUSTER"] == "1" else f"cluster of {macros['CLUSTER']}"
    return _sharing(macros) + (COPIED_AHEAD if staged_rows(macros) else "")


def staged_rows(macros: dict[str, str]) -> int:
    """Return how many rows of each team are copied to shared memory while it computes one."""
    return int(macros.get("STAGES", 2 if macros.get("ASYNC_COPIES") == "true" else 0))


def _sharing(macros: dict[str, str]) -> str:
    threads, of_row = int(macros["THREADS"]), int(macros["THREADS_PER_ROW"])
    if int(macros["WIDTH"]) > of_row * int(macros["PACK"]) * int(macros["PACKS"]):
        return STREAMED
    if of_row > threads:
        return f"cluster of {of_row // threads}"
    return SEVERAL_ROWS if of_row < threads else ONE_ROW
