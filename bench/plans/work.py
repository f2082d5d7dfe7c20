# SPDX-License-Identifier: MIT
"""The cost of SASS instructions on a multiprocessor: the pipes that they use, and their time.

The pipes are those of the CUDA C++ Programming Guide's table of arithmetic throughput. An
instruction in none of the lists takes only an issue slot.
"""

from __future__ import annotations

from collections.abc import Iterable

from bench.plans.model import Work
from bench.plans.paths import Step
from bench.plans.pointers import registers, results
from bench.plans.sass import Instruction

_FMA = {"FFMA", "FMUL", "FADD", "FFMA2", "FMUL2", "FADD2", "HFMA2", "HMUL2", "HADD2"}
_INTEGER = {
    *("IADD3", "VIADD", "LOP3", "LEA", "SHF", "SHL", "PRMT", "ISETP", "FSETP", "SEL", "FSEL"),
    *("FMNMX", "IMNMX", "VIMNMX", "IABS", "PLOP3", "IMAD", "F2FP", "MOV"),
}
_SPECIAL = {"MUFU", "I2F", "F2I", "F2F", "POPC", "FLO"}
_SHARED = {"LDS", "STS", "LDSM", "LDG", "STG", "LDGSTS", "STAS"}
_BANK_BYTES = 128  # bytes that a multiprocessor's shared memory and L1 move per clock
# Clocks until a result of arithmetic or of another unit can be used (published microbenchmarks
# since Volta: 4; 18 to 33 for special functions, shuffles, shared memory).
_ARITHMETIC, _UNIT, _UNITS = 4.0, 30.0, _SPECIAL | {"LDS", "LDSM", "SHFL"}
_BARRIER = 30.0  # clocks until warps go on after a barrier (published microbenchmarks)


def work_of(steps: Iterable[Step]) -> Work:
    """Return the work of a warp along a path.

    A lone warp issues in order, and waits for its operands. Its waits for loads from global memory
    and for predicates are left out.
    """
    ready: dict[str, float] = {}
    clock = 0.0
    found = Work()
    for one, times in steps:
        before = clock
        clock = max([clock + 1, *(ready.get(name, 0.0) for name in registers(one.operands))])
        if one.name == "BAR":
            clock += _BARRIER
        latency = _UNIT if one.name in _UNITS else _ARITHMETIC
        ready |= dict.fromkeys(results(one), clock + latency)
        found = found.plus(_of_instruction(one, clock - before), times)
    return found


def _of_instruction(one: Instruction, alone: float) -> Work:
    return Work(
        total=1,
        alone=alone,
        fma=one.name in _FMA,
        integer=one.name in _INTEGER,
        special=one.name in _SPECIAL,
        shuffles=one.name == "SHFL",
        shared=max(1.0, 32 * one.bytes / _BANK_BYTES) if one.name in _SHARED else 0.0,
        exchanges=one.code.startswith("SYNCS.PHASECHK"),
    )
