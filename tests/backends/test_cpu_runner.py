# SPDX-License-Identifier: MIT
"""Lists of kernels on several threads: each block once, each kernel after the one before."""

import ctypes
import struct
import subprocess
from itertools import pairwise

import numpy as np
import pytest

import cunorm
from tests.support.caches import compiles
from tests.support.internals import Task, _compile, compiler, runner

pytestmark = compiles

# A block notes which thread ran it, how often it ran, when it began and ended by a clock that all
# kernels share, and where some other array is. The first block of a grid dawdles.
KERNEL = """
#include "device.h"
#include "simd_streaming.h"
#include <atomic>
#include <chrono>
#include <thread>
struct Build {};
template <class B>
struct Arguments {
  long long* notes;  // of five numbers for each block
  std::atomic<long long>* clock;
  long long other;
};
void note(const Arguments<Build>& arguments) {
  long long* const notes = arguments.notes + 5 * blockIdx.x;
  notes[0] += 1;
  notes[1] = ++*arguments.clock;
  if (blockIdx.x == 0) std::this_thread::sleep_for(std::chrono::milliseconds(20));
  notes[2] = ++*arguments.clock;
  notes[3] = std::hash<std::thread::id>()(std::this_thread::get_id()) >> 1;
  notes[4] = arguments.other;
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
    command = [*compiler().command, "-std=c++17", "-O1", "-fopenmp", "-shared", "-fPIC"]
    subprocess.run([*command, *includes, str(source), "-o", str(library)], check=True)
    return _compile.entry_of(ctypes.CDLL(str(library)))


WORDS = struct.Struct("<3Q")  # of the arguments


def notes_of(grid):
    return np.zeros((grid, 5), np.int64)


def tasks_of(entry, grids, work=1 << 20):
    return [Task(entry, grid, WORDS.size * place, work) for place, grid in enumerate(grids)]


def address_of(*arrays):
    return [array.ctypes.data for array in arrays]


def for_each(*notes_of_tasks):
    """Return the arguments of tasks, each of which has notes of its own: all but the last array."""
    *notes, clock = notes_of_tasks
    return b"".join(WORDS.pack(pointer, clock, 0) for pointer in notes)


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@pytest.mark.parametrize("grids", [(), (1,), (5, 1, 9), (2, 40, 3, 3)], ids=str)
def test_each_block_runs_once_after_the_kernels_before(entry, grids, threads):
    """As often as they are run, on arrays that are others each time."""
    run = runner(tasks_of(entry, grids), lambda pointers: for_each(*pointers), len(grids) + 1)
    cunorm.set_num_threads(threads)
    try:
        for _ in range(2):
            notes, clock = [notes_of(grid) for grid in grids], np.zeros(1, np.int64)
            run(address_of(*notes, clock))
            assert all((note[:, 0] == 1).all() for note in notes)
            assert clock[0] == 2 * sum(grids)
            for before, after in pairwise(notes):
                assert before[:, 2].max() < after[:, 1].min()
    finally:
        cunorm.set_num_threads(None)


def test_little_work_stays_on_the_thread_that_calls(entry):
    """Also after a kernel of which several threads had their share."""
    few, many, alone = (notes_of(grid) for grid in (3, 40, 1))
    clock = np.zeros(1, np.int64)

    def run(**work):
        notes = [{"few": few, "many": many, "alone": alone}[name] for name in work]
        tasks = [
            Task(entry, len(note), WORDS.size * place, elements)
            for place, (note, elements) in enumerate(zip(notes, work.values(), strict=True))
        ]
        kernels = runner(tasks, lambda pointers: for_each(*pointers), len(notes) + 1)
        kernels(address_of(*notes, clock))

    cunorm.set_num_threads(2)
    try:
        run(few=100)
        run(many=1 << 20, alone=100)
    finally:
        cunorm.set_num_threads(None)
    (own,) = set(few[:, 3])
    assert set(alone[:, 3]) == {own}
    assert len(set(many[:, 3])) == 2


def test_an_address_is_added_in_each_word_that_an_array_has_a_part_in(entry):
    """At offsets, too; and 0 where there is no such array."""
    asked = []

    def arguments(pointers):
        asked.append(pointers)
        notes, clock, other, _ = pointers
        places = enumerate((other, other + 64, other - 8, 7))
        return b"".join(WORDS.pack(notes + 40 * n, clock, said % 2**64) for n, said in places)

    run = runner(tasks_of(entry, 4 * (1,)), arguments, 4)
    times = len(asked)
    for other in (0, 1 << 12, 3 << 45, 0):
        notes, clock = notes_of(4), np.zeros(1, np.int64)
        run([*address_of(notes, clock), other, 5])
        assert notes[:, 0].tolist() == [1, 1, 1, 1]
        assert notes[:, 4].tolist() == [other, other + 64, other - 8, 7]
    assert len(asked) == times
