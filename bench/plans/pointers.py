# SPDX-License-Identifier: MIT
"""Find the pointer arguments from which the addresses in a kernel's SASS are computed.

A pointer is named by its offset in the arguments, in bytes. The analysis follows pointers through
registers, along every path of the kernel.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

from bench.plans.sass import Block, Instruction, blocks

# The offset of the arguments in constant bank 0.
_ARGUMENTS = {"75": 0x160, "80": 0x160, "86": 0x160, "89": 0x160, "90": 0x210}
_ARGUMENTS_LATER = 0x380

_REGISTER = re.compile(r"\b(?P<kind>U?R)(?P<number>\d+)\b")
_CONSTANT = re.compile(r"c\[0x0\]\[(?P<offset>0x[0-9a-f]+)\]")
_ADDRESS = re.compile(r"(?<!desc)\[(?P<inside>[^\]]*R\d[^\]]*)\]")
_DESCRIPTOR = re.compile(r"desc\[[^\]]*\]")
_PREDICATE = re.compile(r"^!?U?P(?:T|\d)$")
_NO_RESULT = ("ST", "BRA", "BAR", "EXIT", "CALL", "RET", "RED", "LDGSTS", "BSSY", "BSYNC")
LOADS, STORES = ("LDG", "LD"), ("STG", "ST")
# Instructions that compute addresses; all others compute values.
_ADDRESSES = ("IMAD", "IADD", "LEA", "MOV", "R2UR", "SEL", "VIADD", "LDC")

Reached = dict[str, frozenset[int]]


def registers(text: str) -> list[str]:
    """Return the registers in a text."""
    return [found[0] for found in _REGISTER.finditer(text)]


@lru_cache(maxsize=1 << 14)
def results(instruction: Instruction) -> list[str]:
    """Return the registers that an instruction writes."""
    if instruction.name.startswith(_NO_RESULT) or "SETP" in instruction.name:
        return []
    arguments = instruction.arguments
    first = next((a for a in arguments if not _PREDICATE.match(a)), "")
    found = _REGISTER.fullmatch(first)
    if found is None:
        return []
    count = _result_registers(instruction)
    starts = [int(found["number"])]
    if instruction.bytes == 32 and (other := _REGISTER.fullmatch(arguments[1])):
        starts.append(int(other["number"]))
    return [f"{found['kind']}{start + i}" for start in starts for i in range(count)]


def _result_registers(instruction: Instruction) -> int:
    if instruction.bytes >= 8:
        return min(4, instruction.bytes // 4)
    doubles = ("DADD", "DMUL", "DFMA", "F2F.F64", "I2F.F64")
    return 2 if ".WIDE" in instruction.code or instruction.code.startswith(doubles) else 1


@lru_cache(maxsize=8)
def traced(
    text: str, architecture: str, pointers: frozenset[int]
) -> tuple[list[Block], dict[Instruction, frozenset[int]]]:
    """Return the blocks of a disassembly, and the result of `pointers_of` for them."""
    code = blocks(text)
    return code, pointers_of(code, architecture, pointers)


def pointers_of(
    code: list[Block], architecture: str, pointers: frozenset[int]
) -> dict[Instruction, frozenset[int]]:
    """Map every access to global memory to the pointers that its address is computed from."""
    base = _ARGUMENTS.get(architecture, _ARGUMENTS_LATER)
    entries: list[Reached | None] = [{}] + [None] * (len(code) - 1)
    worklist, found = [0], {}
    while worklist:
        number = worklist.pop()
        reached = dict(entries[number] or {})
        for instruction in code[number].instructions:
            if instruction.name in (*LOADS, *STORES, "LDGSTS"):
                found[instruction] = frozenset().union(*_address(instruction, reached))
            _transfer(instruction, reached, base, pointers)
        for other in _successors(code, number):
            merged = _merge(entries[other], reached)
            if merged != entries[other]:
                entries[other] = merged
                worklist.append(other)
    return found


def _successors(code: list[Block], number: int) -> list[int]:
    """Return the successors of a block; after a call, only those that no other block leads to.

    A call is a slow path that returns numbers. The fast path beside the call leads to the same
    code, with the same pointers in its registers.
    """
    block = code[number]
    if not any(one.is_call for one in block.instructions):
        return block.next
    others = {n for i, other in enumerate(code) if i != number for n in other.next}
    return [n for n in block.next if n not in others]


def _address(instruction: Instruction, reached: Reached) -> Iterator[frozenset[int]]:
    text = _DESCRIPTOR.sub("", instruction.operands)
    inside = [match["inside"] for match in _ADDRESS.finditer(text)]
    for register in registers(inside[-1] if inside else ""):
        yield reached.get(register, frozenset())


def _transfer(
    instruction: Instruction, reached: Reached, base: int, pointers: frozenset[int]
) -> None:
    written = results(instruction)
    if not written:
        return
    slots: frozenset[int] = frozenset()
    constants = [int(c["offset"], 16) - base for c in _CONSTANT.finditer(instruction.operands)]
    if instruction.name.removeprefix("U").startswith(_ADDRESSES):
        sources = instruction.operands.partition(",")[2]
        known = (reached.get(register, frozenset()) for register in registers(sources))
        slots = frozenset().union(*known, (slot for slot in constants if slot in pointers))
    wide_constant = instruction.name in ("LDC", "ULDC", "LDCU") and constants
    for index, register in enumerate(written):
        now = slots
        if wide_constant:
            now = frozenset({constants[0] + 4 * index} & pointers)
        if instruction.predicate:
            now |= reached.get(register, frozenset())
        reached[register] = now


def _merge(old: Reached | None, new: Reached) -> Reached:
    if old is None:
        return new
    return {name: old.get(name, frozenset()) | new.get(name, frozenset()) for name in {*old, *new}}
