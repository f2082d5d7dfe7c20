# SPDX-License-Identifier: MIT
"""The plans of calls for any kind of GPU, made without a GPU.

The plans come from cunorm's own planner, so that a new kind of plan appears here without a change.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import prod

from bench.plans.model import ARCHITECTURES, ELEMENTS, MODELLED
from bench.plans.plan import ANY_SHAPE, PARAM_GRAD, Plan
from bench.timing.cases import (
    DIRECTIONS,
    IMAGES,
    LAYOUTS,
    MODULATED,
    OPERATORS,
    QUANTIZED,
    Operator,
)
from cunorm._core.build import KernelBuild, Launch
from cunorm._core.caps import MIN_CAPABILITY, NONE, Features, GpuCaps, features_of
from cunorm._core.dtypes import DTYPES, DType
from cunorm._core.tensor import Device
from cunorm._group_norm import builds as group_builds
from cunorm._group_norm.schedule import cuda_schedule
from cunorm._row_norm import builds as row_builds
from cunorm._row_norm.builds import Options
from cunorm._warmup import _ABSENT

WIDTHS = (64, 256, 1003, 1024, 4096, 16384, 65536, 262144)
# Default plans on modelled GPUs also have more widths, such as those of language models,
_MORE_WIDTHS = (
    *(128, 512, 2048, 8192, 12288, 32768, 131072),
    *(2880, 3072, 3584, 5120, 6144, 7168, 10240, 14336, 18432, 28672),
)
# and small work: few rows of some widths, as in a model that generates token by token, and group
# norms of one or two samples.
SMALL_ROWS, SMALL_WIDTHS, SMALL_SAMPLES = (1, 8, 64, 512), (1024, 4096, 8192), (1, 2)
SMALL_DTYPE = "bfloat16"
# Channels, height and width. A block holds whole groups of the smallest samples. A cluster holds
# those of larger samples; its blocks may fill a multiprocessor. The largest need two launches.
SAMPLES = (
    *((128, 16, 16), (320, 16, 16), (320, 64, 64), (1280, 64, 64), (512, 128, 128)),
    *((128, 256, 256), (320, 256, 256)),
)
GRID = (
    *("rms_norm", "layer_norm", "add_rms_norm", "rms_norm+post_gate", "rms_norm+pre_gate"),
    "group_norm+silu",
)
_DTYPES = ("float32", "bfloat16")
# Row norms of samples that have a weight and a bias each, on modelled GPUs: the widths of diffusion
# transformers, and a sample's rows.
_MODULATED_WIDTHS, _SAMPLE_ROWS = (1152, 1536, 3072, 4096), 1024
# Row norms of channels that lie apart: the stages of a ConvNeXt, for images of 448 pixels.
_IMAGES = ((96, 112, 112), (192, 56, 56), (384, 28, 28), (768, 14, 14))
_QUANTIZED_WIDTHS = (1024, 4096, 5120, 8192)  # of row norms with a quantised result, there
_OF_BUILDS = ("clusters", "async_copies")  # features on which builds depend
# Options that `warmup` does not have, or has in another form.
_NOT_OPTIONS = ("c", "groups", "channel_axis", "axis")
_GPU = Device("cuda", 0)


def grid(architectures: tuple[str, ...]) -> list[Plan]:
    """Return the plans of the grid, each once.

    Plans with other features than the default, and plans of param_grad, which many calls share, are
    in the grid only if their build is new.
    """
    found: list[Plan] = []
    for architecture in architectures:
        builds: set[KernelBuild] = set()
        for features in feature_sets(architecture):
            before = frozenset(builds)
            for plan in _grid_plans(architecture, features):
                if plan.build not in (builds if plan.regime == PARAM_GRAD else before):
                    found.append(plan)
                builds.add(plan.build)
    return found


def _grid_plans(architecture: str, features: Features) -> Iterator[Plan]:
    is_modelled = architecture in MODELLED and features == features_of(architecture)
    widths = sorted((*WIDTHS, *_MORE_WIDTHS)) if is_modelled else WIDTHS
    norms = [one for one in OPERATORS if one.name in GRID]
    for operator, direction, dtype in product(norms, DIRECTIONS, _DTYPES):
        shapes = SAMPLES if operator.of_channels else [(width,) for width in widths]
        counts = SMALL_SAMPLES if operator.of_channels else SMALL_ROWS
        has_small = is_modelled and dtype == SMALL_DTYPE
        for shape in shapes:
            is_small = has_small and (operator.of_channels or shape[0] in SMALL_WIDTHS)
            for count in (0, *(counts if is_small else ())):
                for plan in plans(operator, direction, dtype, shape, architecture, features, count):
                    if not count or plan.regime != PARAM_GRAD:
                        yield plan
    of_images = [one for one in IMAGES if one.memory == "NCHW"] if is_modelled else []
    for operator, direction, dtype in product(of_images, DIRECTIONS, _DTYPES):
        for shape in _IMAGES if direction == "forward" else _IMAGES[:-1]:
            yield from plans(operator, direction, dtype, shape, architecture, features)
    modulated = [one for one in MODULATED if not one.of_channels] if is_modelled else []
    for operator, direction, width in product(modulated, DIRECTIONS, _MODULATED_WIDTHS):
        yield from plans(operator, direction, SMALL_DTYPE, (width,), architecture, features)
    for operator, width in product(QUANTIZED if is_modelled else (), _QUANTIZED_WIDTHS):
        yield from plans(operator, "forward", SMALL_DTYPE, (width,), architecture, features)


def plans(
    operator: Operator,
    direction: str,
    dtype: str,
    shape: tuple[int, ...],
    architecture: str,
    features: Features,
    samples: int = 0,
) -> list[Plan]:
    """Return the launches of a call as bench/timing/cases.py makes it.

    `shape` is the width of a row, or a sample's channels, height and width. `samples` is the number
    of rows or samples; 0 means that x has `ELEMENTS` elements.
    """
    rows, caps = samples or max(1, ELEMENTS // prod(shape)), _caps(architecture, features)
    x = DTYPES[dtype]
    options = _ABSENT | warmup_options(operator, x, *shape) | {"x": x}
    if operator.of_channels:
        launches, chunk = _group_launches(operator, direction, options, rows, shape[0], caps)
    else:
        kind = "quantized" if operator.quantized else direction
        plan_of = getattr(row_builds, f"{kind}_plan")
        of_samples = (rows // _SAMPLE_ROWS, _SAMPLE_ROWS) if operator.modulated else (1, rows)
        if operator.of_images:
            of_samples = rows, prod(shape[1:])
        rows = prod(of_samples)
        plan = plan_of(f"{operator.base}_{kind}", options, (*of_samples, shape[0]), _GPU)
        launches, chunk = list(plan.lower(caps, None).launches), 0
    label = "+".join(n for n in _OF_BUILDS if getattr(features, n)) or "none"
    if features == features_of(architecture):
        label = ""
    names = (architecture, label, operator.name, operator.memory, direction, dtype)
    sizes = ("x".join(map(str, shape)), str(samples or ""))
    params = next((one for one in launches if one.build.kernel == PARAM_GRAD), None)
    found: list[Plan] = []
    for launch in launches:
        if launch is params:
            of_launch = (ANY_SHAPE, "") if operator.of_channels else sizes
            found.append(Plan(*names, *of_launch, launch, rows, 0, None, None))
        else:
            before = found[-1] if found else None
            found.append(Plan(*names, *sizes, launch, rows, chunk, params, before))
    return found


def _group_launches(
    operator: Operator,
    direction: str,
    options: Options,
    samples: int,
    channels: int,
    caps: GpuCaps,
) -> tuple[list[Launch], int]:
    """Return the launches of a call for a chunk of its samples, and the chunk's samples."""
    plan_of = getattr(group_builds, f"{direction}_plan")
    plan = plan_of(operator.name, options, samples, channels, _GPU)
    (kernel,) = plan.lower.args  # of functools.partial
    sizes = kernel.geometry.sizes
    schedule = cuda_schedule(kernel.types, sizes, kernel.access(None), caps)
    parts, chunk = samples * schedule.parts, schedule.chunk
    launches = [
        launch
        if launch.build.kernel == PARAM_GRAD
        else replace(launch, grid=launch.grid * chunk, parts=parts, sums_pitch=sizes.pitch)
        for launch in plan.lower(caps, None).launches
    ]
    return launches, chunk


def feature_sets(architecture: str) -> list[Features]:
    """Return the default features of a GPU, all that it has, and none; equal sets once."""
    has = {name: int(architecture) >= least for name, least in MIN_CAPABILITY.items()}
    return list(dict.fromkeys([features_of(architecture), Features(**has), NONE]))


def warmup_options(operator: Operator, x: DType | bool, width: int, *positions: int) -> Options:
    """Return the options of `warmup` for an operator's calls; operands have the dtype `x`."""
    own = {name: value for name, value in operator.options.items() if name not in _NOT_OPTIONS}
    options = own | dict.fromkeys(operator.leaves[1:], x)
    options["d_residual"] = operator.has_residual and not operator.quantized
    if operator.modulated:
        options |= {"weight_per": "sample", "bias_per": "sample"}
    if operator.of_images:
        options["layout"] = LAYOUTS[operator.memory]
    if not operator.of_channels:
        return options | {"groups": operator.groups(width)}
    return options | {"num_groups": operator.groups(width), "positions": prod(positions)}


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
