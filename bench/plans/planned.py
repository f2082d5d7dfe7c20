# SPDX-License-Identifier: MIT
"""The plans of calls for any kind of GPU, made without a GPU.

The plans come from cunorm's own planner, so that a new kind of plan appears here without a change.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any, NamedTuple

from bench.plans.model import ELEMENTS, MODELLED
from bench.plans.occupancy import ARCHITECTURES
from bench.plans.plan import ANY_SHAPE, PARAM_GRAD, TWO_LAUNCHES, Plan, regime
from bench.timing.cases import OPERATORS, Operator
from cunorm._core.build import KernelBuild, Launch
from cunorm._core.caps import MIN_CAPABILITY, NONE, Features, GpuCaps, features_of
from cunorm._core.dtypes import DTYPES
from cunorm._core.tensor import Device
from cunorm._group_norm import builds as group_builds
from cunorm._group_norm.schedule import cuda_schedule
from cunorm._row_norm import builds as row_builds
from cunorm._row_norm.spec import NEEDS

DIRECTIONS = ("forward", "backward")
WIDTHS = (64, 256, 1003, 1024, 4096, 16384, 65536, 262144)
# Default plans on GPUs with goals also have the widths that goals name, and widths of models.
GOAL_WIDTHS = tuple(sorted({*WIDTHS, 128, 512, 2048, 8192, 12288, 32768, 131072}))
MODEL_WIDTHS = (2880, 3072, 3584, 5120, 6144, 7168, 10240, 14336, 18432, 28672)
# Default plans on GPUs with goals also have small work: few rows of some widths, as in a model that
# generates token by token, and group norms of one or two samples.
SMALL_ROWS, SMALL_WIDTHS, SMALL_SAMPLES = (1, 8, 64, 512), (1024, 4096, 8192), (1, 2)
SMALL_DTYPE = "bfloat16"
# Channels, height and width. A block holds whole groups of the smallest samples. A cluster holds
# those of larger samples; its blocks may fill a multiprocessor. The largest need two launches.
SAMPLES = tuple(
    (channels, size, size)
    for size, counts in {16: (128, 320), 64: (320, 1280), 128: (512,), 256: (128, 320)}.items()
    for channels in counts
)
GRID = (
    *("rms_norm", "layer_norm", "add_rms_norm", "rms_norm+post_gate", "rms_norm+pre_gate"),
    "group_norm+silu",
)
_DTYPES = ("float32", "bfloat16")
_PASSES = ("find", "combine", "write")
_OF_BUILDS = ("clusters", "async_copies")  # features on which builds depend


def grid(architectures: tuple[str, ...]) -> list[Plan]:
    """Return the plans of the grid, each once.

    Plans with other features than the default, and plans of param_grad, which many calls share, are
    in the grid only if their build is new.
    """
    found: dict[Plan, None] = {}
    for architecture in architectures:
        builds: set[KernelBuild] = set()
        for features in feature_sets(architecture):
            before = frozenset(builds)
            for plan in _grid_plans(architecture, features):
                known = builds if plan.regime == PARAM_GRAD else before
                if plan.build not in known:
                    found.setdefault(plan)
                builds.add(plan.build)
    return list(found)


def _grid_plans(architecture: str, features: Features) -> Iterator[Plan]:
    has_goals = architecture in MODELLED and features == default_features(architecture)
    widths = sorted({*GOAL_WIDTHS, *MODEL_WIDTHS}) if has_goals else WIDTHS
    norms = [one for one in OPERATORS if one.name in GRID]
    for operator, direction, dtype in product(norms, DIRECTIONS, _DTYPES):
        shapes = SAMPLES if operator.of_channels else [(width,) for width in widths]
        for shape in shapes:
            of_shape = (operator, direction, dtype, shape, architecture, features)
            yield from plans(*of_shape)
            if has_goals and dtype == SMALL_DTYPE:
                for count in _small_counts(shape):
                    found = plans(*of_shape, count)
                    yield from (plan for plan in found if plan.regime != PARAM_GRAD)


def _small_counts(shape: tuple[int, ...]) -> tuple[int, ...]:
    if len(shape) > 1:
        return SMALL_SAMPLES
    return SMALL_ROWS if shape[0] in SMALL_WIDTHS else ()


def plans(
    operator: Operator,
    direction: str,
    dtype: str,
    shape: tuple[int, ...],
    architecture: str,
    features: Features,
    samples: int = 0,
) -> Iterator[Plan]:
    """Yield the launches of a call as bench/timing/cases.py makes it.

    `shape` is the width of a row, or a sample's channels, height and width. `samples` is the number
    of rows or samples; 0 means that x has `ELEMENTS` elements.
    """
    count = samples or max(1, ELEMENTS // prod(shape))
    launches_of = _group_launches if operator.of_channels else _row_launches
    options = _options(operator, dtype, *shape)
    launches = launches_of(
        operator, direction, options, count, shape[0], _caps(architecture, features)
    )
    label = "+".join(n for n in _OF_BUILDS if getattr(features, n)) or "none"
    if features == default_features(architecture):
        label = ""
    names = (architecture, label, operator.name, operator.memory, direction, dtype)
    sizes = ("x".join(map(str, shape)), str(samples or ""))
    yield from _plans(names, sizes, launches)


def _plans(
    names: tuple[str, str, str, str, str, str],
    shape: tuple[str, str],
    launches: list[tuple[Launch, _Sizes]],
) -> Iterator[Plan]:
    """Yield the plans of a call's launches; names and shape are the first fields of a Plan."""
    params = next((one for one, _ in launches if one.build.kernel == PARAM_GRAD), None)
    before = None
    for launch, sizes in launches:
        any_shape = launch is params and not sizes.rows
        plan = Plan(
            *names,
            *((ANY_SHAPE, "") if any_shape else shape),
            regime(launch.build),
            _step(launch.build),
            sizes.rows,
            0 if any_shape else launch.grid,
            launch.shared,
            launch.parts,
            launch.sums_pitch,
            None if launch is params else params,
            launch.build,
            sizes.samples,
            sizes.chunk,
            None if launch is params else before,
        )
        yield plan
        before = plan


