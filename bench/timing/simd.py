# SPDX-License-Identifier: MIT
"""The vector instructions that each provider uses on a CPU, and a limit on them.

cunorm uses the instructions for which it is compiled. If these lack AVX-512, no other provider may
use it, so that all are timed as on a machine without AVX-512.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch

import cunorm
from bench.compare import copies


def limit(march: str) -> None:
    """Compile cunorm for a -march, and limit the other providers; ValueError if it is too late.

    torch reads its variable at the first operation; inductor and XLA, not before their import.
    """
    copies.compile_for((cunorm,), march)
    if copies.has_avx512():
        return
    os.environ["ATEN_CPU_CAPABILITY"] = "avx2"  # inductor reads it, too
    os.environ["TORCHINDUCTOR_CPP_MARCH"] = march
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_max_isa=AVX2".strip()
    if (used := _torch()) == "AVX-512":
        raise ValueError(f"torch uses {used} already, and --march {march} has none")


def used(providers: Iterable[str]) -> str:
    """Return the instructions of providers, as in "cunorm AVX2, torch AVX2"; XLA reports none."""
    ask = {"cunorm": _ours, "torch": _torch, "torch.compile": _inductor}
    names = set(providers)
    return ", ".join(f"{name} {which()}" for name, which in ask.items() if name in names)


def _ours() -> str:
    macros = copies.macros()
    names = {"AVX-512": "__AVX512F__", "AVX2": "__AVX2__", "NEON": "__ARM_NEON"}
    return next((name for name, macro in names.items() if macro in macros), "less than AVX2")


def _torch() -> str:
    return _spelled(torch.backends.cpu.get_cpu_capability())


def _inductor() -> str:
    from torch._inductor import cpu_vec_isa

    return _spelled(str(cpu_vec_isa.pick_vec_isa()).partition(" ")[0])  # it may name several


def _spelled(name: str) -> str:
    return name.upper().replace("AVX512", "AVX-512")
