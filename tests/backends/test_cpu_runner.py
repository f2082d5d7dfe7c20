# SPDX-License-Identifier: MIT
"""Lists of kernels on several threads: each block runs once, each kernel after the previous one."""

import subprocess
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

import cunorm
from tests.support.caches import compiles
from tests.support.internals import (
    ArgsWriter,
    KernelBuild,
    KernelCall,
    Launch,
    _compile,
    _cpu,
    compiler,
    runner,
)

pytestmark = compiles

# A block records how often it ran, when it began and ended (by a clock that all kernels share), and
# its thread. The first block of a grid is slow.
KERNEL = """
#include "device.h"
#include "simd_streaming.h"
#include <atomic>
#include <chrono>
#include <thread>
struct Build {};
template <class B>
struct Arguments {
  std::atomic<long long>* clock;
  long long* notes;  // four numbers for each block
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
    command = [*compiler().command, "-std=c++17", "-O1", "-fopenmp", "-shared", "-fPIC"]
    subprocess.run([*command, *includes, str(source), "-o", str(library)], check=True)
    return _compile.entry_of(library)


def calls_of(grids, work, parts=0):
    """Yield a call for each grid, with an array for its notes; `work` has each call's elements."""
    slots = {f"notes {number}": number for number in range(len(grids))} | {"clock": len(grids)}
    for number, (grid, elements) in enumerate(zip(grids, work, strict=True)):
        writer = ArgsWriter(slots)
        writer.pointer("clock")  # the clock is the last array, and the first pointer
        writer.pointer(f"notes {number}")
        yield KernelCall(Launch(KernelBuild("note", ()), grid, 1), writer.finish(), elements, parts)


@pytest.fixture
def run(entry, monkeypatch):
    """Return a function that runs kernels twice on several threads, and returns the last notes."""
    monkeypatch.setattr(_cpu, "libraries", lambda builds: [entry for _ in builds])

    def run(grids, threads, work=None):
        calls = list(calls_of(grids, work or [1 << 20] * len(grids)))
        run = runner(calls, len(grids) + 1)
        cunorm.set_num_threads(threads)
        for _ in range(2):  # each time on other arrays
            notes, clock = [np.zeros((grid, 4), np.int64) for grid in grids], np.zeros(1, np.int64)
            run([array.ctypes.data for array in (*notes, clock)])
        assert clock[0] == 2 * sum(grids)
        return notes

    yield run
    cunorm.set_num_threads(None)


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_each_block_runs_once_after_the_previous_kernels(run, threads):
    for grids in ((1,), (5, 1, 9), (2, 40, 3, 3)):
        notes = run(grids, threads)
        assert all((note[:, 0] == 1).all() for note in notes)
        for before, after in pairwise(notes):
            assert before[:, 2].max() < after[:, 1].min()


def test_rows_in_parts_have_as_many_threads_as_there_are_parts(monkeypatch):
    counts = []
    entry = SimpleNamespace(blocks=0, run=lambda listed, at, threads: counts.append(threads))
    monkeypatch.setattr(_cpu, "libraries", lambda builds: [entry for _ in builds])
    cunorm.set_num_threads(40)
    for grid, work, parts in ((3, 1 << 20, 7), (3, 1 << 20, 0), (3, 100, 7)):
        runner(list(calls_of([grid], [work], parts)), 2)([0, 0])
    cunorm.set_num_threads(None)
    assert counts == [7, 3, 1]


def test_little_work_stays_on_the_thread_that_calls(run):
    """Little work stays on the calling thread even after a kernel that several threads shared."""
    (few,) = run((3,), 2, work=[100])
    many, alone = run((40, 1), 2, work=[1 << 20, 100])
    (own,) = set(few[:, 3])
    assert set(alone[:, 3]) == {own}
    assert len(set(many[:, 3])) == 2
