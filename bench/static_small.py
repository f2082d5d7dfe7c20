# SPDX-License-Identifier: MIT
"""Group norms of one or two samples: the model's (model.py) prediction of their time, and a goal.

A launch takes the gap between launches, and then the time of its bytes at copy speed, or that of
its blocks on the busiest multiprocessor if that is longer. The goal is twice the sum of the gaps
and the time of all bytes at copy speed.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import ceil, prod

from bench.cases import OPERATORS, Operator
from bench.model import GPUS, LAUNCH
from bench.static_groups import call_traffic, small_time
from bench.static_plan import PARAM_GRAD
from bench.static_plans import DIRECTIONS, default_features, plans
from bench.static_rows import blocks_per_sm, sass_of
from bench.static_speed import param_grad_of

NAME, DTYPE = "group_norm+silu", "bfloat16"
SAMPLES, CHANNELS, SIZES = (1, 2), (320, 640, 1280, 2560), (16, 32, 64, 128)
SLACK = 2.0


def table(architectures: tuple[str, ...]) -> Iterator[str]:
    """Yield a line for each architecture that the model knows, direction, memory and sample."""
    sizes = "".join(f"{f'{size}x{size}':>17}" for size in SIZES)
    yield f"{f'{NAME} {DTYPE}: launches, µs / goal, by a model':60}"
    yield f"{'':20}{'samples':>12}{'channels':>10}{sizes}"
    operators = [one for one in OPERATORS if one.name == NAME]
    for architecture, direction, operator, samples, channels in product(
        [one for one in architectures if one in GPUS], DIRECTIONS, operators, SAMPLES, CHANNELS
    ):
        shapes = [(channels, size, size) for size in SIZES]
        cells = [_cell(architecture, direction, operator, samples, shape) for shape in shapes]
        name = f"sm_{architecture} {direction} {operator.memory}"
        yield f"{name:20}{samples:12}{channels:10}{''.join(cells)}"


def _cell(
    architecture: str, direction: str, operator: Operator, samples: int, shape: tuple[int, ...]
) -> str:
    launches, time, goal = call_time(architecture, direction, operator, samples, shape)
    return f"{launches:4}{1e6 * time:6.1f}/{1e6 * goal:5.1f}{' ' if time <= goal else '!'}"


def call_time(
    architecture: str, direction: str, operator: Operator, samples: int, shape: tuple[int, ...]
) -> tuple[int, float, float]:
    """Return how many launches a call makes, its seconds, and the goal."""
    features = default_features(architecture)
    found = list(plans(operator, direction, DTYPE, shape, architecture, features, samples))
    main = [plan for plan in found if plan.regime != PARAM_GRAD]
    params = param_grad_of(main[-1], sass_of)
    time = small_time(
        main, lambda plan: sass_of(plan.build, plan.architecture), blocks_per_sm, params
    )
    launches = ceil(samples / main[0].chunk) * len(main) + len(found) - len(main)
    moved = samples * prod(shape) * call_traffic(main[-1]).total / GPUS[architecture].copy
    return launches, time, SLACK * (moved + launches * LAUNCH)
