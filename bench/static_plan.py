# SPDX-License-Identifier: MIT
"""A launch on a GPU that need not be there: its build, and what that says of its arguments."""

from __future__ import annotations

from typing import NamedTuple

from bench.model import Traffic
from cunorm._core.build import KernelBuild, Launch
from cunorm._core.dtypes import DTYPES, DType
from cunorm._core.tensor import WIDEST_ACCESS
from cunorm._row_norm.kernels import BackwardTypes, ForwardTypes

STREAMED, SEVERAL_ROWS, ONE_ROW = "streamed", "several rows a block", "one row a block"
COPIED_AHEAD = " copied ahead"  # rows, to shared memory
ONE_LAUNCH, TWO_LAUNCHES = "one launch", "two launches"
PARAM_GRAD, ANY_SHAPE = "param_grad", "any"

_TYPES = {dtype.cuda: dtype for dtype in DTYPES.values()}


class Rows(NamedTuple):
    """The arguments of a kernel that are as large as x, and bytes from one to the next."""

    names: tuple[str, ...]
    step: int


# In the order of `struct Arguments`: a pointer with the sizes and strides of its rows or lines.
_ROW_OPERANDS = {
    "row_norm_forward": Rows(ForwardTypes.rows, 6 * 8),
    "row_norm_backward": Rows(BackwardTypes.rows, 6 * 8),
    "group_norm_forward": Rows(("x", "y"), 3 * 8),
    "group_norm_backward": Rows(("dy", "x", "dx"), 3 * 8),
    "param_grad": Rows((), 0),
}
_WRITTEN = ("y", "new_residual", "dx", "dresidual", "dgate")
_PARAMETERS = 2  # weight and bias, the first of the other pointers
_OTHER_POINTERS = {
    "row_norm_forward": 4,
    "row_norm_backward": 6,
    "group_norm_forward": 5,
    "group_norm_backward": 7,
    "param_grad": 4,
}


class Plan(NamedTuple):
    """A launch of a call on a GPU, of arrays that are aligned."""

    architecture: str
    features: str  # that it is planned with, joined by "+", where those are not the default ones
    operator: str
    memory: str
    direction: str
    dtype: str
    shape: str  # a row's width, or a sample's channels, height and width
    regime: str
    step: str  # of two launches, which passes it makes
    rows: int  # of x; of a group norm and of what is below, 0
    grid: int
    shared: int  # bytes of a block's shared memory, beside what its kernel declares
    parts: int  # rows of partial sums that a backward writes for each parameter
    sums_pitch: int  # elements from one to the next
    param_grad: Launch | None  # that adds them up
    build: KernelBuild
    samples: int = 0  # of a group norm's x
    chunk: int = 0  # of them, which a launch has, if all are not gone over by one
    before: Plan | None = None  # of two launches, the first

    @property
    def threads(self) -> int:
        """The threads of a block."""
        if self.regime == PARAM_GRAD:
            return self.number("COLUMN_THREADS") * self.number("PART_THREADS")
        return self.number("THREADS")

    def number(self, macro: str, otherwise: int = 1) -> int:
        """Return a number of the build."""
        return int(dict(self.build.macros).get(macro, otherwise))

    def row_operands(self) -> dict[int, tuple[str, DType]]:
        """Return the names and dtypes of arrays as large as x, by the places of their pointers."""
        names, step = _ROW_OPERANDS[self.build.kernel]
        macros = dict(self.build.macros)
        types = {name: _TYPES.get(macros[f"{name.upper()}_T"]) for name in names}
        return {
            index * step: (name, dtype)
            for index, (name, dtype) in enumerate(types.items())
            if dtype is not None
        }

    def pointers(self) -> frozenset[int]:
        """Return the places of all pointers among the arguments."""
        names, step = _ROW_OPERANDS[self.build.kernel]
        end = len(names) * step
        others = range(end, end + 8 * _OTHER_POINTERS[self.build.kernel], 8)
        return frozenset((*range(0, end, step or 1), *others))

    def parameters(self) -> frozenset[int]:
        """Return the places of weight and bias."""
        names, step = _ROW_OPERANDS[self.build.kernel]
        return frozenset(len(names) * step + 8 * index for index in range(_PARAMETERS))

    def traffic(self) -> Traffic:
        """Return the bytes for each element of x that the launch must move."""
        operands = self.row_operands().values()
        writes = sum(dtype.itemsize for name, dtype in operands if name in _WRITTEN)
        return Traffic(sum(dtype.itemsize for _, dtype in operands) - writes, writes)

    @property
    def of_rows(self) -> bool:
        """Whether it is a row norm's main kernel."""
        return self.build.kernel.startswith("row_norm")

    @property
    def stages(self) -> int:
        """Rows of each team that are copied to shared memory, or computed there, at a time."""
        return staged_rows(dict(self.build.macros))

    @property
    def rows_at_once(self) -> float:
        """The rows that the blocks of the launch walk together."""
        return self.grid * self.threads / self.number("THREADS_PER_ROW")

    def aligned_bytes(self, itemsize: int) -> int:
        """Return the bytes of an access that the alignment of rows or lines allows."""
        sizes = list(map(int, self.shape.split("x")))
        line = sizes[0] if self.memory != "NCHW" else sizes[1] * sizes[2]
        return min(WIDEST_ACCESS, (line & -line) * itemsize)

    def access_bytes(self, itemsize: int) -> int:
        """Return the bytes of an access to an aligned array as large as x, by its itemsize."""
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
    """Return how many rows of each team are copied to shared memory, or computed there, at once."""
    return int(macros.get("STAGES", 2 if macros.get("ASYNC_COPIES") == "true" else 0))


def _sharing(macros: dict[str, str]) -> str:
    threads, of_row = int(macros["THREADS"]), int(macros["THREADS_PER_ROW"])
    if int(macros["WIDTH"]) > of_row * int(macros["PACK"]) * int(macros["PACKS"]):
        return STREAMED
    if of_row > threads:
        return f"cluster of {of_row // threads}"
    return SEVERAL_ROWS if of_row < threads else ONE_ROW
