# SPDX-License-Identifier: MIT
"""Give tests the state of a new process: no known compiler, no loaded kernel, an empty cache."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import cunorm
from tests.support.described import with_empty_caches
from tests.support.internals import _compile, _compiler, _files, compiler

posix = pytest.mark.skipif(os.name != "posix", reason="runs shell scripts as compilers")
compiles = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")
gcc = pytest.mark.skipif(compiler() is None or not compiler().is_gcc, reason="is about GCC")

ANSWERS = 'case "$*" in *--version*) exec $real --version;; esac\nfor last; do :; done\n'


def script(folder: Path, text: str) -> str:
    """Write a shell script that serves as compiler; $real is the real compiler."""
    command = folder / "compiler"
    real = " ".join(compiler().command)
    command.write_text(f'#!/bin/sh\nreal="{real}"\n{text}\n')
    command.chmod(0o755)
    return os.fspath(command)


@cache
def copies() -> str:
    """Return a fake compiler's script: it copies the library that `check` needs."""
    with pytest.MonkeyPatch.context() as patch:
        with_empty_caches(patch)
        check()
        (build,) = _compile.loaded.values
    library, _ = _compile._compiled(build)
    return f'{ANSWERS}exec cp "{library}" "$last"'


@contextmanager
def fresh_process(**environment: str | os.PathLike[str]) -> Iterator[pytest.MonkeyPatch]:
    """Clear the known compilers and loaded kernels, and set environment variables."""

    def clear() -> None:
        _files._chosen_folder.cache_clear()
        _files._named_folder.cache_clear()
        _compiler.forget()

    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, os.fspath(value))
            with_empty_caches(patch)
            clear()
            yield patch
    finally:
        clear()


@contextmanager
def separate_cache(folder: Path, text: str | None = None, **environment: str) -> Iterator[Path]:
    """Use a cache in a folder, and a shell script as compiler: by default `copies()`."""
    environment["CXX"] = script(folder, text or copies()) + environment.get("CXX", "")
    cache = folder / "cache"
    with fresh_process(CUNORM_CACHE_DIR=cache, **environment):
        yield cache


def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets the name of each kernel that is compiled from now on."""
    found: list[str] = []
    compile_build = _compile._compile

    def compile_and_record(build, *rest):
        found.append(build.kernel)
        compile_build(build, *rest)

    monkeypatch.setattr(_compile, "_compile", compile_and_record)
    return found


def check() -> None:
    """Make a call that needs one build, and check its result."""
    y = cunorm.l2_norm(np.array([[3, 4, 0, 0]], dtype=np.float32))
    np.testing.assert_allclose(y, [[0.6, 0.8, 0, 0]], rtol=1e-6)


def libraries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.so"))
