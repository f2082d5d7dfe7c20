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
    """Return the work of a warp along a path."""
    total = fma = integer = special = shuffles = shared = exchanges = 0.0
    steps = list(steps)
    for one, times in steps:
        total += times
        fma += times * (one.name in _FMA)
        integer += times * (one.name in _INTEGER)
        special += times * (one.name in _SPECIAL)
        shuffles += times * (one.name == "SHFL")
        shared += times * _shared_clocks(one)
        exchanges += times * one.code.startswith("SYNCS.PHASECHK")
    return Work(total, alone_clocks(steps), fma, integer, special, shuffles, shared, exchanges)


def _shared_clocks(one: Instruction) -> float:
    return max(1.0, 32 * one.bytes / _BANK_BYTES) if one.name in _SHARED else 0.0


def alone_clocks(steps: Iterable[Step]) -> float:
    """Return the clocks of a lone warp, which issues in order, and waits for its operands.

    Waits for loads from global memory and for predicates are left out.
    """
    ready: dict[str, float] = {}
    clock = elapsed = 0.0
    for one, times in steps:
        before = clock
        written = results(one)
        read = registers(one.operands)
        clock = max([clock + 1, *(ready.get(name, 0.0) for name in read)])
        if one.name == "BAR":
            clock += _BARRIER
        latency = _UNIT if one.name in _UNITS else _ARITHMETIC
        ready |= dict.fromkeys(written, clock + latency)
        elapsed += times * (clock - before)
    return elapsed
