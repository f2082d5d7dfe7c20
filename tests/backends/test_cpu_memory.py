# SPDX-License-Identifier: MIT
"""What a CPU's kernels ask of its caches: that lines come early, and how large the last one is."""

import os
import platform
import subprocess

import numpy as np
import pytest

import cunorm
from tests.support.caches import compiles
from tests.support.internals import _caches, _compile, _compiler, cache_folder, compiler

TO_SECOND_LEVEL = "prefetcht1"  # of rows to come; of results, to the first
PREFETCHES = ("prefetcht", "prefetchw", "prfm")


def assembly(build, folder):
    source = folder / "kernel.cpp"
    source.write_text(_compile._translation_unit(build))
    includes = [f"-I{_compile._HOST}", f"-I{_compile._INCLUDE}"]
    optional = _compiler.optional(compiler(), _compile._OPTIONS, cache_folder())
    options = [*_compile._OPTIONS, *optional, *includes]
    command = [*compiler().command, *options, "-S", os.fspath(source), "-o", "-"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def row_norm(x):
    forward = cunorm.layer_norm_forward(x)
    cunorm.layer_norm_backward(x, x, mean=forward.mean, rstd=forward.rstd)


def group_norm(x, memory):
    axis = {"last": -1, "first": 1}[memory]
    forward = cunorm.group_norm_forward(x, 4, activation="silu", channel_axis=axis)
    statistics = {"mean": forward.mean, "rstd": forward.rstd}
    cunorm.group_norm_backward(x, x, 4, activation="silu", channel_axis=axis, **statistics)


@compiles
@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64", "aarch64", "arm64"),
    reason="it is not known what prefetches are called there",
)
@pytest.mark.parametrize(
    ("call", "shape"),
    [
        (lambda x: group_norm(x, "last"), (2, 4096, 64)),
        (lambda x: group_norm(x, "first"), (2, 64, 4096)),
        (lambda x: group_norm(x, "first"), (20, 64, 4096)),
    ],
    ids=["channels last", "channels first", "samples"],
)
def test_every_launch_over_memory_prefetches(call, shape, loads, tmp_path):
    """GCC may take a function that only prefetches for one that does nothing."""
    call(np.zeros(shape, dtype=np.float32))
    passes = [build for build in loads if reads_memory(build)]
    assert len(passes) >= 2
    for build in passes:
        assert any(name in assembly(build, tmp_path) for name in PREFETCHES), build


@compiles
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="looks for x86's names")
@pytest.mark.parametrize(("width", "count"), [(4096, True), (65536, False)])
def test_nothing_is_prefetched_of_rows_to_come_where_one_fills_the_caches(
    width, count, loads, tmp_path
):
    row_norm(np.zeros((20, width), dtype=np.float32))
    passes = [build for build in loads if reads_memory(build)]
    assert len(passes) == 2
    for build in passes:
        assert (TO_SECOND_LEVEL in assembly(build, tmp_path)) == count, build


def reads_memory(build):
    """Whether a build goes over x, and not only over sums."""
    macros = dict(build.macros)
    combines_only = macros.get("FIND") == "false" and macros.get("WRITE") == "false"
    return "X_T" in macros and not combines_only and not prefetched_before(build)


def prefetched_before(build):
    """Whether it only finds the moments of contiguous groups, which the pass before prefetches."""
    macros = dict(build.macros)
    finds_only = macros.get("WRITE") == "false" and macros.get("CHANNELS_LAST") == "false"
    return build.kernel == "group_norm_forward" and finds_only


@pytest.mark.parametrize(
    ("said", "size"), [("32768K", 32 << 20), ("480M", 480 << 20), ("?", 32 << 20), (None, 32 << 20)]
)
def test_the_last_cache_is_as_large_as_the_system_says_or_as_measured(
    said, size, monkeypatch, tmp_path
):
    if said is not None:
        (tmp_path / "size").write_text(said + "\n")
    monkeypatch.setattr(_caches, "_SIZE", tmp_path / "size")
    assert _caches.last_cache_bytes.__wrapped__() == size
