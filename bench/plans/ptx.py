# SPDX-License-Identifier: MIT
"""The widths of a kernel's accesses to global memory, by operand.

Each address is traced back to the pointer argument that it was computed from.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

WIDE = 16  # bytes; a wide access has as many or more

_INSTRUCTION = re.compile(
    r"^\s*(?:@!?%\w+\s+)?(?P<code>[a-z][\w.:]*)\s+(?P<operands>.+);", re.MULTILINE
)
_ACCESS = re.compile(r"^(?P<kind>ld|st)\.(?!param|shared|local|const|async)")
_COPY = re.compile(r"^cp\.async\.c[ag]\.shared")
_SIZE = re.compile(r"(?:\.v(?P<items>\d))?\.[a-z]+(?P<bits>\d+)$")
_ADDRESS = re.compile(r"\[(?P<base>[%\w$]+)(?:\+(?P<plus>-?\d+))?\]")
_REGISTER = re.compile(r"%[a-z]+\d+")
_PARAMETER = re.compile(r"\w+_param_0$")


class Access(NamedTuple):
    """A load from or store to global memory."""

    kind: str  # ld or st; a copy to shared memory is a load
    bytes: int
    argument: int  # the offset of the pointer in the kernel's arguments, in bytes


def accesses(ptx: str, pointers: frozenset[int]) -> Counter[Access]:
    """Count the accesses to global memory in the text of a kernel with one struct of arguments.

    Parameters
    ----------
    ptx
        The text of a kernel.
    pointers
        The offsets of the pointers in the struct. The other fields of the struct are numbers;
        addresses are computed from these numbers, too.

    Raises
    ------
    ValueError
        An address was computed from no pointer, or from several pointers.
    """
    definitions = _Definitions(ptx)
    found: Counter[Access] = Counter()
    for kind, size, base, text in _global_accesses(ptx):
        reached = definitions.arguments(base) & pointers
        if len(reached) != 1:
            raise ValueError(f"{text!r} is computed from the pointers at {sorted(reached)}")
        found[Access(kind, size, *reached)] += 1
    return found


def _global_accesses(ptx: str) -> Iterator[tuple[str, int, str, str]]:
    """Yield for each access: ld or st, its bytes, its address, and the instruction."""
    for found in _INSTRUCTION.finditer(ptx):
        code, operands = found["code"], found["operands"]
        if access := _ACCESS.match(code):
            size = _SIZE.search(code)
            address = _ADDRESS.search(operands)
            if size is None or address is None:
                raise ValueError(f"cannot read {found[0].strip()!r}")
            count = int(size["items"] or 1) * int(size["bits"]) // 8
            yield access["kind"], count, address["base"], found[0].strip()
        elif _COPY.match(code):
            _, source = _ADDRESS.findall(operands)
            count = int(operands.partition(",")[2].split(",")[1])
            yield "ld", count, source[0], found[0].strip()


class _Definitions:
    """The definitions of a kernel's registers."""

    def __init__(self, ptx: str) -> None:
        self._of: dict[str, list[tuple[str, str]]] = {}
        self._cached: dict[str, frozenset[int]] = {}
        for found in _INSTRUCTION.finditer(ptx):
            code, operands = found["code"], found["operands"]
            if code.startswith(("st.", "bra", "cp.", "bar.", "call")):
                continue
            result, _, sources = operands.partition(",")
            if operands.startswith("{"):  # items of a vector, or halves of a register
                result, _, sources = operands[1:].partition("}")
            for register in _REGISTER.findall(result):
                self._of.setdefault(register, []).append((code, sources))

    def arguments(self, register: str) -> frozenset[int]:
        """Return the offsets in the struct of arguments that a register was computed from."""
        if register not in self._cached:
            self._cached[register] = frozenset(self._reached(register))
        return self._cached[register]

    def _reached(self, register: str) -> Iterator[int]:
        seen, worklist = {register}, [register]
        while worklist:
            for code, sources in self._of.get(worklist.pop(), ()):
                if code.startswith("ld.param"):
                    yield from self._pointers_of(sources)
                elif not code.startswith("ld."):  # a value from memory is not an address
                    new = set(_REGISTER.findall(sources)) - seen
                    seen |= new
                    worklist += new

    def _pointers_of(self, address: str) -> Iterator[int]:
        """Yield the offset in the struct that an address points to."""
        found = _ADDRESS.search(address)
        if found is None:
            raise ValueError(f"cannot read the address {address!r}")
        plus = int(found["plus"] or 0)
        if _PARAMETER.match(found["base"]):
            yield plus
            return
        for code, sources in self._of.get(found["base"], ()):
            first, *others = (source.strip() for source in sources.strip().split(","))
            if _PARAMETER.match(first):
                yield plus
            elif code.startswith("mov."):
                yield from self._pointers_of(f"[{first}+{plus}]")
            elif code.startswith("add."):
                yield from self._pointers_of(f"[{first}+{plus + int(others[0])}]")
