# SPDX-License-Identifier: MIT
"""Estimates of the registers that a thread of a row norm takes, before its kernel is compiled.

docs/kernels/row-norms.md says how the estimates were found. If an estimate is too low, registers
spill; if it is too high, a multiprocessor has fewer blocks.
"""

from typing import NamedTuple

from cunorm._core.dtypes import FLOAT16
from cunorm._core.tensor import WIDEST_ACCESS
from cunorm._row_norm.kernels import BackwardTypes, ForwardTypes, RowTypes

# Numbers of a GPU. The registers of a warp are all in one partition of its multiprocessor.
WARP, _SM_REGISTERS, _SM_PARTITIONS, _SM_THREADS, _MAX_REGISTERS = 32, 64 << 10, 4, 2048, 255
LARGE_TEAM = 128  # threads; without a gate, each may hold many elements
_OF_ACTIVATION = {"gelu": 56, "gelu_tanh": 8, "tanh": 8}  # registers for a forward's gate


class Limits(NamedTuple):
    """The limits within which a kernel is planned."""

    block_threads: int  # the threads of a block that has several teams
    preferred_elements: int  # the float32 elements of a row that a thread should hold
    of_warp: int  # the most such elements of a lane, if a warp holds the row
    most_elements: int  # the most in a large team without a gate, or if no more threads can share


_OF_FORWARD, _OF_BACKWARD = Limits(128, 32, 40, 64), Limits(256, 16, 16, 48)


def limits_of(types: RowTypes) -> Limits:
    return _OF_FORWARD if isinstance(types, ForwardTypes) else _OF_BACKWARD


def registers_of(
    types: RowTypes, elements: int, pack: int, of_plan: int = 0, *, in_large_block: bool = False
) -> int:
    """Return an estimate of the registers that a thread needs to hold `elements` of a row.

    `of_plan` is what `of_several`, `of_uneven` or `of_streamed` returns, or 0; in float64 it counts
    twice. `in_large_block` says that a block, not a cluster, of LARGE_TEAM threads or more has the
    row: a plain forward with narrow operands then needs no more for many elements.
    """
    if isinstance(types, ForwardTypes):
        return _of_forward(types, elements, pack, of_plan, in_large_block)
    return _of_backward(types, elements, pack, of_plan)


def _of_forward(
    types: ForwardTypes, elements: int, pack: int, of_plan: int, in_large_block: bool
) -> int:
    residual, words, held = types.residual, types.compute.itemsize // 4, types.held_itemsizes()
    registers = 16 + of_plan + _OF_ACTIVATION.get(types.formula.activation, 0)
    registers += 8 * ((residual is not None) + types.formula.pre_gate)  # to compute p
    if residual is not None and types.formula.pre_gate:
        registers += 40
    if residual is not None and FLOAT16 in (types.x, residual, types.residual_out):
        registers += 28
    if len(held) > 3:
        registers += 24
    more = elements * types.of_conversions() if min(held) < 4 else 0
    if pack <= 2:
        more += 8 + elements * 2
    is_plain = in_large_block and types.gate is None and residual is None
    is_narrow = max(held) < 4 and pack * max(held) >= WIDEST_ACCESS
    if elements * words > _OF_FORWARD.preferred_elements and not (is_plain and is_narrow):
        elements += 14 // words
    return int(registers * words + more + elements * _of_element(types, pack))


def _of_backward(types: BackwardTypes, elements: int, pack: int, of_plan: int) -> int:
    of_element, registers = _of_element(types, pack), 44 + of_plan
    if types.gate is not None:
        registers += 28
        of_element += 1.25
    more = 4 + elements * 0.75 if min(types.held_itemsizes()) < 4 else 0  # operands are converted
    if pack <= 2:
        more += 28 if pack == 1 else elements * 2
    return int(registers * (types.compute.itemsize // 4) + more + elements * of_element * 1.2)


def _of_element(types: RowTypes, pack: int) -> float:
    """Return the registers for an element of a row; each operand takes at least one for a pack."""
    return sum(max(size / 4, 1 / pack) for size in types.held_itemsizes())


def of_several(types: RowTypes) -> int:
    """Return how many more registers a thread needs if some teams of its block may have no row."""
    residual = types.residual if isinstance(types, ForwardTypes) else None
    return 8 if residual is None else 8 + 6 * residual.itemsize


def of_uneven(types: RowTypes, width: int, threads: int, pack: int) -> int:
    """Return the registers for guards of packs, and of a block's sums if it is no power of two."""
    is_even = width % (threads * pack) == 0 and threads & (threads - 1) == 0
    if is_even or not types.formula.center or isinstance(types, BackwardTypes):
        return 0
    return int(8 * _of_element(types, pack))


def of_streamed(types: RowTypes, elements: int) -> int:
    """Return how many more registers a thread needs if rows are streamed."""
    if isinstance(types, ForwardTypes):
        return 16
    more = 12 + (int(elements * 1.4) if min(types.held_itemsizes()) >= 4 else 0)
    are_sums_alone = types.dx is types.dresidual is types.dgate is None
    return more + 28 if are_sums_alone else more


def room_of(registers: int, threads: int) -> int:
    """Return how many blocks on a multiprocessor have enough registers, possibly none."""
    registers = -(-registers // 8) * 8
    if registers > _MAX_REGISTERS:
        return 0
    warps = _SM_PARTITIONS * (_SM_REGISTERS // _SM_PARTITIONS // (registers * WARP))
    return min(warps * WARP, _SM_THREADS) // threads