class _Sizes(NamedTuple):
    """The fields of the same names in a Plan."""

    rows: int
    samples: int = 0
    chunk: int = 0


_GPU = Device("cuda", 0)
_Options = dict[str, Any]


def _row_launches(
    operator: Operator, direction: str, options: _Options, rows: int, width: int, caps: GpuCaps
) -> list[tuple[Launch, _Sizes]]:
    """Return the launches of a call, and its rows."""
    plan_of = row_builds.forward_plan if direction == "forward" else row_builds.backward_plan
    plan = plan_of(f"{operator.base}_{direction}", options, (rows, width), _GPU)
    return [(launch, _Sizes(rows)) for launch in plan.lower(caps, None).launches]


def _group_launches(
    operator: Operator,
    direction: str,
    options: _Options,
    samples: int,
    channels: int,
    caps: GpuCaps,
) -> list[tuple[Launch, _Sizes]]:
    """Return the launches of a call for a chunk of its samples, and their sizes."""
    plan_of = group_builds.forward_plan if direction == "forward" else group_builds.backward_plan
    plan = plan_of(operator.name, options, samples, channels, _GPU)
    (kernel,) = plan.lower.args  # type: ignore[attr-defined]  # of functools.partial
    sizes_of_x = kernel.geometry.sizes
    schedule = cuda_schedule(kernel.types, sizes_of_x, kernel.access(None), caps)
    sizes = _Sizes(0, samples, schedule.chunk)
    parts, pitch = samples * schedule.parts, sizes_of_x.pitch
    launches = list(plan.lower(caps, None).launches)
    param_grad = [(launches.pop(), _Sizes(0))] if kernel.params.outputs else []
    return [
        (replace(one, grid=one.grid * schedule.chunk, parts=parts, sums_pitch=pitch), sizes)
        for one in launches
    ] + param_grad


def _step(build: KernelBuild) -> str:
    if regime(build) != TWO_LAUNCHES:
        return ""
    macros = dict(build.macros)
    return "+".join(name for name in _PASSES if macros[name.upper()] == "true")


def default_features(architecture: str) -> Features:
    """Return the features that plans use by default."""
    return features_of(architecture)


def feature_sets(architecture: str) -> list[Features]:
    """Return the default features of a GPU, all that it has, and none; equal sets once."""
    has = {name: int(architecture) >= least for name, least in MIN_CAPABILITY.items()}
    return list(dict.fromkeys([default_features(architecture), Features(**has), NONE]))


def _options(operator: Operator, dtype: str, width: int, *positions: int) -> _Options:
    """Return the options of `cunorm.warmup` that describe an operator's calls."""
    x, options = DTYPES[dtype], operator.options
    operands = {name: x if name in operator.parameters else None for name in ("weight", "bias")}
    return operands | {
        "x": x,
        "residual": x if operator.has_residual else None,
        "gate": x if operator.gate_position else None,
        "d_residual": None,
        "dtype": None,
        "residual_dtype": None,
        "center": operator.center,
        "groups": operator.groups(width),
        "num_groups": operator.groups(width),
        "weight_offset": options.get("weight_offset", 0.0),
        "round_before_weight": options.get("round_before_weight", False),
        "gate_activation": "silu",
        "gate_position": operator.gate_position or "post",
        "positions": prod(positions),
        "layout": "channels_last" if operator.memory == "NHWC" else "channels_first",
        "activation": options.get("activation"),
        "needs": NEEDS,
        "accumulate": False,
    }


def _caps(architecture: str, features: Features) -> GpuCaps:
    """Return the caps of a GPU of an architecture, with room for any cluster."""
    limits = ARCHITECTURES[architecture]
    return GpuCaps(
        sm_count=limits.sm_count,
        compute_capability=architecture,
        max_threads_per_sm=32 * limits.warps,
        shared_memory_per_block_optin=limits.shared - limits.reserved,
        shared_memory_per_sm=limits.shared,
        l2_bytes=limits.l2,
        features=features,
    )
