# SPDX-License-Identifier: MIT
"""The plans of calls on GPUs that need not be there: which builds, how threads share rows.

They come from cunorm's own planning of calls that have not been made yet, so that a new kind of
plan appears here by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from bench.cases import OPERATORS, Operator
from bench.model import ELEMENTS, GPUS, Traffic
from bench.static_occupancy import ARCHITECTURES
from cunorm import _calls, _cuda, _planned_builds
from cunorm._arrays import Device
from cunorm._builds import Build, Launch
from cunorm._dtypes import DTYPES, DType
from cunorm._features import LEAST_CAPABILITY, NONE, Features, features_of
from cunorm._planned_builds import Layer
from cunorm._teams import ACCESS_BYTES
from cunorm.group_norm import _calls as _group_calls
from cunorm.group_norm._planned_builds import GroupLayer
from cunorm.row_norm._backward_plan import NEEDS
from cunorm.row_norm._variant import Variant

STREAMED, SEVERAL_ROWS, ONE_ROW = "streamed", "several rows a block", "one row a block"
COPIED_AHEAD = " copied ahead"  # rows, to shared memory
ONE_LAUNCH, THREE_LAUNCHES = "one launch", "three launches"
PARAM_GRAD, ANY_SHAPE = "param_grad", "any"

DIRECTIONS = ("forward", "backward")
WIDTHS = (64, 256, 1003, 1024, 4096, 16384, 65536, 262144)
# Of GPUs for which there are goals: all widths that those name.
GOAL_WIDTHS = tuple(sorted({*WIDTHS, 128, 512, 2048, 8192, 12288, 32768, 131072}))
# Channels, height and width: of few positions a block has whole groups, of many it has not.
SAMPLES = tuple((channels, size, size) for channels in (128, 320, 512) for size in (16, 128))
GRID = (
    *("rms_norm", "layer_norm", "add_rms_norm", "rms_norm+post_gate", "rms_norm+pre_gate"),
    "group_norm+silu",
)
_DTYPES = ("float32", "bfloat16")
_SAMPLES = 65536  # enough for every GPU to have several for each block
_SHARED_MEMORY = 48 << 10  # of a block, static
_TYPES = {dtype.cuda: dtype for dtype in DTYPES.values()}
_PASSES = ("find", "combine", "write")


class Rows(NamedTuple):
    """The arguments of a kernel that are as large as x, and bytes from one to the next."""

    names: tuple[str, ...]
    step: int


# In the order of `struct Arguments`: a pointer with the sizes and strides of its rows or lines.
_ROW_OPERANDS = {
    "row_norm_forward": Rows(_calls._FORWARD_ROWS, 6 * 8),
    "row_norm_backward": Rows(_calls._BACKWARD_ROWS, 6 * 8),
    "group_norm_forward": Rows(_group_calls._FORWARD_LINES, 3 * 8),
    "group_norm_backward": Rows(_group_calls._BACKWARD_LINES, 3 * 8),
    "param_grad": Rows((), 0),
}
_WRITTEN = ("y", "new_residual", "dx", "dresidual", "dgate")
_PARAMETERS = 2  # weight and bias, the first of the other pointers
_OTHER_POINTERS = {
    "row_norm_forward": 5,
    "row_norm_backward": 7,
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
    step: str  # of three launches, which passes it makes
    rows: int  # of x; of a group norm and of what is below, 0
    grid: int
    parts: int  # rows of partial sums that a backward writes for each parameter
    sums_pitch: int  # elements from one to the next
    param_grad: Launch | None  # that adds them up
    build: Build

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
        copied = dict(self.build.macros).get("ASYNC_COPIES") == "true"
        return self.number("STAGES", 2 if copied else 0)

    @property
    def rows_at_once(self) -> float:
        """The rows that the blocks of the launch walk together."""
        return self.grid * self.threads / self.number("THREADS_PER_ROW")

    def aligned_bytes(self, itemsize: int) -> int:
        """Return the bytes of an access that the alignment of rows or lines allows."""
        sizes = list(map(int, self.shape.split("x")))
        line = sizes[0] if self.memory != "NCHW" else sizes[1] * sizes[2]
        return min(ACCESS_BYTES, (line & -line) * itemsize)

    def access_bytes(self, itemsize: int) -> int:
        """Return the bytes of an access to an aligned array as large as x, by its itemsize."""
        return min(ACCESS_BYTES, self.number("PACK") * itemsize)


def regime(build: Build) -> str:
    """Return how threads share rows or samples."""
    macros = dict(build.macros)
    if build.kernel == "param_grad":
        return PARAM_GRAD
    if build.kernel.startswith("group_norm"):
        one = macros["FIND"] == macros["COMBINE"] == "true"
        return ONE_LAUNCH if one else THREE_LAUNCHES
    ahead = COPIED_AHEAD if macros.get("ASYNC_COPIES") == "true" else ""
    return _sharing(macros) + ahead


def _sharing(macros: dict[str, str]) -> str:
    threads, of_row = int(macros["THREADS"]), int(macros["THREADS_PER_ROW"])
    if macros["PACKS"] == "0":
        return STREAMED
    if of_row > threads:
        return f"cluster of {of_row // threads}"
    return SEVERAL_ROWS if of_row < threads else ONE_ROW


def grid(architectures: tuple[str, ...]) -> list[Plan]:
    """Return the plans of the grid, each once.

    A plan that a GPU has only with other features than the default ones is beside those.
    """
    found: dict[Plan, None] = {}
    for architecture in architectures:
        default: set[Build] = set()
        for features in feature_sets(architecture):
            for plan in _of_grid(architecture, features):
                if plan.build not in default or not plan.features:
                    found.setdefault(plan)
            default |= {plan.build for plan in found if plan.architecture == architecture}
    return list(found)


def _of_grid(architecture: str, features: Features) -> Iterator[Plan]:
    for operator in OPERATORS:
        if operator.name in GRID:
            widths = GOAL_WIDTHS if architecture in GPUS else WIDTHS
            shapes = SAMPLES if operator.of_channels else [(width,) for width in widths]
            for direction in DIRECTIONS:
                for dtype in _DTYPES:
                    for shape in shapes:
                        yield from plans(operator, direction, dtype, shape, architecture, features)


def plans(
    operator: Operator,
    direction: str,
    dtype: str,
    shape: tuple[int, ...],
    architecture: str,
    features: Features,
) -> Iterator[Plan]:
    """Yield the launches of a call as bench/cases.py makes it.

    `shape` is a row's width alone, or a sample's channels, height and width.
    """
    layer = (_group_layer if operator.of_channels else _layer)(operator, dtype, *shape)
    rows = 0 if operator.of_channels else max(1, ELEMENTS // shape[0])
    name = f"{operator.base}_{direction}"
    with _pretended(architecture, features) as device:
        if isinstance(layer, GroupLayer):
            builds = _planned_builds.builds(name, layer, [_SAMPLES], shape[0], device)
            launches = [Launch(build, 0, 0) for build in builds]
        else:
            launches = _planned_builds.launches(name, layer, [rows], shape[0], device)
    params = next((one for one in launches if rows and one.build.kernel == PARAM_GRAD), None)
    label = "+".join(n for n in LEAST_CAPABILITY if getattr(features, n)) or "none"
    for launch in launches:
        build = launch.build
        found = regime(build)
        yield Plan(
            architecture,
            "" if features == default_features(architecture) else label,
            operator.name,
            operator.memory,
            direction,
            dtype,
            ANY_SHAPE if found == PARAM_GRAD and not rows else "x".join(map(str, shape)),
            found,
            _step(build) if found == THREE_LAUNCHES else "",
            rows,
            launch.grid,
            launch.parts,
            launch.sums_pitch,
            None if launch is params else params,
            build,
        )


def _step(build: Build) -> str:
    macros = dict(build.macros)
    return "+".join(name for name in _PASSES if macros[name.upper()] == "true")


def default_features(architecture: str) -> Features:
    """Return the features that plans for a GPU use by default, with room for any cluster."""
    return features_of(architecture)


def feature_sets(architecture: str) -> list[Features]:
    """Return what plans for a GPU may use: by default, all that it has, nothing."""
    has = {name: int(architecture) >= least for name, least in LEAST_CAPABILITY.items()}
    return list(dict.fromkeys([default_features(architecture), Features(**has), NONE]))


def _layer(operator: Operator, dtype: str, width: int) -> Layer:
    x, options = DTYPES[dtype], operator.options
    return Layer(
        operator.name,
        Variant(
            operator.center,
            groups=operator.groups(width),
            round_before_weight=options.get("round_before_weight", False),
            gate_position=operator.gate_position or "post",
        ),
        x,
        **dict.fromkeys(operator.parameters, x),
        residual=x if operator.has_residual else None,
        gate=x if operator.gate_position else None,
        weight_offset=options.get("weight_offset", 0.0),
        needs=frozenset(NEEDS),
    )


def _group_layer(
    operator: Operator, dtype: str, channels: int, height: int, width: int
) -> GroupLayer:
    x = DTYPES[dtype]
    return GroupLayer(
        operator.name,
        x,
        operator.groups(channels),
        height * width,
        "channels_last" if operator.memory == "NHWC" else "channels_first",
        operator.options.get("activation"),
        **dict.fromkeys(operator.parameters, x),
        needs=frozenset(NEEDS) - {"gate"},
    )


@contextmanager
def _pretended(architecture: str, features: Features) -> Iterator[Device]:
    """Let plans be made for a GPU that is not there: all they ask of it are its limits."""
    limits = ARCHITECTURES[architecture]
    pretended = _cuda.DeviceLimits(
        sm_count=limits.sm_count,
        compute_capability=architecture,
        max_threads_per_sm=32 * limits.warps,
        shared_memory_per_block=_SHARED_MEMORY,
        features=features,
    )
    asked = _cuda.device_limits, _cuda.fits_cluster
    _cuda.device_limits = lambda device: pretended  # type: ignore[assignment]
    _cuda.fits_cluster = lambda *sizes: True  # type: ignore[assignment]
    sets = feature_sets(architecture)
    number = 3 * list(ARCHITECTURES).index(architecture) + sets.index(features)
    try:
        yield Device("cuda", 100 + number)  # what is remembered of a device has its number
    finally:
        _cuda.device_limits, _cuda.fits_cluster = asked
