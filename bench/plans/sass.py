# SPDX-License-Identifier: MIT
"""The SASS of a kernel: nvdisasm's text, basic blocks, and the pointers that accesses go through.

A pointer argument is named by its offset in the arguments, in bytes. `traced` follows pointers
through registers, along every path of the kernel.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from importlib.util import find_spec
from pathlib import Path

MISSING = (
    "nvdisasm was not found: pip install nvidia-cuda-nvdisasm, "
    "or have CUDA's on PATH or in CUDA_HOME/bin"
)

_LABEL = re.compile(r"^(?P<name>[.$\w]+):\s*$")
_LINE = re.compile(
    r"^\s*/\*[0-9a-f]+\*/\s+(?:(?P<predicate>@!?U?P\w+)\s+)?(?P<code>[A-Z][\w.]*)(?P<operands>[^;]*);"
)
_TARGET = re.compile(r"`\((?P<label>\.[^)]+)\)")  # a label in this function begins with a dot
_SIZE = re.compile(r"\.(?P<bits>U8|S8|U16|S16|64|128|256)(?=\.|$)")
_BYTES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}


@cache
def disassembler() -> str | None:
    """Find nvdisasm on PATH, in CUDA_HOME or in NVIDIA's wheels."""
    spec = find_spec("nvidia")
    wheels = map(Path, (spec and spec.submodule_search_locations) or ())
    folders = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin")]
    folders += [folder for wheel in wheels for folder in sorted(wheel.glob("*/bin"))]
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *map(str, folders)])
    return shutil.which("nvdisasm", path=path)


def disassemble(cubin: bytes) -> str:
    """Return the SASS of a cubin's kernels; RuntimeError without a disassembler."""
    tool = disassembler()
    if tool is None:
        raise RuntimeError(MISSING)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin + b"\0")  # CuPy cuts off the last byte, which is 0
        run = subprocess.run([tool, "-c", "-ndf", file], capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"nvdisasm failed: {run.stderr.strip()}")
    return run.stdout


@dataclass(frozen=True, eq=False)
class Instruction:
    """One instruction of a disassembly."""

    predicate: str
    code: str
    operands: str

    @cached_property
    def name(self) -> str:
        """The code without its qualifiers."""
        return self.code.partition(".")[0]

    @cached_property
    def bytes(self) -> int:
        """The bytes that an access moves for a thread."""
        found = _SIZE.search(self.code)
        return _BYTES[found["bits"]] if found else 4

    @cached_property
    def arguments(self) -> list[str]:
        """The list of operands."""
        return [text.strip() for text in self.operands.split(",")]

    @cached_property
    def target(self) -> str:
        """The label in this function that it may branch to, or ""; a CALL may be a branch."""
        found = _TARGET.search(self.operands)
        return found["label"] if found and self.name in ("BRA", "BRX", "JMP", "JMX", "CALL") else ""

    @property
    def is_call(self) -> bool:
        """Whether it calls another function: the called functions are slow paths."""
        return self.name == "CALL" and not self.target

    @property
    def is_exit(self) -> bool:
        """Whether a warp may end here."""
        return self.name in ("EXIT", "RET")

    @property
    def is_certain(self) -> bool:
        """Whether it is a branch or an exit for every thread."""
        if self.predicate not in ("", "@PT", "@!UPT"):
            return False
        branches = self.code in ("BRA", "JMP", "BRA.U", "CALL.REL.NOINC") and bool(self.target)
        return self.is_exit or (branches and len(self.arguments) == 1)


@dataclass(eq=False)
class Block:
    """A basic block: instructions in sequence, and the numbers of its successors."""

    instructions: list[Instruction] = field(default_factory=list)
    next: list[int] = field(default_factory=list)

    @property
    def is_end(self) -> bool:
        """Whether a warp may end here."""
        return not self.next or any(one.is_exit for one in self.instructions[-1:])


def blocks(text: str) -> list[Block]:
    """Return the blocks of the kernel, the first function of a text; block 0 is its entry.

    The functions after it, slow paths of divisions and roots, are left out.
    """
    found, labels = [Block()], {}
    for line in text.splitlines():
        if match := _LINE.match(line):
            one = Instruction(match["predicate"] or "", match["code"], match["operands"].strip())
            found[-1].instructions.append(one)
            if one.target or one.is_exit:
                found.append(Block())
        elif (match := _LABEL.match(line)) and found[0].instructions:
            if match["name"].startswith("$"):
                break
            if found[-1].instructions:
                found.append(Block())
            labels[match["name"]] = len(found) - 1
    for number, block in enumerate(found):
        last = block.instructions[-1] if block.instructions else None
        if last is not None and last.target in labels:
            block.next.append(labels[last.target])
        if (last is None or not last.is_certain) and number + 1 < len(found):
            block.next.append(number + 1)
    return found


# --- pointers -------------------------------------------------------------------------------------

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
