# SPDX-License-Identifier: MIT
"""The widths of a kernel's accesses to global memory, by operand.

Each address is traced back to the pointer argument that it was computed from.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_INSTRUCTION = re.compile(
    r"^\s*(?:@!?%\w+\s+)?(?P<code>[a-z][\w.:]*)\s+(?P<operands>.+);", re.MULTILINE
)
_ACCESS = re.compile(r"^(?:ld|st)\.(?!param|shared|local|const|async)")
_SIZE = re.compile(r"(?:\.v(?P<items>\d))?\.[a-z]+(?P<bits>\d+)$")
_ADDRESS = re.compile(r"\[(?P<base>[%\w$]+)(?:\+(?P<plus>-?\d+))?\]")
_REGISTER = re.compile(r"%[a-z]+\d+")
_PARAMETER = re.compile(r"\w+_param_0$")  # the struct of arguments


def accesses(ptx: str, pointers: frozenset[int]) -> set[tuple[int, int]]:
    """Return bytes and pointer of the accesses to global memory.

    A pointer is its offset in the kernel's one struct of arguments, in bytes; `pointers` are all of
    them. A copy to shared memory is an access. It is a ValueError if an address was computed from
    no pointer, or from several pointers.
    """
    code = [(found["code"], found["operands"]) for found in _INSTRUCTION.finditer(ptx)]
    definitions = _Definitions(code)
    found = set()
    for size, base in _global_accesses(code):
        reached = definitions.arguments(base) & pointers
        if len(reached) != 1:
            raise ValueError(f"an access of {base} is computed from the pointers {sorted(reached)}")
        found.add((size, *reached))
    return found


def _global_accesses(code: list[tuple[str, str]]) -> Iterator[tuple[int, str]]:
    """Yield the bytes and the address of each access."""
    for name, operands in code:
        if _ACCESS.match(name):
            size, address = _SIZE.search(name), _ADDRESS.search(operands)
            if size is None or address is None:
                raise ValueError(f"cannot read {name} {operands!r}")
            yield int(size["items"] or 1) * int(size["bits"]) // 8, address["base"]
        elif name.startswith(("cp.async.ca.shared", "cp.async.cg.shared")):
            _, (source, _) = _ADDRESS.findall(operands)
            yield int(operands.partition(",")[2].split(",")[1]), source


class _Definitions:
    """The definitions of a kernel's registers."""

    def __init__(self, code: list[tuple[str, str]]) -> None:
        self._of: dict[str, list[tuple[str, str]]] = {}
        self._cached: dict[str, frozenset[int]] = {}
        for name, operands in code:
            if name.startswith(("st.", "bra", "cp.", "bar.", "call")):
                continue
            result, _, sources = operands.partition(",")
            if operands.startswith("{"):  # items of a vector, or halves of a register
                result, _, sources = operands[1:].partition("}")
            for register in _REGISTER.findall(result):
                self._of.setdefault(register, []).append((name, sources))

    def arguments(self, register: str) -> frozenset[int]:
        """Return the offsets in the struct of arguments that a register was computed from."""
        if register not in self._cached:
            self._cached[register] = frozenset(self._reached(register))
        return self._cached[register]

    def _reached(self, register: str) -> Iterator[int]:
        seen, worklist = {register}, [register]
        while worklist:
            for name, sources in self._of.get(worklist.pop(), ()):
                if name.startswith("ld.param"):
                    yield from self._offsets(sources)
                elif not name.startswith("ld."):  # a value from memory is not an address
                    new = set(_REGISTER.findall(sources)) - seen
                    seen |= new
                    worklist += new

    def _offsets(self, address: str) -> Iterator[int]:
        """Yield the offset in the struct of an address."""
        found = _ADDRESS.search(address)
        if found is None:
            raise ValueError(f"cannot read the address {address!r}")
        plus = int(found["plus"] or 0)
        if _PARAMETER.match(found["base"]):
            yield plus
            return
        for name, sources in self._of.get(found["base"], ()):
            first, *others = (source.strip() for source in sources.strip().split(","))
            if name.startswith(("mov.", "add.")):
                yield from self._offsets(f"[{first}+{plus + sum(map(int, others))}]")
