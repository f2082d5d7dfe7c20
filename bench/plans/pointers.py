# SPDX-License-Identifier: MIT
"""Find the pointer arguments from which the addresses in a kernel's SASS are computed.

A pointer is named by its offset in the arguments, in bytes. The analysis follows pointers through
registers, along every path of the kernel.
"""

from __future__ import annotations

import re
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
_DOUBLES = ("DADD", "DMUL", "DFMA", "F2F.F64", "I2F.F64")

Slots = frozenset[int]
Reached = dict[str, Slots]


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
    is_wide = ".WIDE" in instruction.code or instruction.code.startswith(_DOUBLES)
    count = min(4, instruction.bytes // 4) if instruction.bytes >= 8 else 1 + is_wide
    starts = [int(found["number"])]
    if instruction.bytes == 32 and (other := _REGISTER.fullmatch(arguments[1])):
        starts.append(int(other["number"]))
    return [f"{found['kind']}{start + i}" for start in starts for i in range(count)]


@lru_cache(maxsize=8)
def traced(
    text: str, architecture: str, pointers: Slots
) -> tuple[list[Block], dict[Instruction, Slots]]:
    """Return a disassembly's blocks, and the pointers that each access's address comes from."""
    code, base = blocks(text), _ARGUMENTS.get(architecture, _ARGUMENTS_LATER)
    entries: list[Reached | None] = [{}] + [None] * (len(code) - 1)
    worklist, found = [0], {}
    while worklist:
        number = worklist.pop()
        reached = dict(entries[number] or {})
        for instruction in code[number].instructions:
            if instruction.name in (*LOADS, *STORES, "LDGSTS"):
                found[instruction] = _address(instruction, reached)
            _transfer(instruction, reached, base, pointers)
        for other in _successors(code, number):
            merged = _merge(entries[other], reached)
            if merged != entries[other]:
                entries[other] = merged
                worklist.append(other)
    return code, found


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


def _address(instruction: Instruction, reached: Reached) -> Slots:
    inside = _ADDRESS.findall(_DESCRIPTOR.sub("", instruction.operands))
    sources = registers(inside[-1]) if inside else []
    return frozenset().union(*(reached.get(register, frozenset()) for register in sources))


def _transfer(instruction: Instruction, reached: Reached, base: int, pointers: Slots) -> None:
    """Note the pointers from which the registers that an instruction writes are computed."""
    written = results(instruction)
    constants = [int(text, 16) - base for text in _CONSTANT.findall(instruction.operands)]
    slots: Slots = frozenset()
    if written and instruction.name.removeprefix("U").startswith(_ADDRESSES):
        sources = registers(instruction.operands.partition(",")[2])
        slots = pointers.intersection(constants).union(*(reached.get(r, slots) for r in sources))
    wide_constant = instruction.name in ("LDC", "ULDC", "LDCU") and constants
    for index, register in enumerate(written):
        now = frozenset({constants[0] + 4 * index} & pointers) if wide_constant else slots
        if instruction.predicate:
            now |= reached.get(register, frozenset())
        reached[register] = now


def _merge(old: Reached | None, new: Reached) -> Reached:
    if old is None:
        return new
    return {name: old.get(name, frozenset()) | new.get(name, frozenset()) for name in {*old, *new}}
