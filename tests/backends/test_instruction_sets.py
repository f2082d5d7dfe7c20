# SPDX-License-Identifier: MIT
"""Builds for other instruction sets are right, and give the same bits as this machine's builds.

An emulator runs builds for 64-bit ARM: in it, a small program calls the libraries on copies of the
arrays. The cross compiler refuses -march=native. Speed, the memory order of a real machine and
instructions beyond ARMv8.0 are not tested.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.support.caches import fresh_process
from tests.support.cases import call_of
from tests.support.gpu_arrays import OnNumpy
from tests.support.host_code import needs_a_compiler, runs_here
from tests.support.internals import Loaded, _compile, _loading, runner
from tests.support.machines import compiled_for
from tests.support.operands import assert_same_fields
from tests.support.placed import Samples

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
pytestmark = needs_a_compiler

# A program that runs a list of kernels (see launch.h). Its arguments are a file that holds the
# arrays, their addresses (as offsets in the file) and the list (with indices of libraries in place
# of functions); the position and number of the addresses; the number of threads; the libraries.
PROGRAM = r"""
#include <cstdlib>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

int main(int, char** arguments) {
  const int file = open(arguments[1], O_RDWR);
  const long size = lseek(file, 0, SEEK_END), count = atol(arguments[3]);
  char* memory = (char*)mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  long* addresses = (long*)(memory + atol(arguments[2]));
  for (long i = 0; i < count; ++i)
    if (addresses[i]) addresses[i] += (long)memory;
  long *list = addresses + count, *task = list + 3;
  void* library = nullptr;
  for (long i = 0; i < list[0]; ++i, task += 4) {
    library = dlopen(arguments[5 + task[0]], RTLD_NOW);
    task[0] = (long)dlsym(library, "cunorm_blocks");
  }
  ((void (*)(long*, long*, int))dlsym(library, "cunorm_run"))(list, addresses, atoi(arguments[4]));
}
"""


class Emulator:
    """Stands in for the loader of libraries and for runs on the CPU; arrays must be contiguous."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.libraries, self.memory = folder, [], bytearray()
        source, program = folder / "program.cpp", folder / "program"
        source.write_text(PROGRAM)
        subprocess.run([COMPILER, source, "-o", program], check=True)
        command = [COMPILER, "-print-file-name=libc.so.6"]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        self.command = [EMULATOR, "-L", Path(found).parents[1], program, folder / "memory"]

    def load(self, path: Path) -> _compile.Entry:
        self.libraries.append(path)
        return _compile.Entry(self.start, len(self.libraries) - 1)

    def start(self, listed: bytes, addresses: bytes, threads: int) -> None:
        """Run kernels on arrays whose addresses are offsets in `memory`."""
        file, end = self.folder / "memory", len(self.memory)
        file.write_bytes(self.memory + addresses + listed)
        numbers = (str(number) for number in (end, len(addresses) // 8, threads))
        subprocess.run([*self.command, *numbers, *self.libraries], check=True)
        self.memory = bytearray(file.read_bytes()[:end])

    def loaded(self, op: Any, spec: Any, plan: Any, caps: Any) -> Any:
        """Return kernels as `cpu_loaded` does."""
        lowered = plan.lower(caps, None)
        start = runner(lowered.calls(), op.array_count)

        def run(pointers: Any) -> None:
            offsets = [0] * len(pointers)
            self.memory = bytearray()
            for slot, one in enumerate(plan.kernel_specs()):
                if pointers[slot]:
                    self.memory += bytes(-len(self.memory) % 64 + 64 + pointers[slot] % 64)
                    offsets[slot] = len(self.memory)
                    self.memory += ctypes.string_at(pointers[slot], one.nbytes)
            self.memory += bytes(-len(self.memory) % 64)
            offsets[-1] = len(self.memory)
            self.memory += bytes(lowered.workspace)
            start(offsets)
            for slot in range(op.first_output, len(pointers) - 1):
                if pointers[slot]:
                    begin, size = offsets[slot], plan.specs[slot].nbytes
                    ctypes.memmove(pointers[slot], bytes(self.memory[begin : begin + size]), size)

        return Loaded(run)

    def call(self, function: Callable[[], Any]) -> Any:
        """Call a function whose kernels are compiled for ARM and run in the emulator."""
        environment = {"CXX": COMPILER, "CUNORM_CXXFLAGS": "-O1", "OMP_NUM_THREADS": "2"}
        with fresh_process(CUNORM_CACHE_DIR=self.folder / "cache", **environment) as patch:
            patch.setattr(_compile, "entry_of", self.load)
            patch.setattr(_loading, "cpu_loaded", self.loaded)
            return function()


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    for name in (COMPILER, EMULATOR):
        if shutil.which(name) is None:
            pytest.skip(f"needs {name}")
    return Emulator(tmp_path_factory.mktemp("aarch64"))


ROWS = {"shape": (1, 2, 3, 150)}
LONG = {"shape": (1, 1, 1, 70_000), "bias": None}
LAST = Samples(2, (5, 3), 200, 4)
FIRST = LAST._replace(channels_last=False, channel_axis=1)
ODD = LAST._replace(channels=48, groups=3)
SHORT = {"shape": (1, 2, 9, 96), "center": True}
PRE = {"gate": "float32", "gate_position": "pre", "stream": "+ float32"}
GATED = ROWS | {"gate": "float16", "dgate": "bfloat16"}
HALF = ROWS | {"x": "float16", "center": True}
LAST_BACK = {"samples": LAST, "x": "float16", "dy": "bfloat16"}
ROW, GROUP = "row_norm_forward", "group_norm_forward"
ROW_BACK, GROUP_BACK = "row_norm_backward", "group_norm_backward"
CASES = {
    "rms_norm of few long rows": (ROW, LONG),
    "pre-gated layer_norm of float16": (ROW, HALF | PRE),
    "layer_norm of float16, backward": (ROW_BACK, HALF),
    "gated rms_norm of float32, backward": (ROW_BACK, GATED),
    "rms_norm with a gate of float32, backward": (ROW_BACK, GATED | {"gate": "float32"}),
    "layer_norm of short rows": (ROW, SHORT),
    "layer_norm of short rows, backward": (ROW_BACK, SHORT | {"shape": (1, 2, 9, 112)}),
    "group_norm of 48 channels, channels last": (GROUP, {"samples": ODD, "x": "bfloat16"}),
    "group_norm of float16, channels first": (GROUP, {"samples": FIRST, "x": "float16"}),
    "group_norm of float16, channels last, backward": (GROUP_BACK, LAST_BACK),
    "group_norm of float32, channels first, backward": (GROUP_BACK, {"samples": FIRST}),
}
IN_CI = {  # all other pairs of a case and a machine are exhaustive
    ("pre-gated layer_norm of float16", "x86-64"),
    ("gated rms_norm of float32, backward", "x86-64-v3"),
    ("layer_norm of short rows", "x86-64"),
    ("group_norm of 48 channels, channels last", "x86-64-v3"),
    ("group_norm of float16, channels last, backward", "x86-64"),
}


def on_machines():
    for case in product(CASES, ("x86-64-v3", "x86-64")):
        yield pytest.param(*case, marks=() if case in IN_CI else pytest.mark.exhaustive)


@pytest.mark.parametrize(("case", "machine"), [*on_machines()])
def test_older_instruction_sets_give_the_same_bits(case, machine):
    if not runs_here(machine):
        pytest.skip(f"this machine does not run code for {machine}")
    call = call_of(*CASES[case], OnNumpy())
    expected = call.run()
    with compiled_for(machine):
        assert_same_fields(call.check(), expected)


@pytest.mark.parametrize("case", CASES)
def test_results_on_arm_are_within_their_bounds_and_have_the_bits_of_this_machine(emulator, case):
    call = call_of(*CASES[case], OnNumpy())
    assert_same_fields(emulator.call(call.check), call.run())
