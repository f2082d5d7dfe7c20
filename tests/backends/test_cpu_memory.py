# SPDX-License-Identifier: MIT
"""Prefetches in the CPU's kernels, and the size of its last cache."""

import os
import platform
import subprocess

import numpy as np
import pytest

import cunorm
from tests.support.caches import compiles
from tests.support.internals import _caches, _compile, _compiler, cache_folder, compiler

PREFETCHES = ("prefetcht", "prefetchw", "prfm")


def assembly(build, folder):
    source = folder / "kernel.cpp"
    source.write_text(_compile._translation_unit(build))
    includes = [f"-I{_compile._HOST}", f"-I{_compile._INCLUDE}"]
    optional = _compiler.optional(compiler(), _compile._OPTIONS, cache_folder())
    options = [*optional, *_compile._OPTIONS, "-O1", *includes]
    command = [*compiler().command, *options, "-S", os.fspath(source), "-o", "-"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@compiles
@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64", "aarch64", "arm64"),
    reason="the names of prefetches on this machine are not known",
)
@pytest.mark.parametrize(
    ("shape", "axis"),
    [((20, 4096), None), ((2, 4096, 64), -1), ((2, 64, 4096), 1), ((20, 64, 4096), 1)],
    ids=["rows", "channels last", "channels first", "samples"],
)
def test_every_build_of_a_norm_prefetches(shape, axis, loads, tmp_path):
    """GCC may remove a function that only prefetches."""
    x = np.zeros(shape, dtype=np.float32)
    if axis is None:
        cunorm.rms_norm(x)
        cunorm.rms_norm_backward(x, x, rstd=x[:, 0].copy())
    else:
        options = {"num_groups": 4, "activation": "silu", "channel_axis": axis}
        f = cunorm.group_norm_forward(x, **options)
        cunorm.group_norm_backward(x, x, mean=f.mean, rstd=f.rstd, **options)
    assert len(loads) >= 2
    for build in loads:
        assert any(name in assembly(build, tmp_path) for name in PREFETCHES), build


@pytest.mark.parametrize(
    ("text", "size"), [("32768K", 32 << 20), ("480M", 480 << 20), ("?", 32 << 20), (None, 32 << 20)]
)
def test_the_last_cache_is_as_large_as_the_system_says_or_else_32_mib(
    text, size, monkeypatch, tmp_path
):
    if text is not None:
        (tmp_path / "size").write_text(text + "\n")
    monkeypatch.setattr(_caches, "_SIZE", tmp_path / "size")
    assert _caches.last_cache_bytes.__wrapped__() == size
