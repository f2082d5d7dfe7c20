# SPDX-License-Identifier: MIT
"""Builds as NVRTC compiles them for any GPU, without a GPU.

The folder $CUNORM_STATIC_CACHE, if set, keeps what is compiled: then only new builds are compiled,
and after a change of the planner or the model, a table takes seconds instead of minutes.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from bench.plans.sass import disassemble
from cunorm._backends import cuda as _cuda
from cunorm._backends.sources import source_text
from cunorm._core.build import KernelBuild

# The options that CuPy adds to a RawKernel.
_CUPY_OPTIONS = ("-ftz=true", "--device-as-default-execution-space")


class Compiled(NamedTuple):
    """A build, compiled; the rest is the resource usage that ptxas prints."""

    sass: str
    registers: int  # of a thread
    spill_stores: int  # bytes, like all that follow
    spill_loads: int
    stack: int
    shared: int


@lru_cache(maxsize=256)
def compiled(build: KernelBuild, architecture: str) -> Compiled:
    """Return a build as the launcher compiles it."""
    folder = os.environ.get("CUNORM_STATIC_CACHE")
    if not folder:
        return _compile(build, architecture)
    code = re.sub(r"(\s*(//.*)?\n)+", "\n", source_text(build.kernel))  # without comments
    options = _cuda.compile_options(build)
    key = repr((nvrtc_version(), code, *options, architecture, *Compiled._fields)).encode()
    path = Path(folder, sha256(key).hexdigest())
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f"{path.name}.{os.getpid()}")  # others see only complete files
        new.write_bytes(zlib.compress(json.dumps(_compile(build, architecture)).encode(), 1))
        new.replace(path)
    return Compiled(*json.loads(zlib.decompress(path.read_bytes())))


def _compile(build: KernelBuild, architecture: str) -> Compiled:
    from cupy.cuda import nvrtc

    own = _cuda.compile_options(build)
    options = (*own, *_CUPY_OPTIONS, f"--gpu-architecture=sm_{architecture}", "--ptxas-options=-v")
    program = nvrtc.createProgram(source_text(build.kernel), f"{build.kernel}.cu", (), ())
    try:
        nvrtc.compileProgram(program, options)
        return _read(nvrtc.getProgramLog(program), disassemble(nvrtc.getCUBIN(program)))
    except nvrtc.NVRTCError:
        log = nvrtc.getProgramLog(program)
        raise RuntimeError(_cuda.compile_error_text(build, options, log)) from None
    finally:
        nvrtc.destroyProgram(program)


def _read(log: str, sass: str) -> Compiled:
    """Read ptxas's log."""
    shared = re.search(r"(\d+) bytes smem", log)
    (registers,) = re.findall(r"(\d+) registers", log)  # of the one kernel
    ((stack, stores, loads),) = re.findall(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log
    )
    usage = (registers, stores, loads, stack, shared[1] if shared else 0)
    return Compiled(sass, *map(int, usage))


def nvrtc_version() -> str:
    """Return the version of NVRTC on this machine."""
    return ".".join(map(str, _cuda.nvrtc_version()))
