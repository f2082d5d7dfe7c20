# SPDX-License-Identifier: MIT
"""The plans of calls on GPUs that need not be there: which builds, how threads share rows.

They come from cunorm's own planning of calls that have not been made yet, so that a new kind of
plan appears here by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from bench.cases import OPERATORS, Operator
from bench.model import ELEMENTS, GPUS
from bench.static_occupancy import ARCHITECTURES
from bench.static_plan import ANY_SHAPE, PARAM_GRAD, THREE_LAUNCHES, Plan, regime
from cunorm import _cuda, _planned_builds
from cunorm._arrays import Device
from cunorm._builds import Build, Launch
from cunorm._dtypes import DTYPES
from cunorm._features import LEAST_CAPABILITY, NONE, Features, features_of
from cunorm._planned_builds import Layer
from cunorm.group_norm._planned_builds import GroupLayer
from cunorm.row_norm._backward_plan import NEEDS
from cunorm.row_norm._variant import Variant

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
_PASSES = ("find", "combine", "write")


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
            launch.shared,
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
        shared_memory_per_block_optin=limits.shared - limits.reserved,
        shared_memory_per_sm=limits.shared,
        l2_bytes=limits.l2,
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
