# SPDX-License-Identifier: MIT
"""The plans of calls on GPUs that need not be there: which builds, how threads share rows.

They come from cunorm's own planning of calls that have not been made yet, so that a new kind of
plan appears here by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from typing import NamedTuple

from bench.cases import OPERATORS, Operator
from bench.model import ELEMENTS, GPUS
from bench.static_occupancy import ARCHITECTURES
from bench.static_plan import ANY_SHAPE, PARAM_GRAD, TWO_LAUNCHES, Plan, regime
from cunorm import _cuda, _planned_builds
from cunorm._arrays import Device
from cunorm._builds import Build, Launch
from cunorm._dtypes import DTYPES
from cunorm._features import LEAST_CAPABILITY, NONE, Features, features_of
from cunorm._planned_builds import Layer
from cunorm.group_norm import _planned_builds as _of_groups
from cunorm.group_norm._calls import GroupBackwardForm, GroupForm
from cunorm.group_norm._planned_builds import GroupLayer
from cunorm.group_norm._run import _param_launch, schedule_of
from cunorm.row_norm._backward_plan import NEEDS
from cunorm.row_norm._variant import Variant

DIRECTIONS = ("forward", "backward")
WIDTHS = (64, 256, 1003, 1024, 4096, 16384, 65536, 262144)
# Of GPUs for which there are goals: all widths that those name.
GOAL_WIDTHS = tuple(sorted({*WIDTHS, 128, 512, 2048, 8192, 12288, 32768, 131072}))
# Channels, height and width: of few positions a block has whole groups, of more a cluster, of many
# none.
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
    samples: int = 0,
) -> Iterator[Plan]:
    """Yield the launches of a call as bench/cases.py makes it.

    `shape` is a row's width alone, or a sample's channels, height and width, of which there are so
    many, or as many as make `ELEMENTS`.
    """
    count = samples or max(1, ELEMENTS // prod(shape))
    with _pretended(architecture, features) as device:
        if operator.of_channels:
            group = _group_layer(operator, dtype, *shape)
            made = _group_launches(group, direction, count, shape[0], device)
        else:
            layer, name = _layer(operator, dtype, *shape), f"{operator.base}_{direction}"
            made = _row_launches(name, layer, count, shape[0], device)
    label = "+".join(n for n in LEAST_CAPABILITY if getattr(features, n)) or "none"
    if features == default_features(architecture):
        label = ""
    names = (architecture, label, operator.name, operator.memory, direction, dtype)
    yield from _plans(names, "x".join(map(str, shape)), made)


def _plans(
    names: tuple[str, str, str, str, str, str], shape: str, made: list[tuple[Launch, _Sizes]]
) -> Iterator[Plan]:
    """Yield the launches of a call; the names are the first fields of a Plan."""
    params = next((one for one, _ in made if one.build.kernel == PARAM_GRAD), None)
    before = None
    for launch, sizes in made:
        any_shape = launch is params and not sizes.rows
        plan = Plan(
            *names,
            ANY_SHAPE if any_shape else shape,
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
    """The fields of a Plan with these names."""

    rows: int
    samples: int = 0
    chunk: int = 0


def _row_launches(
    name: str, layer: Layer, rows: int, width: int, device: Device
) -> list[tuple[Launch, _Sizes]]:
    """Return what a call starts, and its rows."""
    launches = _planned_builds.launches(name, layer, [rows], width, device)
    return [(launch, _Sizes(rows)) for launch in launches]


def _group_launches(
    layer: GroupLayer, direction: str, samples: int, channels: int, device: Device
) -> list[tuple[Launch, _Sizes]]:
    """Return what a call starts for a chunk of its samples, and the sizes that a Plan has."""
    forward = _of_groups._forward_form(layer, channels, device)
    form: GroupForm | None = forward
    if direction == "backward":
        form = _of_groups._backward_form(layer, forward, device)
    assert form is not None
    form = replace(form, where=form.where._replace(samples=samples))
    schedule = schedule_of(form, device)
    sizes = _Sizes(0, samples, schedule.chunk)
    parts, pitch = samples * schedule.parts, form.where.pitch
    made = [
        (replace(one, grid=one.grid * schedule.chunk, parts=parts, sums_pitch=pitch), sizes)
        for one in schedule.passes
    ]
    if isinstance(form, GroupBackwardForm):
        made.append((_param_launch(form, device), _Sizes(0)))
    return made


def _step(build: Build) -> str:
    if regime(build) != TWO_LAUNCHES:
        return ""
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
