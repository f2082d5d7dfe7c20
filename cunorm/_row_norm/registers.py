# SPDX-License-Identifier: MIT
"""The registers that a thread of a row norm takes, before its kernel is compiled.

docs/kernels/row-norms.md says how they were found. An estimate that is too low makes registers
spill; one that is too high leaves a multiprocessor fewer blocks.
"""

from typing import NamedTuple

from cunorm._core.dtypes import FLOAT16
from cunorm._row_norm.kernels import BackwardTypes, ForwardTypes, RowTypes

# Of a multiprocessor; a warp's registers are in one of its partitions.
WARP, _SM_REGISTERS, _SM_PARTITIONS, _SM_THREADS, _MAX_REGISTERS = 32, 64 << 10, 4, 2048, 255
# More registers of a thread: where its block has several teams, some of which may have no row;
# where a streamed backward writes parameters' gradients alone; for the activation of a forward's
# gate.
_OF_SEVERAL, _OF_SUMS_ALONE = 8, 28
_OF_ACTIVATION = {"gelu": 56, "gelu_tanh": 8, "tanh": 8}


class Tuning(NamedTuple):
    """A kernel's limits for a thread, and the registers that it takes."""

    block_threads: int  # of a block of several teams
    preferred_elements: int  # of a row that a thread holds, of float32
    most_elements: int  # the same, where a row is too long for more threads
    registers: int  # beside those that hold the row and its sums
    element_factor: float = 1  # of those that hold the row and its sums
    narrow_registers: int = 0  # more, where operands are converted
    narrow_element: float = 0  # the same for each element
    single_registers: int = 0  # more, where packs are of one element
    single_element: float = 0  # the same for each element
    pair_registers: int = 0  # more, where packs are of two
    pair_element: float = 0
    streamed_registers: int = 0  # more, where rows are streamed
    streamed_element: float = 0  # the same for each element, if no operand is narrower than float32
    consumed_registers: int = 0  # more for each operand that p is made of, beside x
    both_registers: int = 0  # more, where these are a residual and a gate
    half_registers: int = 0  # more, where float16 and a residual are added
    many_registers: int = 0  # more, where more than three operands are held
    several_residual: int = 0  # more, for a float32 residual where a block has several teams
    many_elements: int = 0  # as for so many elements more, where more than preferred are held
    uneven_elements: int = 0  # the same, where a centered row leaves lanes idle, or lacks a warp
    more_from_100: int = 0  # registers, where compute capability 10.0 and later are compiled for
    gate_registers: int = 0  # more, for an activation
    gate_element: float = 0  # the same for each element


TUNING = {
    ForwardTypes: Tuning(
        block_threads=128,
        preferred_elements=32,
        most_elements=64,
        registers=16,
        narrow_element=0.5,
        single_registers=8,
        single_element=2,
        pair_registers=8,
        pair_element=2,
        consumed_registers=8,
        both_registers=40,
        half_registers=28,
        many_registers=24,
        several_residual=24,
        many_elements=14,
        uneven_elements=8,
        more_from_100=2,
        streamed_registers=16,
    ),
    BackwardTypes: Tuning(
        block_threads=256,
        preferred_elements=16,
        most_elements=48,
        registers=44,
        element_factor=1.2,
        narrow_registers=4,
        narrow_element=0.75,
        single_registers=28,
        pair_element=2,
        streamed_registers=12,
        streamed_element=1.4,
        gate_registers=28,
        gate_element=1.25,
    ),
}


def registers_of(types: RowTypes, elements: int, pack: int, of_plan: int = 0) -> int:
    """Return about how many registers a thread needs to hold these elements of a row.

    `of_plan` are those that its plan takes beside what others do, if it computes in float32.
    """
    tuning, held = TUNING[type(types)], types.held_itemsizes()
    of_element = _of_element(types, pack)
    registers: float = tuning.registers + of_plan
    if types.gate is not None:
        registers += tuning.gate_registers
        of_element += tuning.gate_element
    if isinstance(types, ForwardTypes):
        consumed = (types.residual is not None) + types.formula.pre_gate
        registers += tuning.consumed_registers * consumed
        registers += tuning.both_registers if consumed == 2 else 0
        registers += _OF_ACTIVATION.get(types.formula.activation, 0)
        if types.residual is not None and FLOAT16 in (types.x, types.residual, types.residual_out):
            registers += tuning.half_registers
    if len(held) > 3:
        registers += tuning.many_registers
    more: float = 0
    if min(held) < 4:
        more = tuning.narrow_registers + elements * tuning.narrow_element
    if pack == 1:
        more += tuning.single_registers + elements * tuning.single_element
    elif pack == 2:
        more += tuning.pair_registers + elements * tuning.pair_element
    words = types.compute.itemsize // 4
    if elements * words > tuning.preferred_elements:
        elements += tuning.many_elements // words
    of_row = elements * of_element * tuning.element_factor
    return int(registers * words + more + of_row)


def _of_element(types: RowTypes, pack: int) -> float:
    """Return the registers that hold an element of a row: one has a narrow pack, or half of one."""
    return sum(max(size / 4, 1 / pack) for size in types.held_itemsizes())


def of_several(types: RowTypes) -> int:
    """Return the registers that a thread takes more where its block has several teams."""
    residual = types.residual if isinstance(types, ForwardTypes) else None
    of_residual = residual.itemsize / 4 if residual is not None else 0
    return _OF_SEVERAL + int(TUNING[type(types)].several_residual * of_residual)


def of_uneven(types: RowTypes, width: int, threads: int, pack: int) -> int:
    """Return the registers for guards of a block's last packs, and of its last sums."""
    is_even = width % (threads * pack) == 0 and threads & (threads - 1) == 0
    if is_even or not types.formula.center:
        return 0
    return int(TUNING[type(types)].uneven_elements * _of_element(types, pack))


def of_streamed(types: RowTypes, elements: int) -> int:
    """Return the registers that a thread takes more where rows are streamed."""
    tuning = TUNING[type(types)]
    of_element = tuning.streamed_element if min(types.held_itemsizes()) >= 4 else 0
    more = tuning.streamed_registers + int(elements * of_element)
    if isinstance(types, BackwardTypes) and types.dx is types.dresidual is types.dgate is None:
        more += _OF_SUMS_ALONE
    return more


def room_of(registers: int, threads: int) -> int:
    """Return for how many blocks on a multiprocessor there are registers; 0: for none."""
    registers = -(-registers // 8) * 8
    if registers > _MAX_REGISTERS:
        return 0
    warps = _SM_PARTITIONS * (_SM_REGISTERS // _SM_PARTITIONS // (registers * WARP))
    return min(warps * WARP, _SM_THREADS) // threads
