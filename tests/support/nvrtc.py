# SPDX-License-Identifier: MIT
"""NVRTC without a GPU: compile a build for any architecture, and read its resource usage."""

from __future__ import annotations

import re
from typing import NamedTuple

from tests.support.internals import KernelBuild, _cuda, source_text

# The options that CuPy adds to a RawKernel, besides the architecture.
CUPY_OPTIONS = ("-ftz=true", "--device-as-default-execution-space")


class ResourceUsage(NamedTuple):
    """The resources of one kernel: registers of a thread; the rest in bytes."""

    registers: int
    spill_stores: int
    spill_loads: int
    shared: int
    stack: int


class Compiled(NamedTuple):
    """A compiled build, and the log of ptxas."""

    cubin: bytes
    ptx: str
    log: str


def compile_build(build: KernelBuild, architecture: str, text: str | None = None) -> Compiled:
    """Compile a build, by default with its kernel's text, with the launcher's own options."""
    from cupy.cuda import nvrtc

    options = (*_cuda.compile_options(build), *CUPY_OPTIONS)
    options += (f"--gpu-architecture=sm_{architecture}", "--ptxas-options=-v")
    text = text or source_text(build.kernel)
    program = nvrtc.createProgram(text, f"{build.kernel}.cu", (), ())
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
    """Read the resource usage of the one kernel in a log of ptxas."""

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
