# SPDX-License-Identifier: MIT
"""A software GPU with given features, multiprocessors and order of threads.

with machine(features="clusters", multiprocessors=1, schedule="reverse") as launches:
    cunorm.rms_norm(x)  # launches[-1].build is the build that ran
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest

from tests import softgpu
from tests.support.gpu_arrays import OnCupy
from tests.support.internals import (
    GRID_LIMIT,
    Features,
    Launch,
    _cuda,
    _cuda_plan,
    _driver,
    _group_plan,
    _group_tiling,
)
from tests.support.remembered import clear_plans

SCHEDULES = {
    "lockstep": {"schedule": "lockstep"},
    "serial": {"schedule": "serial"},
    "reverse": {"schedule": "reverse"},
    "random": {"schedule": "random", "seed": 1},
}

needs_softgpu = pytest.mark.skipif(
    not softgpu.is_loaded(), reason=softgpu.unavailable() or "not loaded where there is a GPU"
)


def gpu() -> OnCupy:
    """Load the software GPU; return an object that copies arrays to and from it."""
    softgpu.load()
    return OnCupy()


@contextmanager
def machine(
    features: str = "",
    grid: int | None = None,
    sources: dict[str, str] | None = None,
    spared: int = 0,
    alone: bool = True,
    **settings: Any,
) -> Iterator[list[Launch]]:
    """Run calls on a software GPU; yield a list that gets each launch.

    `grid` limits the blocks of a launch, so that each block walks several rows, or each launch has
    only some of the samples. `sources` has source texts that replace those of kernels. `spared` is
    the number of bytes of shared memory that plans must not use. `alone` says whether a group
    norm's block may have a multiprocessor to itself. All other arguments are settings of softgpu.
    """
    softgpu.load()
    has = Features(**dict.fromkeys(features.split(), True))
    launches: list[Launch] = []
    start, text_of = _cuda.launch, _cuda.source_text
    texts = sources or {}
    keys_are_ambiguous = texts or "capability" in settings  # of loaded kernels: they are builds

    def noted(launch: Launch, *rest: Any) -> None:
        launches.append(launch)
        start(launch, *rest)

    with (
        softgpu.settings(**settings),
        mock.patch.object(_driver, "_LIBRARY", os.environ["SOFTGPU_LIBRARY"]),
        mock.patch.object(_cuda, "features_of", lambda capability: has),
        mock.patch.object(_cuda, "launch", noted),
        mock.patch.object(_cuda_plan, "GRID_LIMIT", grid or GRID_LIMIT),
        mock.patch.object(_cuda_plan, "_RESERVED_BYTES", spared or _cuda_plan._RESERVED_BYTES),
        mock.patch.object(
            _group_tiling, "_RESERVED_BYTES", spared or _group_tiling._RESERVED_BYTES
        ),
        mock.patch.object(
            _group_tiling, "_ALONE", _group_tiling._ALONE if alone else _group_tiling._SHARING
        ),
        mock.patch.object(_group_plan, "GRID_LIMIT", grid or GRID_LIMIT),
        mock.patch.object(_cuda, "source_text", lambda name: texts.get(name) or text_of(name)),
    ):
        clear_plans()  # cached plans are for another GPU
        if keys_are_ambiguous:
            _cuda.loaded.clear()
        try:
            yield launches
        finally:
            clear_plans()
            if keys_are_ambiguous:
                _cuda.loaded.clear()
