# SPDX-License-Identifier: MIT
"""The handlers, made known to XLA once in a process."""

from __future__ import annotations

import atexit
from functools import cache
from typing import Any

import jax
import jax.ffi

from cunorm.jax import _frame
from cunorm.jax._handler import handler, run_on_cpu, run_on_cuda, was_called

CPU_TARGET, CUDA_TARGET = "cunorm_on_cpu", "cunorm_on_cuda"

_handlers: list[Any] = []  # XLA calls them for as long as the process lives


def refused() -> str | None:
    """Return why this JAX cannot call the kernels, None where it can."""
    version = _version()
    return None if _frame.is_known(version) else _frame.refusal(version)


@cache
def register() -> None:
    """Make the handlers known.

    Raises
    ------
    ImportError
        If JAX's foreign function interface is of a version that is not known.
    """
    reason = refused()
    if reason is not None:
        raise ImportError(f"cunorm.jax: {reason}")
    atexit.register(_finish)
    for target, run, platform in (
        (CPU_TARGET, run_on_cpu, "cpu"),
        (CUDA_TARGET, run_on_cuda, "CUDA"),
    ):
        made = handler(run)
        _handlers.append(made)
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(made), platform=platform)


def _finish() -> None:
    """Wait for what XLA has still to run, which would wait for the GIL of a Python that has gone.

    A device runs what it was given before a further computation is done, if nobody holds results.
    """
    if was_called():
        after = jax.jit(lambda x: x + 1)
        devices = {*jax.local_devices(), *jax.local_devices(backend="cpu")}
        jax.block_until_ready([after(jax.device_put(0.0, device)) for device in devices])


@cache
def _version() -> tuple[int, int]:
    return _frame.library_version(jax.ffi.include_dir())
