# SPDX-License-Identifier: MIT
"""The vector instructions that each provider uses on a CPU, and a limit on them.

cunorm uses the instructions for which it is compiled. If these lack AVX-512, no other provider may
use it, so that all are timed as on a machine without AVX-512.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

import torch

import cunorm
from bench.compare import copies
from cunorm._backends.cpu.compiler import cpu_identity


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
    """Return the instructions of the known providers, as in "cunorm AVX2, torch AVX2"."""
    ask = {"cunorm": _ours, "torch": _torch, "torch.compile": _inductor, "jax": _xla}
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


def _xla() -> str:
    """Return XLA's limit, or the CPU's instructions: XLA does not report which ones it uses."""
    given = re.findall(r"--xla_cpu_max_isa=(\S+)", os.environ.get("XLA_FLAGS", ""))
    has = (name for name in ("avx512f", "avx2") if name in cpu_identity())
    return _spelled(given[-1] if given else next(has, "unknown").removesuffix("f"))


def _spelled(name: str) -> str:
    return name.upper().replace("AVX512", "AVX-512")
