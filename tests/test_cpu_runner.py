# SPDX-License-Identifier: MIT
"""Lists of kernels on several threads: each block once, each kernel after the one before."""

import ctypes
import struct
import subprocess
from itertools import pairwise

import numpy as np
import pytest

from cunorm import _cpu
from cunorm._cpu import Task, _compile, runner

pytestmark = pytest.mark.skipif(_cpu.compiler() is None, reason="needs a C++ compiler")

# A block notes which thread ran it, how often it ran, and when it began and ended by a clock that
# all kernels share. The first block of a grid dawdles.
KERNEL = """
#include "device.h"
#include "simd.h"
#include <atomic>
#include <chrono>
#include <thread>
struct Build {};
template <class B>
struct Arguments {
  long long* notes;  // of four numbers for each block
  std::atomic<long long>* clock;
};
void note(const Arguments<Build>& arguments) {
  long long* const notes = arguments.notes + 4 * blockIdx.x;
  notes[0] += 1;
  notes[1] = ++*arguments.clock;
  if (blockIdx.x == 0) std::this_thread::sleep_for(std::chrono::milliseconds(20));
  notes[2] = ++*arguments.clock;
  notes[3] = std::hash<std::thread::id>()(std::this_thread::get_id()) >> 1;
}
#define KERNEL note
#include "launch.h"
"""


@pytest.fixture(scope="module")
def entry(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runner")
    source, library = folder / "note.cpp", folder / "note.so"
    source.write_text(KERNEL)
    includes = [f"-I{_compile._HOST}", f"-I{_compile._INCLUDE}", "-Ikernels_cu"]
    command = [*_cpu.compiler().command, "-std=c++17", "-O1", "-fopenmp", "-shared", "-fPIC"]
    subprocess.run([*command, *includes, str(source), "-o", str(library)], check=True)
    return _compile.entry_of(ctypes.CDLL(str(library)))


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@pytest.mark.parametrize("grids", [(), (1,), (5, 1, 9), (2, 40, 3, 3)], ids=str)
def test_each_block_runs_once_after_the_kernels_before(entry, grids, threads):
    notes, clock = [np.zeros((grid, 4), np.int64) for grid in grids], np.zeros(1, np.int64)
    arguments = [struct.pack("<2Q", note.ctypes.data, clock.ctypes.data) for note in notes]
    tasks = [Task(entry, grid, 16 * place, 1 << 20) for place, grid in enumerate(grids)]
    _cpu.set_num_threads(threads)
    try:
        runner(tasks)(b"".join(arguments))
    finally:
        _cpu.set_num_threads(None)
    assert all((note[:, 0] == 1).all() for note in notes)
    for before, after in pairwise(notes):
        assert before[:, 2].max() < after[:, 1].min()


def test_little_work_stays_on_the_thread_that_calls(entry):
    """Also after a kernel of which several threads had their share."""
    few, many, alone = (np.zeros((grid, 4), np.int64) for grid in (3, 40, 1))
    clock = np.zeros(1, np.int64)

    def run(**work):
        notes = {"few": few, "many": many, "alone": alone}
        tasks, arguments = [], b""
        for name, elements in work.items():
            tasks.append(Task(entry, len(notes[name]), len(arguments), elements))
            arguments += struct.pack("<2Q", notes[name].ctypes.data, clock.ctypes.data)
        runner(tasks)(arguments)

    _cpu.set_num_threads(2)
    try:
        run(few=100)
        run(many=1 << 20, alone=100)
    finally:
        _cpu.set_num_threads(None)
    (own,) = set(few[:, 3])
    assert set(alone[:, 3]) == {own}
    assert len(set(many[:, 3])) == 2
