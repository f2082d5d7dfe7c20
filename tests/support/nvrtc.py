# SPDX-License-Identifier: MIT
"""NVRTC without a GPU: compile a build for any architecture and read what ptxas says of it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import product
from typing import Any, NamedTuple

import pytest

from tests.support.internals import Build, _cuda, source_text

# What CuPy 13 and 14 add to the options of a RawKernel, beside the architecture.
CUPY_OPTIONS = ("-ftz=true", "--device-as-default-execution-space")


class ResourceUsage(NamedTuple):
    """What one kernel takes: registers of a thread, the rest in bytes."""

    registers: int
    spill_stores: int
    spill_loads: int
    shared: int
    stack: int


class Compiled(NamedTuple):
    """What NVRTC makes of a build, and what ptxas says of it."""

    cubin: bytes
    ptx: str
    log: str


def compile_build(build: Build, architecture: str) -> Compiled:
    """Compile a build with the launcher's own options."""
    from cupy.cuda import nvrtc

    options = (
        *_cuda.compile_options(build),
        *CUPY_OPTIONS,
        f"--gpu-architecture=sm_{architecture}",
        "--ptxas-options=-v",
    )
    program = nvrtc.createProgram(source_text(build.kernel), f"{build.kernel}.cu", (), ())
    try:
        nvrtc.compileProgram(program, options)
        ptx = nvrtc.getPTX(program)
        text = ptx.decode() if isinstance(ptx, bytes) else ptx
        return Compiled(nvrtc.getCUBIN(program), text, nvrtc.getProgramLog(program))
    except nvrtc.NVRTCError:
        log = nvrtc.getProgramLog(program)
        raise RuntimeError(_cuda.compile_error_text(build, options, log)) from None
    finally:
        nvrtc.destroyProgram(program)


def resource_usage(log: str) -> ResourceUsage:
    """Read ptxas's account of the one kernel that a log is of."""

    def number(pattern: str, default: int | None = None) -> int:
        found: list[str] = re.findall(rf"(\d+) {pattern}", log)
        if default is not None and not found:
            return default
        if len(found) != 1:
            raise ValueError(f"{len(found)} times '{pattern}', expected once, in:\n{log}")
        return int(found[0])

    return ResourceUsage(
        registers=number("registers"),
        spill_stores=number("bytes spill stores"),
        spill_loads=number("bytes spill loads"),
        shared=number("bytes smem", default=0),
        stack=number("bytes stack frame"),
    )


# --- covers of builds -----------------------------------------------------------------------------

ARCHITECTURES = ("75", "80", "86", "89", "90", "100", "120")
SHARES = 16  # of a cover, a test each
_STATIC_SHARED_MEMORY = 48 << 10


def spilling(builds: Iterable[Build], architecture: str) -> list[str]:
    """Compile builds; return those that spill, or take more shared memory than there is."""
    found = []
    for build in builds:
        compiled = compile_build(build, architecture)
        usage = resource_usage(compiled.log)
        assert compiled.cubin.startswith(b"\x7fELF")
        spills = usage.spill_stores or usage.spill_loads or usage.stack
        if (spills and architecture == "90") or usage.shared > _STATIC_SHARED_MEMORY:
            found.append(f"{build}: {usage}")
    return found


def each_share() -> Any:
    """Return the decorator of a test of architectures and of shares of a cover.

    In CI there are half of them for 90, and one of each other: their text is the same.
    """
    others = [one for one in ARCHITECTURES if one != "90"]
    found = []
    for architecture, share in product(ARCHITECTURES, range(SHARES)):
        half = architecture == "90" and share % 2 == 0
        is_kept = half or (share < len(others) and others[share] == architecture)
        marks = () if is_kept else pytest.mark.exhaustive
        found.append(pytest.param(architecture, share, marks=marks))
    return pytest.mark.parametrize(("architecture", "share"), found)
