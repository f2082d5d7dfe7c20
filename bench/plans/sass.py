# SPDX-License-Identifier: MIT
"""NVIDIA's disassembler, and the SASS of a kernel as basic blocks of instructions."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, field
from functools import cache, cached_property
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
