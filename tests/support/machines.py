# SPDX-License-Identifier: MIT
"""The CPU's builds for other instruction sets, with poisoned memory between passes.

A pass that reads a value which no earlier pass has stored gets a NaN, not the value that an earlier
row or call left there.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

from tests.support.host_code import INCLUDE, MACHINES, runs_here
from tests.support.internals import OnceMap, _compile, _dispatch

Edits = Mapping[str, tuple[str, str]]  # by header: a text that it has once, and the new text

_ROW = "packs += row.slot * ((row.walk.width + B::pack - 1) / B::pack);"
_GROUPS = "packs = reinterpret_cast<Items<B>*>(HandedOn<B>{sizes, handed_on}.items());"
POISON: Edits = {
    "row.cuh": (
        f"if constexpr (held_packs<B> > 0) {_ROW}",
        f"if constexpr (held_packs<B> > 0) {{ {_ROW}\n"
        "std::memset((void*)packs, 0xff, (row.walk.width + B::pack - 1) / B::pack * sizeof(V)); }",
    ),
    "group_items.cuh": (
        _GROUPS,
        f"{_GROUPS}\n"
        "if constexpr (in_thread) std::memset((void*)packs, 0xff, KEPT_H * sizeof(*packs));",
    ),
}
_loaded: dict[tuple[str, Path], OnceMap] = {}


def machines() -> tuple[str, ...]:
    """Return the names of the machines whose code runs here."""
    return tuple(filter(runs_here, MACHINES))


@contextmanager
def compiled_for(machine: str, headers: Path | None = None) -> Iterator[None]:
    """Compile for a machine, at the test's level, with `headers`, by default poisoned ones."""
    headers = headers or _poisoned()
    options = os.environ.get("CUNORM_CXXFLAGS", "")
    more = "" if machine == "native" else f" -march={machine}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUNORM_CXXFLAGS", options + more)
        patch.setattr(_compile, "_INCLUDE", headers)
        patch.setattr(_compile, "_HOST", headers / "host")
        patch.setattr(_compile, "loaded", _loaded.setdefault((options + more, headers), OnceMap()))
        _forget()
        try:
            yield
        finally:
            patch.undo()
            _forget()


def _forget() -> None:
    _compile._stand_ins.cache_clear()
    _dispatch.clear_calls()  # cached calls hold kernels


def edited(folder: Path, edits: Edits) -> Path:
    """Copy the CPU build's headers to a folder, with edits; return the copy's path."""
    copy = folder / "include"
    shutil.copytree(INCLUDE, copy)
    for name, (old, new) in edits.items():
        path = copy / "host" / name
        text = path.read_text("utf-8")
        assert text.count(old) == 1, f"{name} must have exactly once: {old}"
        path.write_text(text.replace(old, new), "utf-8")
    return copy


@cache
def _poisoned() -> Path:
    folder = tempfile.TemporaryDirectory(prefix="cunorm-headers-")
    _folders.append(folder)
    return edited(Path(folder.name), POISON)


_folders: list[tempfile.TemporaryDirectory[str]] = []  # removed when the process ends
