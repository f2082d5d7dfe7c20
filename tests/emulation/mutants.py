# SPDX-License-Identifier: MIT
"""Mutants of a kernel: its text without one barrier or guard.

One text contains all mutants and is compiled once per build; an int selects the mutant at run time.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tests.tooling.mutations import closing

# Barriers of a block, of a warp and of a cluster; a thread's waits for its own copies, for values
# that other blocks send, and for the previous launch.
_BARRIER = re.compile(
    r"__sync(?:threads|warp)\([^()]*\);|\bcluster_begun\(\);|\bwait_for_cluster\(\);|\basync_wait<[^;{}]*>\(\);"
    r"|\bwait_for_arrivals\([^;{}]*\);|\bwait_for_prerequisites\(\);"
)
_GUARD = re.compile(r"(?<!bool )\binside\(")  # a use, not the definition
_FUNCTION = re.compile(r"__(?:device|global)__[^;{}]*?(\w+)\([^()]*\)[^;{}()]*\{")

NONE, NOTING = -1, -2  # select no mutant; select none, and note which are reached
_MOST = 256
_SWITCH = f"""
extern "C" __constant__ int mutant = {NONE};
extern "C" __device__ bool mutant_met[{_MOST}] = {{}};
__device__ inline bool without(int number) {{
  if (mutant == {NOTING}) mutant_met[number] = true;
  return mutant == number;
}}
"""


def switched(text: str) -> tuple[str, list[str]]:
    """Return a text with all mutants of a kernel's text, and their names.

    The kernel's text contains its local includes. A name is "function: line" of the missing part.
    """
    code = re.sub(r"//.*", lambda comment: " " * len(comment[0]), text)
    found = list(_barriers_and_guards(code))
    if len(found) > _MOST:
        raise ValueError(f"{len(found)} mutants, expected at most {_MOST}")
    names = [_name(text, begin, end) for begin, end, _ in found]
    changed = text
    for number, (begin, end, change) in sorted(enumerate(found), key=lambda each: -each[1][0]):
        changed = changed[:begin] + change.format(number, text[begin:end]) + changed[end:]
    return _SWITCH + changed, names


def _barriers_and_guards(code: str) -> Iterator[tuple[int, int, str]]:
    """Yield the span of each barrier and guard, and its replacement in the text of all mutants."""
    for barrier in _BARRIER.finditer(code):
        yield *barrier.span(), "{{ if (!without({})) {} }}"
    for guard in _GUARD.finditer(code):
        yield guard.start(), closing(code, guard.end()) + 1, "(without({}) || {})"


class Switch:
    """Selects the mutant in all modules that are compiled from a switched text."""

    def __init__(self, kernels: Sequence[Any]) -> None:
        self._modules = [_module(kernel) for kernel in kernels]

    def reached(self) -> set[int]:
        """Return the mutants whose barrier or guard a run has reached."""
        flags = [_variable(module, "mutant_met", ctypes.c_bool * _MOST) for module in self._modules]
        return {number for number in range(_MOST) if any(each[number] for each in flags)}

    @contextmanager
    def at(self, number: int) -> Iterator[None]:
        self._set(number)
        try:
            yield
        finally:
            self._set(NONE)

    def _set(self, number: int) -> None:
        for module in self._modules:
            _variable(module, "mutant", ctypes.c_int).value = number


def _module(kernel: Any) -> ctypes.c_void_p:
    module = ctypes.c_void_p()
    function = ctypes.c_void_p(kernel.ptr)
    if _driver().cuFuncGetModule(ctypes.byref(module), function):
        raise RuntimeError("the driver knows no module of a kernel")
    return module


def _variable(module: ctypes.c_void_p, name: str, kind: Any) -> Any:
    """Return a variable of a module; the software GPU has it in this process's memory."""
    address, size = ctypes.c_uint64(), ctypes.c_size_t()
    found = (ctypes.byref(address), ctypes.byref(size), module, name.encode())
    if _driver().cuModuleGetGlobal_v2(*found):
        raise RuntimeError(f"the module has no variable {name}")
    return kind.from_address(address.value)


def _driver() -> ctypes.CDLL:
    from tests import softgpu

    return softgpu.load()


def _name(text: str, begin: int, end: int) -> str:
    """Return the function and the line of a part of the text."""
    *_, function = _FUNCTION.finditer(text, 0, begin)
    line = text[text.rfind("\n", 0, begin) + 1 : text.index("\n", end)]
    return f"{function[1]}: {line.strip()}"
